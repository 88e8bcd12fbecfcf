"""Files of torch_xla's ZeroRedundancyOptimizer, one a rank: every state comes along, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from stepmark.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from stepmark.interchange.recognition import open_foreign
from stepmark.interchange.sinks.stepmark_checkpoint import write_checkpoint
from stepmark.interchange.sources.foreign import ForeignCheckpoint, ImportOptions
from stepmark.model_folder.new_folder import WritingListener
from tests.interchange.test_import import check
from tests.support import foreign_checkpoints
from tests.support.foreign_checkpoints import STEP, save_rank, torch_xla_folder, truth, zero_part
from tests.support.ranks import Ranks

SILENT = WritingListener(lambda size: None, lambda size: None)


def take(source: Path, out: Path, **options: Any) -> ForeignCheckpoint:
    found = open_foreign(source, ImportOptions(**options))
    write_checkpoint(found, out, SILENT)
    return found


@pytest.mark.parametrize("form", ["in the files", "state dict", "hugging face"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_state_comes_along(ranks: int, form: str, tmp_path: Path) -> None:
    found = take(torch_xla_folder(tmp_path / "source", truth(), ranks=ranks, form=form), tmp_path / "out")
    assert (found.kind, found.mesh) == ("torch_xla ZeRO-1", {"dp": ranks})
    expected = truth()
    model = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(model[name], tensor) for name, tensor in expected.model.items())
    states = load_file(tmp_path / "out" / "optimizer" / "optimizer.safetensors")
    for name, moments in expected.moments.items():
        assert all(torch.equal(states[f"{name}/{key}"], value) for key, value in moments.items()), name
    assert json.loads((tmp_path / "out" / "manifest.json").read_bytes())["step"] == STEP  # or as the states count


def test_missing_rank(tmp_path: Path) -> None:
    source = torch_xla_folder(tmp_path / "source", truth(), ranks=3, form="state dict")
    (source / "optimizer_2.pt").unlink()
    refused(source, CheckpointDamaged, "data parallel rank's file is missing", tmp_path)
    (source / "optimizer_0.pt").unlink()
    refused(source, CheckpointDamaged, "file of rank 0 is missing", tmp_path)


def test_no_model_beside_the_files(tmp_path: Path) -> None:
    source = torch_xla_folder(tmp_path / "source", truth(), ranks=2, form="state dict")
    (source / "model.pt").unlink()
    refused(source, CheckpointMismatch, "no files that may be the model's", tmp_path)
    take_model = torch_xla_folder(tmp_path / "more", truth(), ranks=2, form="state dict")
    (take_model / "optimizer_1.pt").write_bytes(b"PK\x03\x04 base_state shape_info")
    refused(take_model, CheckpointDamaged, "optimizer_1.pt", tmp_path)


def refused(source: Path, kind: type[CheckpointError], match: str, tmp_path: Path) -> None:
    with pytest.raises(kind, match=match):
        take(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def save_with_torch_xla(folder: str, xser: bool) -> None:
    """Its own state dict, with tensors that lie on the device; `expected.pt` has their values."""
    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer
    from torch_xla.utils import serialization

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 5).to("xla")
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01, pin_layout=False)
    model(torch.ones(2, 3, device="xla")).sum().backward()
    optimizer.step()
    source = Path(folder)
    source.mkdir()
    save: Any = serialization.save if xser else torch.save
    save(optimizer.state_dict(), str(source / "optimizer-0.pt"))
    save(model.state_dict(), str(source / "model.pt"))
    if xser:  # as scripts without ZeRO-1 save
        whole = torch.optim.AdamW(model.parameters())
        whole.load_state_dict(optimizer.base_optimizer.state_dict())
        both = {"model": model.state_dict(), "optimizer": whole.state_dict(), "epoch": 1, "global_step": 1}
        save(both, str(source.with_name("checkpoint.pt")))
    own = optimizer.base_optimizer.state_dict()["state"]
    expected = {
        f"{name}/{key}": own[number][key].cpu()
        for number, name in enumerate(("weight", "bias"))
        for key in ("exp_avg", "exp_avg_sq")
    }
    torch.save({**expected, "weight": model.weight.detach().cpu()}, source.with_suffix(".expected"))


@pytest.mark.xla
@pytest.mark.parametrize("xser", [False, True])
def test_what_torch_xla_itself_saves(xser: bool, ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(f"{__name__}:save_with_torch_xla", str(tmp_path / "source"), xser).check()
    expected = torch.load(tmp_path / "source.expected")
    for source in [tmp_path / "source", *([tmp_path / "checkpoint.pt"] if xser else [])]:
        out = tmp_path / f"{source.stem}-out"
        take(source, out)
        found = load_file(out / "optimizer" / "optimizer.safetensors")
        found |= load_file(out / "model.safetensors")
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("form", ["one file", "a folder", "no suffix", "weights", "ranks"])
def test_references_of_torch_xla(form: str, tmp_path: Path) -> None:
    """torch_xla.utils.serialization puts a reference in place of each tensor, which has a file of its own."""
    source, drawn = tmp_path / "source", truth()
    whole = {"model": drawn.model, "optimizer": foreign_checkpoints.numbered(drawn.moments), "step": STEP}
    config = foreign_checkpoints.write_config(source)
    path = source / ("checkpoint" if form == "no suffix" else "checkpoint.pt")
    if form == "weights":
        path = source / "pytorch_model.bin"
        save_rank(path, drawn.model, xser=True)
        save_rank(source / "optimizer.pt", whole["optimizer"], xser=True)
    elif form == "ranks":
        for rank in range(2):
            part = zero_part(foreign_checkpoints.numbered(drawn.moments), rank, 2)
            save_rank(source / f"ckpt_{rank}.pt", {**whole, "optimizer": part}, xser=True)
        path = source / "ckpt_1.pt"
    else:
        save_rank(path, whole, xser=True)
    given = path if form == "one file" else source
    take(given, tmp_path / "out", config=config)
    check(tmp_path / "out", drawn)
    next((path.parent / f"{path.name}.tensors").iterdir()).unlink()
    refused(given, CheckpointDamaged, rf"{path.name}\.tensors/tensor_\d+\.pt is missing", tmp_path / "later")
