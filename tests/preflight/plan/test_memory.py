"""What a plan says of a rank's memory is what real training allocates: models, sizes, meshes, with and without gradient
checkpointing.

Measured are real runs of the same recipe, with every rank, by torch's own allocator: see tests/support/memory_programs.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from stepmark.config.recipe import read_recipe
from stepmark.preflight.plan.plan import plan_recipe
from stepmark.preflight.plan.simulated_mesh import DEVICES
from stepmark.preflight.plan.stages import trace_deep, trace_stages
from stepmark.preflight.plan.step_setup import StepSetup
from stepmark.recipe.model import build_config, build_tokenizer
from tests.support.ranks import Ranks
from tests.support.recipes import write_recipe, write_text

LIMIT = 500  # seconds for a run; products in bfloat16 are slow on some processors
TOLERANCE = 0.02  # promised are 0.1
OF_STAGES = 0.03  # which hold less, so that the small tensors of the loop weigh more
LENGTH = 128
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 3, "n_embd": 128, "n_head": 4},
    "gpt2-deep": {"n_layer": 14, "n_embd": 96, "n_head": 4},
    "gpt2-wide": {"n_layer": 2, "n_embd": 512, "n_head": 8},
    "llama": {
        "num_hidden_layers": 3,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 352,
    },
    "llama-deep": {
        "num_hidden_layers": 12,
        "hidden_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 256,
    },
    "qwen3": {
        "num_hidden_layers": 4,
        "hidden_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "intermediate_size": 512,
    },
    "qwen3-vocabulary": {
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 32000,
    },
}
EVALUATING = {  # with data for a complete batch
    "eval_strategy": "steps",
    "eval_steps": 1,
    "per_device_eval_batch_size": 16,
    "validation_split_percentage": 25,
}
BFLOAT16 = {"dtype": "bfloat16", "gradient_accumulation_steps": 3}
MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp": (2, {}),
    "dp-bf16": (2, BFLOAT16),
    "zero": (2, {"zero_1": True}),
    "zero-bf16": (2, {"zero_1": True, **BFLOAT16}),
    "fsdp": (2, {"fsdp": "full_shard"}),
    "fsdp-bf16": (2, {"fsdp": "shard_grad_op", **BFLOAT16}),
    "hosted": (2, {"data_parallel_replicas": 5}),
    "hosted-zero": (2, {"zero_1": True, "data_parallel_replicas": 8}),
    "hosted-fsdp": (2, {"fsdp": "full_shard", "data_parallel_replicas": 4}),
    "tp": (2, {"tensor_parallel_size": 2}),
    "sp": (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),
    "tp-autocast": (2, {"tensor_parallel_size": 2, "bf16": True, "optim": "sgd", "optim_args": "momentum=0.9"}),
    "evaluating": (1, EVALUATING),
    "zero-tp": (4, {"tensor_parallel_size": 2, "zero_1": True, "sequence_parallel": True}),
}
SAMPLE = [("gpt2", "zero-bf16", False), ("llama", "sp", True)]
STAGES = {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 4}
PIPELINES: dict[str, tuple[int, dict[str, Any]]] = {
    "pp": (2, STAGES),
    "pp-bf16": (2, {**STAGES, "dtype": "bfloat16"}),
    "pp-gpipe": (2, {**STAGES, "pipeline_schedule": "gpipe", "gradient_accumulation_steps": 8}),
    "pp-interleaved": (
        2,
        {**STAGES, "pipeline_schedule": "interleaved", "pipeline_chunks": 2, "gradient_accumulation_steps": 8},
    ),
    "pp-evaluating": (2, {**STAGES, **EVALUATING}),
    "pp-tp": (4, {**STAGES, "tensor_parallel_size": 2}),
    "pp-tp-sp": (4, {**STAGES, "tensor_parallel_size": 2, "sequence_parallel": True}),
    "pp-zero": (4, {**STAGES, "zero_1": True}),
    "pp 3": (3, {"pipeline_parallel_size": 3, "gradient_accumulation_steps": 6}),
}
NEED_LAYERS = ("pp 3", "pp-interleaved")
DEEP, SHALLOW_STAGES = ("gpt2-deep", "llama-deep"), ("gpt2", "llama")


def cases() -> list[Any]:
    """Every model on every mesh, and each of them with and without checkpointing; those beyond the sample in
    `make prove`."""
    pairs = product(enumerate(MODELS), enumerate(MESHES))
    each = [*SAMPLE, *((model, mesh, (row + column) % 2 == 1) for (row, model), (column, mesh) in pairs)]
    return [pytest.param(*case, marks=[pytest.mark.prove] * (case not in SAMPLE)) for case in dict.fromkeys(each)]


def recipe_of(folder: Path, model: str, **fields: Any) -> Path:
    """Some of the text is for validation, which runs between the steps where the fields ask for it: more batches than
    go through a pipeline at a time."""
    write_text(folder / "text.txt", lines=1200)
    return write_recipe(
        folder,
        config_name=model.split("-")[0],
        config_overrides=MODELS[model],
        per_device_train_batch_size=4,
        save_strategy="no",
        **{"block_size": LENGTH, "max_steps": 3, **fields},
    )


def setup_of(recipe: Path, ranks: int) -> StepSetup:
    read = read_recipe(str(recipe), {})
    config = build_config(read.model, build_tokenizer(read.model))
    length = read.data.block_size
    assert length is not None
    return StepSetup(config, read.training, ranks, length, DEVICES["cpu"])


def planned(recipe: Path, ranks: int) -> int:
    """The most bytes in any part of the step."""
    return sum(trace_deep(setup_of(recipe, ranks)).highest[1].values())


@pytest.mark.parametrize(("model", "mesh", "checkpointing"), cases())
def test_planned_peak_is_the_measured_one(
    ranks: Ranks, tmp_path: Path, model: str, mesh: str, checkpointing: bool, record_property: Any
) -> None:
    size, fields = MESHES[mesh]
    sample = (model, mesh, checkpointing) in SAMPLE
    less = {"max_steps": 2, "block_size": LENGTH // 4} if sample else {}  # the first step is not measured
    recipe = recipe_of(tmp_path, model, gradient_checkpointing=checkpointing, **less, **fields)
    peaks = ranks.run("tests.support.memory_programs:measured_peak", str(recipe), nproc=size, timeout=LIMIT).check()
    difference = planned(recipe, size) / peaks[0] - 1
    print(f"planned {difference:+.2%} of what was allocated")
    assert abs(difference) < TOLERANCE
    record_property("runs planned and measured", 1)


def pipeline_cases() -> list[Any]:
    """Three stages, and two with two stages each, need the layers of the deep models."""
    pairs = [(model, mesh) for mesh in PIPELINES for model in (DEEP if mesh in NEED_LAYERS else SHALLOW_STAGES)]
    pairs += [(model, "pp") for model in DEEP]
    each = [(model, mesh, checkpointing) for model, mesh in pairs for checkpointing in (False, True)]
    sample = (("gpt2", "pp", False), ("llama", "pp", True))
    return [pytest.param(*case, marks=[pytest.mark.prove] * (case not in sample)) for case in each]


@pytest.mark.parametrize(("model", "mesh", "checkpointing"), pipeline_cases())
def test_planned_stages_are_the_measured_ones(
    ranks: Ranks, tmp_path: Path, model: str, mesh: str, checkpointing: bool, record_property: Any
) -> None:
    """On every rank of the pipeline, of which each holds something else."""
    size, fields = PIPELINES[mesh]
    steps = 3 if "eval_strategy" in fields else 2  # an evaluation between two that are measured
    recipe = recipe_of(tmp_path, model, gradient_checkpointing=checkpointing, max_steps=steps, **fields)
    peaks = ranks.run("tests.support.memory_programs:measured_peak", str(recipe), nproc=size, timeout=LIMIT).check()
    for stage in trace_stages(setup_of(recipe, size), every=True):
        first = stage.rank * size // fields["pipeline_parallel_size"]
        difference = sum(stage.highest[1].values()) / peaks[first] - 1
        print(f"pipeline rank {stage.rank}: planned {difference:+.2%} of what was allocated")
        assert abs(difference) < OF_STAGES
    record_property("runs planned and measured", 1)


@pytest.mark.prove
@pytest.mark.parametrize("checkpointing", [False, True])
def test_planned_peak_is_what_the_process_grows_by(ranks: Ranks, tmp_path: Path, checkpointing: bool) -> None:
    """Resident memory, which also has what is no tensor; so the model is large enough to outweigh that."""
    write_text(tmp_path / "text.txt", lines=2000)
    recipe = write_recipe(
        tmp_path,
        config_overrides={"n_layer": 8, "n_embd": 768, "n_head": 12},
        block_size=512,
        max_steps=3,
        per_device_train_batch_size=4,
        save_strategy="no",
        gradient_checkpointing=checkpointing,
    )
    (grown,) = ranks.run("tests.support.memory_programs:measured_resident_peak", str(recipe), timeout=500).check()
    assert planned(recipe, 1) == pytest.approx(grown, rel=0.1)


@pytest.mark.prove
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("mesh", ["one", "zero", "tp"])
def test_planned_adapters_are_the_measured_ones(
    ranks: Ranks, tmp_path: Path, mesh: str, checkpointing: bool, record_property: Any
) -> None:
    size, fields = MESHES[mesh]
    write_text(tmp_path / "text.txt", lines=400)
    recipe = write_recipe(
        tmp_path,
        config_name=None,
        config_overrides=None,
        model_name_or_path=str(save_base(tmp_path / "base")),
        peft="lora",
        lora_dropout=0.1,
        block_size=LENGTH,
        max_steps=3,
        per_device_train_batch_size=4,
        save_strategy="no",
        gradient_checkpointing=checkpointing,
        **fields,
    )
    peaks = ranks.run("tests.support.memory_programs:measured_peak", str(recipe), nproc=size, timeout=LIMIT).check()
    # What ranks do not divide stays in transformers' mapping of the file, of which the other pages are no memory.
    mapped = (tmp_path / "base" / "model.safetensors").stat().st_size if mesh == "tp" else 0
    difference = plan_recipe(read_recipe(str(recipe), {}), size).own.trace.peak / (peaks[0] - mapped) - 1
    print(f"planned {difference:+.2%} of what was allocated")
    assert abs(difference) < TOLERANCE
    record_property("runs planned and measured", 1)


def save_base(folder: Path) -> Path:
    """A Llama with random weights, to be adapted."""
    LlamaForCausalLM(LlamaConfig(**MODELS["llama"], vocab_size=259)).save_pretrained(folder)
    return folder
