"""A model whose layers are compiled by torch.compile trains the same on every mesh and after a kill."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import AutoModelForImageClassification, ViTConfig

from stepmark import PadTo, Trainer, TrainingArguments
from stepmark.cli.main import run
from stepmark.config.training_fields import TrainingFields
from stepmark.errors import UsageError
from stepmark.recipe import train as recipe_train
from stepmark.trainer.run import check_device
from stepmark.trainer.run_folder.run_log import read_metrics
from stepmark.training.compiled_layers import check_compiler, layers_of
from tests.support.models import build
from tests.support.programs import Blocks, tiny_model
from tests.support.ranks import Ranks
from tests.support.recipes import write_recipe

PROGRAM = "tests.support.programs:train"
OPTIONS = {"device": "cpu", "layers": 2, "max_steps": 6, "save_strategy": "no"}

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of dynamo, as it traces


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEPMARK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # so that it is restored
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    torch.compiler.reset()
    return tmp_path / "cache"


def made(folder: Path, model: Any = None, **options: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "output_dir": str(folder), "max_steps": 4, "per_device_train_batch_size": 2, "logging_steps": 1,
        "save_strategy": "no", "disable_tqdm": True, "device": "cpu", "torch_compile_backend": "eager",
    }  # fmt: skip
    given = {name: options.pop(name) for name in ("train_dataset", "eval_dataset", "data_collator") if name in options}
    data = {"train_dataset": Blocks(8), "eval_dataset": Blocks(3, seed=1), **given}
    return Trainer(model or tiny_model(layers=3), TrainingArguments(**{**defaults, **options}), **data)


def graphs(trainer: Trainer) -> int:
    return trainer.context.runtime.requested_graphs() or 0


def late(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == "compilation"]


def test_layers_share_a_graph_and_names_stay_and_evaluations_are_not_compiled(tmp_path: Path) -> None:
    plain, compiled = made(tmp_path / "plain", torch_compile_backend=None), made(tmp_path / "compiled")
    names, before = list(plain.model.state_dict()), graphs(compiled)
    losses = []
    for trainer in (plain, compiled):
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
        losses.append([trainer.evaluate()["eval_loss"]])
    assert losses[:2] == losses[2:]
    assert list(compiled.model.state_dict()) == names
    assert graphs(compiled) == before + 1
    logged = [line for line in read_metrics(tmp_path / "compiled") if "graph_compilations" in line]
    assert [line["graph_compilations"] - before for line in logged] == [1] * 4
    assert not any("graph_executions" in line for line in logged)
    assert late(tmp_path / "compiled") == []


def test_a_late_compilation_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = made(tmp_path, train_dataset=Blocks(7))  # stacked: the fourth step has a single sample
    trainer.train()
    (event,) = late(tmp_path)
    assert (event["step"], event["where"], event["count"]) == (4, "step", 1)
    assert "with input_ids [1, 16] int64" in event["message"]
    assert "step 4 compiled a graph again" in caplog.text


@pytest.mark.parametrize("lengths", [16, [8, 16], None])
def test_short_and_varying_batches_make_no_further_graphs(tmp_path: Path, lengths: Any) -> None:
    """With stated lengths the last batch is filled; without any, one graph serves all."""
    sizes = [16, 16, 13, 14, 12, 16, 15, 11]
    rows = [{name: each[:size] for name, each in Blocks(8)[index].items()} for index, size in enumerate(sizes)]
    options = {"train_dataset": rows, "data_collator": PadTo(lengths), "per_device_train_batch_size": 3, "max_steps": 6}
    trainer = made(tmp_path, **options)
    before = graphs(trainer)
    trainer.train()
    assert graphs(trainer) == before + 1
    assert late(tmp_path) == []


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # of peft
def test_parts_of_training_go_with_it(tmp_path: Path) -> None:
    """Against the same run uncompiled: accumulation, checkpointing, autocast, LoRA, clipping; drop-out is in all."""
    losses = []
    for backend in (None, "aot_eager"):
        trainer = made(
            tmp_path / str(backend), build("gpt2", lora={"r": 4, "target_modules": ["c_attn"]}, dropout=0.1),
            torch_compile_backend=backend, gradient_accumulation_steps=2, gradient_checkpointing=True, bf16=True,
            max_grad_norm=0.1, max_steps=3,
        )  # fmt: skip
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert trainer.model.base_model.model.transformer.h[0]._compiled_call_impl is not None


def test_images_train_with_it(tmp_path: Path) -> None:
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, image_size=8, patch_size=4
    )
    torch.manual_seed(0)
    rows = [{"pixel_values": torch.rand(3, 8, 8), "labels": index % 2} for index in range(8)]
    losses = []
    for backend in (None, "aot_eager"):
        torch.manual_seed(0)
        model = AutoModelForImageClassification.from_config(config)
        trainer = made(tmp_path / str(backend), model, torch_compile_backend=backend, train_dataset=rows)
        trainer.train()
        losses.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


MESHES: list[tuple[int, dict[str, Any]]] = [
    (2, {"tensor_parallel_size": 2, "sequence_parallel": True}),  # whose layers seed and communicate
    (2, {}),
    (2, {"zero_1": True}),
    (2, {"tensor_parallel_size": 2}),
    (2, {"pipeline_parallel_size": 2, "gradient_accumulation_steps": 2}),
]


@pytest.mark.parametrize(
    ("nproc", "mesh"), [MESHES[0], *(pytest.param(*each, marks=pytest.mark.prove) for each in MESHES[1:])]
)
def test_every_mesh_trains_the_same_compiled(ranks: Ranks, tmp_path: Path, nproc: int, mesh: dict[str, Any]) -> None:
    options = {**OPTIONS, **mesh, "max_steps": 4}
    plain = ranks.run(PROGRAM, {**options, "output_dir": str(tmp_path / "plain")}, nproc=nproc).check()[0]
    given = {**options, "torch_compile_backend": "aot_eager", "output_dir": str(tmp_path / "compiled")}
    compiled = ranks.run(PROGRAM, given, nproc=nproc, timeout=400).check()[0]
    for step, values in plain["losses"].items():
        assert compiled["losses"][step] == pytest.approx(values, rel=1e-5)
    assert compiled["counters"][0] >= 2
    assert late(tmp_path / "compiled") == []


@pytest.mark.parametrize(
    ("nproc", "backend"),
    [(1, "aot_eager"), *(pytest.param(nproc, "inductor", marks=pytest.mark.prove) for nproc in (1, 2))],
)
def test_resumes_bit_for_bit_after_a_kill(ranks: Ranks, tmp_path: Path, nproc: int, backend: str) -> None:
    cache = {"STEPMARK_CACHE": str(tmp_path / "cache")}
    options = {**OPTIONS, "torch_compile_backend": backend, "save_strategy": "steps", "save_steps": 1, "samples": 20}
    go = functools.partial(ranks.run, PROGRAM, nproc=nproc, timeout=900, environment=cache)
    straight = go({**options, "output_dir": str(tmp_path / "straight")}).check()[0]
    folder = {"output_dir": str(tmp_path / "killed")}
    assert go({**options, **folder, "kill_at": 3}).codes == [-9] * nproc
    resumed = go({**options, **folder, "resume_from_checkpoint": True}).check()[0]
    assert resumed["resumed"] in ([1], [2])
    assert resumed["losses"] == straight["losses"]
    assert resumed["weights"] == straight["weights"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"torch_compile_backend": "nonesuch"},
            "^torch_compile_backend: 'nonesuch' is unknown; choose one of aot_eager",
        ),
        (
            {"torch_compile_mode": "nonesuch"},
            "^torch_compile_backend: inductor with torch_compile_mode nonesuch cannot",
        ),
        ({"torch_compile_backend": "eager", "torch_compile_mode": "max-autotune"}, "eager has no modes"),
        ({"torch_compile_backend": "tvm"}, "^torch_compile_backend: tvm cannot compile for cpu here"),
    ],
)
def test_a_backend_that_cannot_work_is_one_line_before_data(tmp_path: Path, fields: Any, message: str) -> None:
    recipe = write_recipe(tmp_path, **fields)
    with pytest.raises(UsageError, match=message):
        made(tmp_path / "out", **{"torch_compile_backend": None, **fields})
    with patch.object(recipe_train, "build_trainer", side_effect=AssertionError("data are touched")):
        assert run(["train", str(recipe)]) == 2


def test_inductor_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def without() -> str:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", without)
    with pytest.raises(UsageError, match="^torch_compile_backend: inductor cannot compile for cpu here"):
        check_compiler(TrainingFields(torch_compile=True), "cpu")


@pytest.mark.prove
def test_train_and_doctor_say_that_inductor_needs_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path
) -> None:
    environment = {**os.environ, "CXX": "/nonexistent/c++", "STEPMARK_CACHE": str(own_cache)}
    recipe = write_recipe(tmp_path, torch_compile=True)
    for command in ("train", "doctor"):
        given = ["--recipe", str(recipe)] if command == "doctor" else [str(recipe)]
        done = subprocess.run(
            [sys.executable, "-m", "stepmark", command, *given], env=environment, capture_output=True, text=True
        )
        said = "torch_compile_backend: inductor cannot compile for cpu here (InvalidCxxCompiler: "
        assert said in (done.stderr if command == "train" else done.stdout)
        assert done.returncode == (2 if command == "train" else 1)


def test_lazy_devices_refuse_it_and_sharded_parameters() -> None:
    with pytest.raises(UsageError, match="^torch_compile and device: xla is lazy"):
        TrainingFields(device="xla", torch_compile=True)
    with pytest.raises(UsageError, match="^torch_compile and device: xla is lazy"):
        check_device(TrainingFields(torch_compile=True), "xla")
    with pytest.raises(UsageError, match="^fsdp and device: lazy devices"):
        check_device(TrainingFields(fsdp="full_shard"), "xla")


def test_which_modules_are_compiled() -> None:
    llama, other = build("llama"), torch.nn.Sequential(torch.nn.Linear(4, 4))
    assert layers_of(llama) == list(llama.model.layers)
    assert layers_of(other) == [other]
    heads = torch.nn.ModuleDict(
        {"body": torch.nn.Linear(64, 64), "heads": torch.nn.ModuleList([torch.nn.Linear(64, 2)])}
    )
    assert layers_of(heads) == [heads]


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled:UserWarning")
@pytest.mark.parametrize("setting", [None, False, "FOLDER"])
def test_where_inductor_keeps_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_cache: Path, setting: Any
) -> None:
    import torch._inductor.config as inductor
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    folder = tmp_path / "own" if setting == "FOLDER" else own_cache / "graphs"
    made(tmp_path / "out", compile_cache=str(folder) if setting else setting)
    kept = str(folder / f"inductor-{torch.__version__}")
    found = os.environ.get("TORCHINDUCTOR_CACHE_DIR"), inductor.force_disable_caches
    inductor.force_disable_caches = False
    assert found in ([(None, True), (default_cache_dir(), True)] if setting is False else [(kept, False)])


def test_precompile_takes_the_steps_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path, torch_compile_backend="aot_eager", train_file=str(tmp_path / "none.txt"))
    assert run(["precompile", str(recipe)]) == 0
    assert capsys.readouterr().out.endswith("graphs of torch.compile; aot_eager keeps none\n")
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


@pytest.mark.prove
def test_a_second_process_reads_the_graphs(ranks: Ranks, tmp_path: Path) -> None:
    environment = {"STEPMARK_CACHE": str(tmp_path / "cache")}
    options = {**OPTIONS, "torch_compile": True, "max_steps": 2}
    for name, hit in (("first", False), ("second", True)):
        ranks.run(
            PROGRAM, {**options, "output_dir": str(tmp_path / name)}, timeout=900, environment=environment
        ).check()
        last = [line for line in read_metrics(tmp_path / name) if "graph_cache_hits" in line][-1]
        assert (last["graph_cache_hits"] > 0) == hit
        assert (last["graph_cache_misses"] > 0) != hit
