"""`stepmark verify` and `stepmark inspect`: what they find, what they print, what they need."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.format import verify as module
from stepmark.checkpoint.format.checkpoint_folders import find_checkpoints, point_best
from stepmark.checkpoint.format.verify import Corruption, verify
from stepmark.cli import inspect as inspect_command
from stepmark.cli import verify as verify_command
from stepmark.errors import CheckpointDamaged, CheckpointNotFound
from stepmark.sharding.layout import Box, Layout, Shard


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    module = torch.nn.Linear(300, 2000)
    halves = [(Box((0, 2 * i), (4, 2)), (0, 2 * i)) for i in range(2)]
    nest = {"a": torch.ones(100), "b": torch.ones(100), "cut": Shard(torch.ones(4, 4), Layout.boxes((4, 4), halves))}
    with Checkpointer(folder, mesh={"dp": 1, "tp": 1}) as checkpointer:
        for step in (9, 10):
            state = {"model": module, "nest": nest}
            checkpointer.save(
                step, state, metrics={"loss": 0.5}, files=lambda path: (path / "config.json").write_text("{}")
            )
    return folder


def call(command: ModuleType, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return int(command.run(parser.parse_args(arguments)))


def test_a_good_checkpoint_is_good(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [path.name for path in find_checkpoints(saved)] == ["checkpoint-10", "checkpoint-9"]
    report = verify(saved / "checkpoint-10")
    assert (report.step, report.faults) == (10, ())
    assert report.size > 2_400_000
    assert call(verify_command, str(saved)) == 0
    assert capsys.readouterr().out.count("good") == 2


def test_a_link_that_is_moved_in_the_meantime(saved: Path) -> None:
    """`best` of a live run: one checkpoint is verified, and not a part of each of two."""
    point_best(saved, 9)
    (found,) = find_checkpoints(saved / "best")
    point_best(saved, 10)
    report = verify(found)
    assert (report.path, report.step, report.faults) == (saved / "checkpoint-9", 9, ())
    (saved / "best").unlink()


def test_a_step_that_is_saved_again_in_the_meantime_is_verified_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = module.read_header
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"nest": {"t": torch.zeros(100)}}, block=True)

        def save_first(*arguments: Any) -> Any:
            monkeypatch.setattr(module, "read_header", read)
            checkpointer.save(1, {"nest": {"t": torch.ones(100)}}, block=True)
            return read(*arguments)

        monkeypatch.setattr(module, "read_header", save_first)
        assert verify(tmp_path / "checkpoint-1").faults == ()


def test_each_fault_is_named(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "checkpoint-10"
    shutil.copytree(saved / "checkpoint-10", folder)
    model = bytearray((folder / "model.safetensors").read_bytes())
    model[4096 + 1_500_000] ^= 1
    (folder / "model.safetensors").write_bytes(model)
    (first,) = (path for path in folder.glob("state/nest-*") if b'"b"' in path.read_bytes())
    nest = bytearray(first.read_bytes())
    for position in (4096 + 40, 4096 + 440):
        nest[position] ^= 128
    first.write_bytes(nest)
    (folder / "config.json").unlink()
    shutil.copy(folder / "model.safetensors", folder / "model-00002-of-00002.safetensors")
    faults = verify(folder).faults
    assert {(fault.file, fault.tensor, fault.rank) for fault in faults} == {
        ("model.safetensors", "weight", 0),
        (f"state/{first.name}", "a", 0),
        (f"state/{first.name}", "b", 0),
        ("config.json", None, None),
        ("model-00002-of-00002.safetensors", None, None),
    }
    assert any("1052672 to 2101248" in fault.problem for fault in faults)
    assert call(verify_command, str(folder)) == 1
    text = capsys.readouterr().out
    assert "corrupted, 5 faults" in text
    assert "model.safetensors, tensor weight: bytes" in text
    assert "config.json: is missing" in text
    assert call(verify_command, str(folder), "--json") == 1
    (result,) = json.loads(capsys.readouterr().out)["checkpoints"]
    assert (result["step"], result["good"], len(result["faults"])) == (10, False, 5)


def test_a_corrupted_manifest_is_a_fault(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-10"
    shutil.copytree(saved / "checkpoint-10", folder)
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"step": 10', '"step": 11'))
    assert verify(folder).faults == (Corruption("manifest.json", "it does not match its checksum"),)
    with pytest.raises(CheckpointDamaged, match="does not match its checksum"):
        call(inspect_command, str(folder))


def test_a_checkpoint_without_its_manifest_is_corrupted(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-10"
    folder.mkdir()
    assert find_checkpoints(folder) == [folder]
    assert verify(folder).faults == (
        Corruption("manifest.json", "is missing; the folder is not a complete checkpoint"),
    )


def test_a_path_that_is_not_a_checkpoint(tmp_path: Path) -> None:
    for command in (verify_command, inspect_command):
        with pytest.raises(CheckpointNotFound):
            call(command, str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointNotFound, match="nor a run with checkpoints"):
        call(verify_command, str(tmp_path))


@pytest.mark.parametrize("command", [verify_command, inspect_command])
def test_checkpoints_under_other_names_are_named(saved: Path, tmp_path: Path, command: Any) -> None:
    for name in ("step-1", "step-2"):
        shutil.copytree(saved / "checkpoint-10", tmp_path / name)
    with pytest.raises(CheckpointNotFound, match="a folder of checkpoints; name one of them: step-1, step-2$"):
        call(command, str(tmp_path))


def test_inspect_shows_what_is_there(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(inspect_command, str(saved / "checkpoint-10")) == 0
    text = capsys.readouterr().out
    for words in ("step      10", "mesh      dp 1 x tp 1", "model (module)", "loss 0.5", "config.json"):
        assert words in text, text
    assert [line.split() for line in text.splitlines() if line.startswith("  weight")] == [
        ["weight", "F32", "[2000,", "300]", "unsharded"]
    ]
    assert "2 shards along dim 1" in text
    assert call(inspect_command, str(saved / "checkpoint-10"), "--json") == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (result["step"], result["mesh"]) == (10, {"dp": 1, "tp": 1})
    (cut,) = (tensor for tensor in result["tensors"] if tensor["name"] == "cut")
    assert [shard["offsets"] for shard in cut["pieces"]] == [[0, 0], [0, 2]]
    assert cut["shape"] == [4, 4]


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_neither_needs_torch_or_transformers(saved: Path, command: str) -> None:
    program = (
        "import sys, argparse, importlib\n"
        f"command = importlib.import_module('stepmark.cli.{command}')\n"
        "parser = argparse.ArgumentParser(); command.add_arguments(parser)\n"
        "assert 'numpy' not in sys.modules\n"
        "command.run(parser.parse_args(sys.argv[1:]))\n"
        "assert not {'torch', 'torch_xla', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(saved / "checkpoint-10")], check=True, timeout=60)
