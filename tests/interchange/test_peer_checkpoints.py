"""Checkpoints that other tools' own code wrote, each with the truth: a matrix over a folder of them.

The folder's path is in STEPMARK_PEER_CHECKPOINTS; each folder in it has a checkpoint and `truth/`, which describes what
is expected of an importer.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stepmark.checkpoint.format.verify import verify
from stepmark.errors import CheckpointError
from stepmark.interchange.recognition import open_foreign
from stepmark.interchange.sinks.hf_model import write_model_folder
from stepmark.interchange.sinks.stepmark_checkpoint import write_checkpoint
from stepmark.interchange.sources.foreign import ForeignCheckpoint, ImportOptions
from stepmark.model_folder.new_folder import WritingListener

VARIABLE = "STEPMARK_PEER_CHECKPOINTS"
ROOT = Path(os.environ.get(VARIABLE, "/nowhere"))
FOLDERS = sorted(path.name for path in ROOT.iterdir() if (path / "truth").is_dir()) if ROOT.is_dir() else []
REFUSED = {"on_tp2_async_killed": "interrupted", "nxd_lora_tp4_gqa_default_truncated": "in no file"}
SILENT = WritingListener(lambda size: None, lambda size: None)

pytestmark = pytest.mark.prove


def described(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The source and what the truth says about it."""
    said = json.loads((folder / "truth" / "truth.json").read_bytes())
    names = [said.get("folder"), said.get("checkpoint"), f"checkpoint/{said.get('tag')}"]
    names.append("checkpoint/checkpoint/step-3")
    return next((folder / n for n in names if n and (folder / n).exists()), folder / "checkpoint"), said


def take(folder: Path, out: Path) -> ForeignCheckpoint:
    source, _ = described(folder)
    config = folder / "truth" / "config.json"
    needed = config.exists() and not (source / "config.json").exists()
    heads = "natural" if "trn2_converter" in folder.name else "auto"
    found = open_foreign(source, ImportOptions(config=config if needed else None, heads=heads))
    (write_model_folder if found.adapter else write_checkpoint)(found, out, SILENT)
    return found


def loaded(*paths: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in paths:
        found |= load_file(path) if path.exists() else {}
    return found


@pytest.mark.skipif(not FOLDERS, reason=f"{VARIABLE} names no folder of other tools' checkpoints")
@pytest.mark.parametrize("name", FOLDERS)
def test_equals_its_truth(name: str, tmp_path: Path) -> None:
    folder, out = ROOT / name, tmp_path / "out"
    if name in REFUSED:
        with pytest.raises(CheckpointError, match=REFUSED[name]):
            take(folder, out)
        assert not any(tmp_path.iterdir())
        return
    found = take(folder, out)
    model = loaded(out / "model.safetensors", out / "adapter_model.safetensors")
    truth = loaded(folder / "truth" / "model.safetensors")
    assert model.keys() == truth.keys()
    exact = name != "nxd_lora_tp2_base_and_merged"  # there the order of the writer's additions shows
    for key, tensor in truth.items():
        mine = model[key].to(tensor.dtype)
        assert torch.equal(mine, tensor) if exact else torch.allclose(mine, tensor, atol=1e-5), key
    check_optimizer(folder, out, found)


def check_optimizer(folder: Path, out: Path, found: ForeignCheckpoint) -> None:
    lost = " ".join(found.lost)
    truth = {} if "optimizer:" in lost else loaded(folder / "truth" / "optimizer.safetensors")
    states = loaded(out / "optimizer" / "optimizer.safetensors")
    assert bool(states) == (found.optimizer is not None)
    for full, tensor in truth.items():
        key, name = full.split("/", 1)
        if key == "master" and "master weights" in lost:
            continue
        assert torch.equal(states[f"{name}/{key}"].to(tensor.dtype), tensor), full
    if "optimizer:" in lost:
        expected = json.dumps(described(folder)[1]["expected"])
        known = ("unrecoverable", "not in the checkpoint", "none saved")
        no_file = not (folder / "truth" / "optimizer.safetensors").exists()
        assert no_file or any(word in expected for word in known)
    if not found.adapter:
        assert not verify(out).faults
        step = described(folder)[1].get("step")
        assert found.step in (None, step)


@pytest.mark.skipif(not FOLDERS, reason=f"{VARIABLE} names no folder of other tools' checkpoints")
def test_replicas_that_differ_are_not_read_as_one(tmp_path: Path) -> None:
    folder = ROOT / "nxd_tp4_trn2_scratch"
    config = ROOT / "nxd_tp4_trn1_scratch" / "truth" / "config.json"
    with pytest.raises(CheckpointError, match="replicas of its key/value heads differ"):
        open_foreign(described(folder)[0], ImportOptions(config=config))
