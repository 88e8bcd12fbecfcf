"""Every command of docs/interchange.md and docs/export.md, as it is written there, on a small checkpoint of what its
row is about; and whether the row's columns say the truth about model, optimizer and step."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stepmark.cli.main import run
from tests.interchange import test_peft as program
from tests.support import foreign_checkpoints as foreign
from tests.support.foreign_checkpoints import CONFIG, Truth, truth

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "".join((DOCS / name).read_text() for name in ("interchange.md", "export.md"))
STEP = 1000  # of the page's first commands


def rows(heading: str) -> dict[str, list[str]]:
    """The cells of the table below a heading, by the first one."""
    section = PAGE.split(f"# {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0]: row for row in cells if set(row[0]) != {"-"}}


def fsdp(folder: Path, found: Truth) -> Path:
    foreign.trainer_folder(folder, found)
    (folder / "model.safetensors").unlink()
    torch.save(found.model, folder / "pytorch_model_fsdp.bin")
    groups = [{**foreign.GROUP, "params": names} for names in foreign.grouped(list(found.model))]
    (folder / "optimizer.pt").unlink()
    torch.save({"state": found.moments, "param_groups": groups}, folder / "optimizer.bin")
    (folder / "config.json").unlink()
    return folder


def accelerate(folder: Path, found: Truth) -> Path:
    foreign.trainer_folder(folder, found)
    (folder / "optimizer.pt").rename(folder / "optimizer.bin")
    (folder / "scheduler.pt").rename(folder / "scheduler.bin")
    (folder / "random_states_0.pkl").write_bytes(b"not read")
    for name in ("trainer_state.json", "config.json"):
        (folder / name).unlink()
    return folder


def shards(folder: Path, found: Truth) -> Path:
    """Two ranks' rows of HuggingFaceStorageWriter, by its description."""
    folder.mkdir(parents=True)
    for rank in range(2):
        own = {name: tensor.chunk(2)[rank].clone() for name, tensor in found.model.items()}
        offsets = {name: {"saved_offsets": [rank * len(t), *(0 for _ in t.shape[1:])]} for name, t in own.items()}
        info = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0"}
        save_file(own, folder / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors", info)
    return folder


def tags(folder: Path, found: Truth) -> Path:
    foreign.nxd_folder(folder / "step_10", found, tp=2, xser=True)
    return folder


def adapter(folder: Path, _: Truth) -> Path:
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    names = {"A": torch.randn(4, 32), "B": torch.randn(32, 4)}
    state = {f"{prefix}.lora_{key}.weight": tensor for key, tensor in names.items()}
    foreign.save_rank(folder / "adapter_shards" / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt", state, xser=False)
    parameters = {f"{prefix}.lora_{key}.default.weight": {"tensor_model_parallel": False} for key in names}
    path = folder / "adapter_shards" / "mp_metadata_pp_rank_0.json"
    path.write_text(json.dumps({"parameters": parameters}))
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}))
    return folder


def plain(path: Path, found: Truth) -> Path:
    """A file of one's own names, and the page's example of patterns for them."""
    names = {f"layers.{n}.self_attn.{m}_proj.": f"layers.{n}.attention.{m}_proj." for n in range(2) for m in "qkvo"}

    def old(name: str) -> str:
        for new, own in names.items():
            name = name.replace(f"model.{new}", f"encoder.{own}")
        return name

    torch.save({**{old(n): t for n, t in found.model.items()}, "encoder.layers.0.extra": torch.zeros(1)}, path)
    (path.parent / "names.yaml").write_text(re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0])
    return path


def peft_checkpoint(folder: Path, _: Truth) -> Path:
    """Of a short run of transformers' Trainer."""
    program.base(folder.parent.parent / "base")
    program.losses(program.transformers, folder.parent, program.PLAIN, max_steps=program.STEP)
    return (folder.parent / f"checkpoint-{program.STEP}").rename(folder)


SOURCES: dict[str, Callable[[Path, Truth], Path]] = {
    "transformers Trainer": foreign.trainer_folder,
    "the same with FSDP": fsdp,
    "the same with PEFT": peft_checkpoint,
    "accelerate": accelerate,
    "torch.distributed.checkpoint": foreign.dcp_folder,
    "torchtitan": foreign.titan_folder,
    "shards of": shards,
    "neuronx-distributed": tags,
    "optimum-neuron": foreign.optimum_folder,
    "torch_xla's": foreign.torch_xla_folder,
    "LoRA": adapter,
    "DeepSpeed": foreign.deepspeed_folder,
    "Lightning": foreign.lightning_folder,
    "a plain state dict": plain,
}
IN, OUT = rows("What comes along"), rows("Checkpoints for other tools")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # in peft
@pytest.mark.parametrize("row", IN.values(), ids=[name[:30] for name in IN])
def test_what_comes_along(row: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (build,) = (build for start, build in SOURCES.items() if row[0].startswith(start))
    command = shlex.split(row[-1].strip("`"))[1:]
    monkeypatch.chdir(tmp_path)
    expected = truth()
    foreign.write_config(Path("MODEL"))
    Path(command[1]).parent.mkdir(parents=True, exist_ok=True)
    build(Path(command[1]), expected)
    assert run(command) == 0
    if "LoRA" in row[0]:
        found = load_file("OUT/adapter_model.safetensors")
        source = Path(command[1]) / "adapter_model.safetensors"
        assert found.keys() == load_file(source).keys() if source.exists() else len(found) == 2
        return
    model = load_file("OUT/model.safetensors")
    assert all(torch.equal(model[name], tensor) for name, tensor in expected.model.items())
    states = Path("OUT/optimizer/optimizer.safetensors")
    if "--model-only" in command:
        assert not states.exists()
        return
    assert row[3].startswith(("yes", "ZeRO-1"))
    found = load_file(states)
    assert all(torch.equal(found[f"{n}/{k}"], v) for n, state in expected.moments.items() for k, v in state.items())
    assert json.loads(Path("OUT/manifest.json").read_text())["step"] == foreign.STEP
    if "log history" in row[4]:
        state = json.loads(Path("OUT/trainer_state.json").read_text())
        assert (state["best_metric"], state["log_history"]) == (1.5, [{"step": 1, "loss": 2.0}])


@pytest.mark.parametrize("row", OUT.values(), ids=[row[-1].split("--to ")[1].strip("`") for row in OUT.values()])
def test_what_goes_out(row: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = shlex.split(row[-1].strip("`"))[1:]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(foreign, "STEP", STEP)
    foreign.trainer_folder(Path("source"), truth())
    assert run(["import", "source", "CHECKPOINT"]) == 0
    assert run(command) == 0
    assert run(["import", command[2], "again", "--config", "source"]) == 0
    assert (
        load_file("again/optimizer/optimizer.safetensors").keys()
        == load_file("CHECKPOINT/optimizer/optimizer.safetensors").keys()
    )


def test_commands_between_the_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = "".join(re.findall(r"```\w*\n(.*?)```", PAGE, re.DOTALL)).splitlines()
    commands = [line for line in blocks if line.startswith(("stepmark import", "stepmark export"))]
    assert len(commands) == 2
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(foreign, "STEP", STEP)
    foreign.trainer_folder(Path("old/checkpoint-1000"), truth())
    for command in (*commands, "stepmark inspect old/checkpoint-1000", "stepmark verify old/checkpoint-1000"):
        assert run(shlex.split(command)[1:]) == 0, command
    assert CONFIG["model_type"] == json.loads(Path("there/checkpoint-1000/config.json").read_text())["model_type"]
