"""Graphs made ahead: a run asks for no other one, with any mesh, accumulation, evaluation, ragged batch or resumption.

XLA's CPU client looks compiled graphs up and cannot read them back, so a graph that was made before is counted apart
from one that never was.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Ranks
from tests.support.recipes import TINY, tiny_recipe, write_recipe

PROGRAMS = "tests.support.compilation_programs"
EVALUATED = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 3}
LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TENSOR_PARALLEL: dict[str, Any] = {
    "config_name": "llama",
    "config_overrides": {**LLAMA, "num_key_value_heads": 2, "vocab_size": 260},
    "tensor_parallel_size": 2,
}
PIPELINE: dict[str, Any] = {
    "config_name": "llama",
    "config_overrides": {**LLAMA, "num_hidden_layers": 4, "vocab_size": 260},
    "pipeline_parallel_size": 2,
}
GPT2_PIPELINE = {"config_overrides": {**TINY, "n_layer": 2}, "pipeline_parallel_size": 2}
QWEN3_PIPELINE = {
    **PIPELINE,
    "config_name": "qwen3",
    "config_overrides": {**PIPELINE["config_overrides"], "num_key_value_heads": 2},
}
INTERLEAVED = {"pipeline_schedule": "interleaved", "pipeline_chunks": 2}

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "two ranks, ZeRO-1": (2, {"zero_1": True, "gradient_accumulation_steps": 2, **EVALUATED})
}
MORE: dict[str, tuple[int, dict[str, Any]]] = {
    "plain": (1, {}),
    "accumulation": (1, {"gradient_accumulation_steps": 5, **EVALUATED}),
    "qwen3": (1, {"config_name": "qwen3", "config_overrides": {**LLAMA, "num_key_value_heads": 2}, **EVALUATED}),
    "two ranks, tensor parallel": (2, {**TENSOR_PARALLEL, **EVALUATED}),
    "two ranks": (2, EVALUATED),
    "two ranks, accumulation": (2, {"gradient_accumulation_steps": 4, **EVALUATED}),
    "bfloat16": (1, {"dtype": "bfloat16", "gradient_accumulation_steps": 2, **EVALUATED}),
    "autocast": (1, {"bf16": True, "gradient_checkpointing": True, **EVALUATED}),
    "schedules": (1, {"lr_scheduler_type": "cosine", "warmup_steps": 2, "max_grad_norm": 0.0, **EVALUATED}),
    "sgd": (1, {"optim": "sgd", "optim_args": "momentum=0.9", "weight_decay": 0.1, **EVALUATED}),
    "smoothing": (1, {"label_smoothing_factor": 0.1, "eval_on_start": True, **EVALUATED}),
    "best model": (1, {"load_best_model_at_end": True, "save_steps": 2, **EVALUATED}),
    "dropped last batch": (1, {"dataloader_drop_last": True, "dataloader_num_workers": 1, **EVALUATED}),
    "tensor parallel, accumulation": (2, {**TENSOR_PARALLEL, "gradient_accumulation_steps": 3, **EVALUATED}),
    "sequence parallel, bfloat16": (
        2,
        {**TENSOR_PARALLEL, "sequence_parallel": True, "dtype": "bfloat16", **EVALUATED},
    ),
    "four ranks": (4, {**TENSOR_PARALLEL, "zero_1": True, "gradient_accumulation_steps": 2, **EVALUATED}),
    "pipeline": (2, {**PIPELINE, "gradient_accumulation_steps": 6, **EVALUATED}),
    "interleaved pipeline": (2, {**PIPELINE, **INTERLEAVED, "gradient_accumulation_steps": 6, **EVALUATED}),
    "pipeline, gpt2": (2, {**GPT2_PIPELINE, "gradient_accumulation_steps": 2}),
    "pipeline, qwen3": (2, {**QWEN3_PIPELINE, "gradient_accumulation_steps": 2}),
    "ZeRO-1, bfloat16": (2, {"zero_1": True, "dtype": "bfloat16", **EVALUATED}),
}
pytestmark = pytest.mark.xla


def follow(ranks: Ranks, folder: Path, nproc: int, fields: dict[str, Any], metrics: str | None = None) -> list[Any]:
    """Makes the graphs ahead, trains, and resumes; what each rank asked for then."""
    data_ranks = nproc // fields.get("tensor_parallel_size", 1) // fields.get("pipeline_parallel_size", 1)
    samples = 3 * fields.get("gradient_accumulation_steps", 1) * data_ranks  # a step and a half: every other is ragged
    given = {
        "save_steps": 2,
        "disable_tqdm": True,
        "max_train_samples": samples,
        "compile_cache": str(folder / "cache"),
    }
    given |= fields
    recipe = str(write_recipe(folder, device="xla", **given))
    for made in ranks.run(f"{PROGRAMS}:precompiled", recipe, metrics, nproc=nproc).check():
        assert made["made before"] == 0
        assert made["not made before"] == made["requested"] > 0
        assert "warning" not in made["printed"]  # nothing in these graphs that a compiler rejects
    assert not (folder / "out").exists()
    asked = []
    for steps in (2, 4):
        asked += ranks.run(f"{PROGRAMS}:trained", recipe, steps, metrics, nproc=nproc).check()
    assert (folder / "out" / "checkpoint-4").is_dir()
    return asked


@pytest.mark.parametrize("name", CASES)
def test_a_run_asks_for_no_graph_that_was_not_made_ahead(ranks: Ranks, tmp_path: Path, name: str) -> None:
    check(follow(ranks, tmp_path, *CASES[name]))
    nproc = CASES[name][0]
    check(ranks.run(f"{PROGRAMS}:evaluated", str(tmp_path / "out" / "checkpoint-4"), nproc=nproc).check())


@pytest.mark.prove
@pytest.mark.parametrize("watch", [False, True])
def test_nor_does_the_evaluation_of_the_run(ranks: Ranks, tmp_path: Path, watch: bool) -> None:
    follow(ranks, tmp_path, 1, EVALUATED)
    check(ranks.run(f"{PROGRAMS}:evaluated", str(tmp_path / "out"), watch).check())


@pytest.mark.prove
@pytest.mark.parametrize("name", MORE)
def test_nor_do_other_runs(ranks: Ranks, tmp_path: Path, name: str, record_property: Any) -> None:
    check(follow(ranks, tmp_path, *MORE[name]))
    record_property("recipes", 1)


@pytest.mark.prove
def test_nor_does_one_with_metrics(ranks: Ranks, tmp_path: Path) -> None:
    check(follow(ranks, tmp_path, 1, EVALUATED, f"{PROGRAMS}:metrics"))


def check(asked: list[dict[str, int]]) -> None:
    for each in asked:
        assert each["not made before"] == 0
        assert each["made before"] == each["requested"] > 0


@pytest.mark.prove
def test_the_test_can_fail(ranks: Ranks, tmp_path: Path) -> None:
    """A run of another shape asks for graphs that were not made."""
    cache = str(tmp_path / "cache")
    recipe = write_recipe(tmp_path, device="xla", compile_cache=cache)
    ranks.run(f"{PROGRAMS}:precompiled", str(recipe)).check()
    write_recipe(tmp_path, device="xla", compile_cache=cache, per_device_train_batch_size=3)
    (asked,) = ranks.run(f"{PROGRAMS}:trained", str(recipe), 2).check()
    assert asked["not made before"] > 0


@pytest.mark.prove
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("parallel", [1, 2])
def test_of_saved_weights_none_are_read(ranks: Ranks, tmp_path: Path, dtype: str, parallel: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from stepmark.data.tokenize.tokenizer import byte_tokenizer

    model = LlamaForCausalLM(LlamaConfig(**{**LLAMA, "num_key_value_heads": 2, "vocab_size": 258}))
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    fields = {"config_name": None, "config_overrides": None, "tokenizer_name": None, "dtype": dtype}
    cache = str(tmp_path / "cache")
    given = {**fields, "device": "xla", "compile_cache": cache, "tensor_parallel_size": parallel}
    recipe = str(write_recipe(tmp_path, **given, model_name_or_path=str(tmp_path / "model")))
    weights = tmp_path / "model" / "model.safetensors"
    weights.rename(tmp_path / "weights")
    ranks.run(f"{PROGRAMS}:precompiled", recipe, nproc=parallel).check()
    (tmp_path / "weights").rename(weights)
    check(ranks.run(f"{PROGRAMS}:trained", recipe, 3, nproc=parallel).check())


def test_no_data_is_needed(ranks: Ranks, tmp_path: Path) -> None:
    fields = {**tiny_recipe(tmp_path), "train_file": str(tmp_path / "there is none.txt")}
    recipe = write_recipe(tmp_path, **{**fields, "device": "xla", "compile_cache": str(tmp_path / "cache")})
    (made,) = ranks.run(f"{PROGRAMS}:precompiled", str(recipe)).check()
    lines = made["printed"].splitlines()
    assert lines[0].split() == ["graph", "operations", "parameters", "seconds", "state"]
    assert [line.split()[0] for line in lines[1 : 1 + made["requested"]]] == ["step"] * made["requested"]
    (again,) = ranks.run(f"{PROGRAMS}:precompiled", str(recipe)).check()
    assert again["not made before"] == 0
    assert "in the cache" in again["printed"]
