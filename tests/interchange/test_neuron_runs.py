"""What runs on Neuron devices leave: stages with layers that are not theirs, several tags, and types of XLA's flags."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import MetadataIndex

from stepmark.cli.main import run
from stepmark.errors import CheckpointDamaged, CheckpointError
from stepmark.interchange.recognition import open_foreign
from stepmark.interchange.sources.foreign import ImportOptions
from tests.interchange.test_import import check, refused, take
from tests.support import foreign_checkpoints
from tests.support.foreign_checkpoints import STEP, Truth, numbered, save_rank, truth, zero_part


def stage_of(name: str) -> int:
    return int(not ("embed" in name or ".layers.0." in name))


def staged_folder(folder: Path, found: Truth) -> Path:
    """optimum-neuron with two pipeline stages: each has memory that was never initialized for the other's layers."""
    foreign_checkpoints.write_config(folder)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": STEP}))
    for stage in range(2):
        own = [name for name in found.model if stage_of(name) == stage]
        model = {n: t if n in own else torch.full_like(t, 7e31) for n, t in found.model.items()}
        place = f"dp_rank_00_tp_rank_00_pp_rank_{stage:02d}.pt"
        save_rank(folder / "shards" / "model" / place, model, xser=False)
        save_rank(folder / "shards" / "optim" / place, numbered({n: found.moments[n] for n in own}), xser=False)
        body = {"parameters": {name: {"tensor_model_parallel": False} for name in own}}
        (folder / "shards" / f"mp_metadata_pp_rank_{stage}.json").write_text(json.dumps(body))
    return folder


def test_stages_have_their_own_layers_only(tmp_path: Path) -> None:
    expected = truth()
    out = take(staged_folder(tmp_path / "source", expected), tmp_path / "out")
    check(out, expected)
    members = json.loads((out / "state.json").read_text())["sections"]["optimizer"]["members"]
    assert members == {name: int("norm" in name) for name in expected.model}


def test_newest_tag(tmp_path: Path) -> None:
    """By its number, which is no text; files that were copied have any time."""
    first, last = truth(1), truth()
    for name, found in (("step_10", last), ("step_9", first)):
        foreign_checkpoints.nxd_folder(tmp_path / "run" / name, found, tp=1, dp=1)
        (tmp_path / "run" / name / "done").write_text("1")
    os.utime(tmp_path / "run" / "step_9" / "done")
    (tmp_path / "run" / "step_10" / "config.json").rename(tmp_path / "run" / "config.json")
    found = open_foreign(tmp_path / "run", ImportOptions())
    assert "step_10 is the newest of the tags; name another with --tag" in found.assumed
    check(take(tmp_path / "run", tmp_path / "newest"), last)
    check(take(tmp_path / "run" / "step_9", tmp_path / "first"), first)


def masters_folder(folder: Path, found: Truth, **options: Any) -> Path:
    """bf16 weights, and a ZeRO-1 optimizer with the fp32 values that they are rounded from."""
    wide, xser = options.get("wide", torch.float32), options.get("xser", False)
    foreign_checkpoints.write_config(folder)
    names = foreign_checkpoints.rank_tensors(found.model, 0, 1, 1)
    low = {name: tensor.bfloat16().to(options.get("weights", torch.bfloat16)) for name, tensor in names.items()}
    path = folder / "model" / "dp_rank_00_tp_rank_00_pp_rank_00.pt"
    save_rank(path, low, xser)
    moments = foreign_checkpoints.rank_moments(found, 0, 1, 1)
    order = [name for group in foreign_checkpoints.grouped(list(moments)) for name in group]
    for part in range(2):
        state = zero_part(numbered(moments), part, 2)
        masters = {n: {"exp_avg": names[name]} for n, name in enumerate(order)}
        cut = zero_part({"state": masters, "param_groups": []}, part, 2)["base_state"]
        state["sharded_master_weights"] = {number: one["exp_avg"].to(wide) for number, one in cut.items()}
        for one in state["base_state"].values():
            one.update(exp_avg=one["exp_avg"].to(wide), exp_avg_sq=one["exp_avg_sq"].to(wide))
        save_rank(folder / "optim" / f"dp_rank_{part:02d}_tp_rank_00_pp_rank_00.pt", state, xser)
    if options.get("without_weights"):
        for number in range(len(low)):
            (path.with_name(f"{path.name}.tensors") / f"tensor_{number}.pt").unlink()
        info = {n: {"dtype": tensor.dtype, "shape": tuple(tensor.shape)} for n, tensor in enumerate(low.values())}
        torch.save(info, f"{path}.info.pt")
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"xser": True},
        {"wide": torch.float64, "weights": torch.float32},  # XLA_DOWNCAST_BF16
        {"xser": True, "without_weights": True},  # avoid_saving_lower_precision_weights
    ],
)
def test_masters_and_their_weights(options: dict[str, Any], tmp_path: Path) -> None:
    expected = truth()
    out = take(masters_folder(tmp_path / "source", expected, **options), tmp_path / "out")
    model, states = (load_file(out / name) for name in ("model.safetensors", "optimizer/optimizer.safetensors"))
    assert model.keys() == expected.model.keys()
    for name, tensor in expected.model.items():
        assert torch.equal(model[name], tensor.bfloat16()), name
        assert torch.equal(states[f"{name}/master"], tensor), name
        assert all(torch.equal(states[f"{name}/{key}"], expected.moments[name][key]) for key in ("exp_avg", "step"))


@pytest.mark.parametrize("store", [False, True])
def test_masters_alone_give_the_model_alone(store: bool, tmp_path: Path) -> None:
    expected = truth()
    if store:
        source = store_of_stages(tmp_path / "source", expected, model=False)
    else:
        source = masters_folder(tmp_path / "source", expected, xser=True, without_weights=True)
    assert run(["import", str(source), str(tmp_path / "out"), "--model-only"]) == 0
    model = load_file(tmp_path / "out" / "model.safetensors")
    assert model.keys() == expected.model.keys()
    for name, tensor in expected.model.items():
        assert torch.equal(model[name], tensor if store else tensor.bfloat16()), name
    assert not (tmp_path / "out" / "optimizer").exists()


def test_masters_of_which_no_file_says_the_shape(tmp_path: Path) -> None:
    """Nothing would show whether a parameter gets its own."""
    source = masters_folder(tmp_path / "source", truth(), xser=True, without_weights=True)
    next(source.glob("model/*.info.pt")).unlink()
    refused(source, tmp_path, CheckpointDamaged, "tensor_0.pt", "embed_tokens")


def test_weights_without_masters_are_missed(tmp_path: Path) -> None:
    source = masters_folder(tmp_path / "source", truth(), xser=True, without_weights=True)
    for path in source.glob("optim/*.pt"):
        path.unlink()
    refused(source, tmp_path, CheckpointDamaged, "tensor_0.pt", "embed_tokens")


def store_of_stages(folder: Path, found: Truth, *, tp: int = 2, dp: int = 2, model: bool = True) -> Path:
    """neuronx-distributed's `use_zero1_dcp` with two pipeline stages: the metadata lists the names of the first stage
    for both, none of the second's, and half of the steps are nowhere. Records are as they should be."""
    foreign_checkpoints.write_config(folder)
    parts: dict[str, torch.Tensor] = {}
    shapes: dict[str, list[int]] = {}
    for stage, rank in itertools.product(range(2), range(tp)):
        own = Truth(
            {name: tensor for name, tensor in found.model.items() if stage_of(name) == stage},
            {name: moments for name, moments in found.moments.items() if stage_of(name) == stage},
        )
        path = folder / "model" / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_{stage:02d}.pt"
        weights = foreign_checkpoints.rank_tensors(own.model, rank, tp, 1)
        save_rank(path, weights, xser=True)
        states = foreign_checkpoints.rank_moments(own, rank, tp, 1)
        if not model:
            shutil.rmtree(path.with_name(f"{path.name}.tensors"))
            torch.save(
                {n: {"dtype": torch.float32, "shape": t.shape} for n, t in enumerate(weights.values())},
                f"{path}.info.pt",
            )
        for number, (name, moments) in enumerate(states.items()):
            values = {f"base_state.{name}.{key}": value for key, value in moments.items() if key != "step"}
            if not model:
                values[f"sharded_master_weights.{name}"] = weights[name]
            for key, value in values.items():
                full = f"{key}|pp-{stage:04d}" + (f"|tp-{rank:04d}" if tp > 1 else "")
                shapes[full] = list(value.shape)
                parts |= {f"{full}#{at}": rows for at, rows in zip(starts(value, dp), value.chunk(dp), strict=False)}
            if number % 2 == 0 and not stage:
                parts[f"base_state.{name}.step"] = moments["step"]
    settings = {f"param_groups.0.{key}": value for key, value in foreign_checkpoints.GROUP.items()}
    foreign_checkpoints.save_dcp({**parts, **settings}, folder / "optim")
    relist(folder / "optim" / ".metadata", shapes)
    return folder


def starts(tensor: torch.Tensor, count: int) -> list[int]:
    return list(itertools.accumulate((len(chunk) for chunk in tensor.chunk(count)), initial=0))


def relist(path: Path, shapes: dict[str, list[int]]) -> None:
    """Makes one tensor of its chunks `NAME#ROW` in the records, and writes the list that the tool writes."""
    metadata = pickle.loads(path.read_bytes())
    records = {}
    for index, info in metadata.storage_data.items():
        name, _, row = index.fqn.partition("#")
        offset = torch.Size([int(row), *[0] * (len(shapes[name]) - 1)]) if row else index.offset
        records[MetadataIndex(name, offset)] = info
    described = {}
    for name, value in metadata.state_dict_metadata.items():
        base = name.partition("#")[0]
        if "|pp-0001" in base:
            continue
        described[base] = value
        if "|pp-0000" in base:
            value.size = torch.Size(shapes[base])
            described[base.replace("|pp-0000", "|pp-0001")] = value
    metadata.storage_data, metadata.state_dict_metadata = records, described
    metadata.planner_data = {name: (name,) for name in described}
    path.write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 2), (2, 3)])
def test_store_of_several_stages(tp: int, dp: int, tmp_path: Path) -> None:
    """The records tell what there is, not the list of names."""
    expected = truth()
    check(take(store_of_stages(tmp_path / "source", expected, tp=tp, dp=dp), tmp_path / "out"), expected)


@pytest.mark.parametrize("which", ["first", "last"])
def test_record_of_a_later_stage_that_is_missing(which: str, tmp_path: Path) -> None:
    source = store_of_stages(tmp_path / "source", truth())
    path = source / "optim" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    mine = [index for index in metadata.storage_data if "lm_head.weight.exp_avg|pp-0001|tp-0001" in index.fqn]
    del metadata.storage_data[mine[0 if which == "first" else -1]]
    path.write_bytes(pickle.dumps(metadata))
    refused(source, tmp_path, CheckpointError, "lm_head.weight")
