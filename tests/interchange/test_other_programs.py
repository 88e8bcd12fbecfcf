"""Checkpoints of programs that nobody had in mind: what is in them comes along, or is named where it does not."""

from __future__ import annotations

import argparse
import json
import pickle
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from stepmark.errors import CheckpointDamaged, CheckpointMismatch
from stepmark.interchange.export_checkpoint import export_checkpoint
from stepmark.interchange.recognition import open_foreign
from stepmark.interchange.sinks import dcp as exported_dcp
from stepmark.interchange.sources.foreign import ForeignCheckpoint, ImportOptions
from tests.interchange.test_import import check, refused, take
from tests.support import foreign_checkpoints
from tests.support.foreign_checkpoints import GROUP, STEP, numbered, save_dcp, trainer_folder, truth


def opened(source: Path, **options: Any) -> ForeignCheckpoint:
    return open_foreign(source, ImportOptions(**options))


def named_optimizer() -> dict[str, Any]:
    drawn = truth()
    groups = [{**GROUP, "params": names} for names in foreign_checkpoints.grouped(list(drawn.model))]
    return {"state": drawn.moments, "param_groups": groups}


# torch.distributed.checkpoint


@pytest.mark.parametrize("with_config", [False, True])
def test_store_of_one_stateful_object(with_config: bool, tmp_path: Path) -> None:
    """{"app": AppState()}, as in torch's tutorial: the model is two keys deep."""
    source = tmp_path / "source"
    save_dcp({"app": {"model": truth().model, "optimizer": named_optimizer()}}, source)
    if with_config:
        foreign_checkpoints.write_config(source)
    check(take(source, tmp_path / "out"), truth())


@pytest.mark.parametrize("with_config", [False, True])
def test_averaged_model_beside_the_model(with_config: bool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    averaged = {name: tensor + 1 for name, tensor in truth().model.items()}
    save_dcp({"averaged": averaged, "model": truth().model, "optimizer": named_optimizer()}, source)
    if with_config:
        foreign_checkpoints.write_config(source)
    assert any("averaged: other tensors" in text for text in opened(source).lost)
    check(take(source, tmp_path / "out"), truth())


def test_module_that_is_named_state(tmp_path: Path) -> None:
    """Its tensors look like an optimizer's states."""
    weights = {"state.a.weight": torch.randn(3), "b.weight": torch.randn(2), "state.param_groups.c.d": torch.randn(2)}
    save_dcp({"model": weights}, tmp_path / "source")
    assert opened(tmp_path / "source", model_only=True).model.keys() == weights.keys()


def test_scalar_parameters_of_a_bare_store(tmp_path: Path) -> None:
    """A step beside the tensors is no parameter, another number is one."""
    weights = {"a.weight": torch.randn(3), "scale": torch.tensor(2.0), "b.temperature": torch.tensor(3.0)}
    save_dcp({**weights, "step": torch.tensor(7)}, tmp_path / "source")
    found = opened(tmp_path / "source", model_only=True)
    assert found.model.keys() == weights.keys()
    assert found.step == 7


def test_schedule_with_more_state_than_a_step(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    linear = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(2):
        plateau.step(1.0)
        optimizer.step()
        linear.step()
    for name, schedule in (("plateau", plateau), ("linear", linear)):
        save_dcp({"model": {"w": parameter.detach()}, "scheduler": schedule.state_dict()}, tmp_path / name)
    found = opened(tmp_path / "plateau").schedule
    assert found is not None
    assert (found["best"], found["num_bad_epochs"], found["last_epoch"]) == (1.0, 1, 2)
    assert opened(tmp_path / "linear").schedule == {"last_epoch": 2, "lr_lambdas": []}


def test_schedule_of_several_parts(tmp_path: Path) -> None:
    """torch takes nested dicts and lists of dicts apart; they are put together again, and taken apart in an export."""
    parameter = torch.nn.Parameter(torch.randn(3))
    optimizer, drawn = torch.optim.SGD([parameter], lr=0.5), truth()
    kinds = torch.optim.lr_scheduler
    parts = [kinds.LinearLR(optimizer), kinds.ConstantLR(optimizer)]
    schedule = kinds.SequentialLR(optimizer, parts, [2])
    for _ in range(3):
        optimizer.step()
        schedule.step()
    expected = schedule.state_dict()
    state = {"model": drawn.model, "optimizer": named_optimizer(), "scheduler": expected}
    save_dcp(state, tmp_path / "source")
    foreign_checkpoints.write_config(tmp_path / "source")
    assert opened(tmp_path / "source").schedule == expected
    own = take(tmp_path / "source", tmp_path / "own")
    export_checkpoint(own, tmp_path / "out", "dcp")
    assert opened(tmp_path / "out").schedule == expected
    empty = kinds.SequentialLR(optimizer, [kinds.LinearLR(optimizer), kinds.ConstantLR(optimizer)], [5]).state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"scheduler": empty}, checkpoint_id=tmp_path / "out", no_dist=True)
    assert empty == expected


def test_optimizer_without_states(tmp_path: Path) -> None:
    """Such as SGD without momentum: its groups come along."""
    drawn = truth()
    groups = [{"lr": 0.25, "momentum": 0, "params": names} for names in foreign_checkpoints.grouped(list(drawn.model))]
    save_dcp({"model": drawn.model, "optimizer": {"state": {}, "param_groups": groups}, "step": 3}, tmp_path / "source")
    foreign_checkpoints.write_config(tmp_path / "source")
    own = take(tmp_path / "source", tmp_path / "own")
    export_checkpoint(own, tmp_path / "out", "dcp")
    for folder in (own, take(tmp_path / "out", tmp_path / "back")):
        sections = json.loads((folder / "state.json").read_text())["sections"]
        assert [group["lr"] for group in sections["optimizer"]["groups"].values()] == [0.25, 0.25]
        assert sections["optimizer"]["members"] == {n: int("norm" in n) for n in sections["optimizer"]["members"]}
        assert sections["run"]["value"]["step"] == 3


def test_last_rows_without_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metadata states the shape; without a config nothing else does."""
    own = take(trainer_folder(tmp_path / "source", truth()), tmp_path / "own")
    monkeypatch.setattr(exported_dcp, "CHUNK", 600)
    export_checkpoint(own, tmp_path / "out", "dcp")
    (tmp_path / "out" / "config.json").unlink()
    assert opened(tmp_path / "out", model_only=True).model
    metadata = dcp.FileSystemReader(tmp_path / "out").read_metadata()
    records = [index for index in metadata.storage_data if index.fqn == "model.lm_head.weight"]
    del metadata.storage_data[max(records, key=lambda index: index.offset)]
    (tmp_path / "out" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointDamaged, match=r"'model\.lm_head\.weight' is incomplete"):
        opened(tmp_path / "out", model_only=True)


@pytest.mark.parametrize("change", ["path", "description"])
def test_metadata_that_contradicts_itself(change: str, tmp_path: Path) -> None:
    """A name of a state that is another by one letter would be a state that no optimizer asks for."""
    save_dcp({"model": truth().model, "optimizer": named_optimizer()}, tmp_path / "source")
    metadata = dcp.FileSystemReader(tmp_path / "source").read_metadata()
    old = "optimizer.state.model.norm.weight.exp_avg_sq"
    new = old.replace("avg_sq", "avc_sq")
    changed = {replace(i, fqn=new) if i.fqn == old else i: where for i, where in metadata.storage_data.items()}
    assert metadata.planner_data is not None
    if change == "path":
        metadata.state_dict_metadata[new] = metadata.state_dict_metadata.pop(old)
        metadata.planner_data[new] = metadata.planner_data.pop(old)
    else:
        del metadata.state_dict_metadata[old]
    (tmp_path / "source" / ".metadata").write_bytes(pickle.dumps(replace(metadata, storage_data=changed)))
    with pytest.raises(CheckpointDamaged, match=r"avc_sq' (has a path|, and does not)|avc_sq', and does not"):
        opened(tmp_path / "source")


@pytest.mark.parametrize("change", [{"exp_avc_sq": "exp_avg_sq"}, {"exp_avg_sq": None}])
def test_state_with_a_name_of_its_own(change: dict[str, str | None], tmp_path: Path) -> None:
    """One letter that was changed, in a store whose names are nowhere else."""
    drawn = truth()
    moments = {name: dict(one) for name, one in drawn.moments.items()}
    for new, old in change.items():
        moved = moments["model.norm.weight"].pop(old or new)
        moments["model.norm.weight"] |= {new: moved} if old else {}
    save_dcp({"model": drawn.model, "optimizer": named_optimizer() | {"state": moments}}, tmp_path / "source")
    with pytest.raises(
        CheckpointDamaged, match=r"state of 'model\.norm\.weight' has exp_av.*and others have exp_avg, exp"
    ):
        opened(tmp_path / "source")


def test_one_parameter_with_another_optimizer(tmp_path: Path) -> None:
    """Such as tied embeddings beside matrices that Muon trains."""
    drawn = truth()
    embedding = "model.embed_tokens.weight"
    moments = {n: one if n == embedding else {"momentum_buffer": one["exp_avg"]} for n, one in drawn.moments.items()}
    save_dcp({"model": drawn.model, "optimizer": named_optimizer() | {"state": moments}}, tmp_path / "source")
    found = opened(tmp_path / "source").optimizer
    assert found is not None
    assert {name: set(state) for name, state in found.states.items()} == {n: set(one) for n, one in moments.items()}


def test_what_else_a_store_has(tmp_path: Path) -> None:
    state = {"model": truth().model, "optimizer": named_optimizer(), "loader": {"epoch": 3}, "seed": 5}
    save_dcp(state, tmp_path / "source")
    assert "loader, seed: other values of the store" in opened(tmp_path / "source").lost


def test_shards_of_which_a_file_is_missing(tmp_path: Path) -> None:
    """Neither the tensors in a file nor their number say that others are missing; its name does."""
    drawn, names = truth().model, list(truth().model)
    source = tmp_path / "source"
    source.mkdir()
    files = [f"shard-0000{rank}-model-0000{part}-of-00002.safetensors" for rank in (1, 2) for part in (1, 2)]
    for number, file in enumerate(files):
        save_file({name: drawn[name] for name in names[number::4]}, source / file)
    assert opened(source).model.keys() == drawn.keys()
    (source / files[3]).unlink()
    with pytest.raises(CheckpointDamaged, match="shard-00002-model-00002-of-00002 is missing"):
        opened(source)
    for file in files[:2]:
        (source / file).unlink()
    save_file({name: drawn[name] for name in names[3::4]}, source / files[3])
    with pytest.raises(CheckpointDamaged, match="rank 1"):
        opened(source)


# torch.save


@pytest.mark.parametrize("form", ["adam", "optimizer_states", "beside the modules"])
def test_optimizer_under_another_key(form: str, tmp_path: Path) -> None:
    source, drawn = tmp_path / "source.ckpt", truth()
    state: dict[str, Any] = {"state_dict": drawn.model, "global_step": STEP}
    if form == "beside the modules":
        inner = {name.removeprefix("model."): t for name, t in drawn.model.items() if name.startswith("model.")}
        state = {"lm_head": {"weight": drawn.model["lm_head.weight"]}, "global_step": STEP}
        state = {"inner": {"model": inner}, **state}
    optimizer = numbered(drawn.moments)
    state[form] = [optimizer] if form == "optimizer_states" else optimizer
    torch.save(state, source)
    config = foreign_checkpoints.write_config(tmp_path / "config")
    stars = [".".join("*" * count) for count in (2, 4, 5)]
    names = [(f"inner.model.{star}", f"model.{star}") for star in stars] if form == "beside the modules" else []
    found = opened(source, config=config, names=names)
    assert found.step == STEP
    check(take(source, tmp_path / "out", config=config, names=names), drawn)


def test_several_optimizers(tmp_path: Path) -> None:
    state = {"model": truth().model, "optimizers": [numbered(truth().moments)] * 2}
    torch.save(state, tmp_path / "source")
    with pytest.raises(CheckpointMismatch, match=r"2 optimizers, optimizers\[0\] and optimizers\[1\].*--model-only"):
        opened(tmp_path / "source")
    assert opened(tmp_path / "source", model_only=True).model.keys() == truth().model.keys()


def test_tensors_without_names(tmp_path: Path) -> None:
    state = {"model": {"a": torch.randn(2), "list": [torch.randn(2)]}, "ema": {"a": torch.randn(2)}}
    torch.save(state, tmp_path / "source")
    found = opened(tmp_path / "source")
    assert list(found.model) == ["a"]
    assert [text for text in found.lost if "list" in text]
    assert [text for text in found.lost if "ema: other tensors" in text]


def test_names_that_become_one(tmp_path: Path) -> None:
    torch.save({"a.b": torch.randn(2), "a": {"b": torch.randn(2)}}, tmp_path / "source")
    with pytest.raises(CheckpointMismatch, match=r"two tensors have the name 'a\.b'"):
        opened(tmp_path / "source")


@pytest.mark.parametrize("key", ["tensor_model_parallel_size", "pipeline_model_parallel_size"])
def test_part_of_a_megatron_model(key: str, tmp_path: Path) -> None:
    folder = tmp_path / "mp_rank_00"
    folder.mkdir()
    for size in (1, 2):
        state = {"args": argparse.Namespace(**{key: size}), "iteration": 3, "model": {"a": torch.randn(2)}}
        torch.save(state, folder / f"{size}.pt")
    assert opened(folder / "1.pt").step == 3
    with pytest.raises(CheckpointMismatch, match=f"part of a model: its args say {key} 2"):
        opened(folder / "2.pt")


# transformers and accelerate


def test_names_of_a_tied_tensor_that_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config says that they are one tensor; the file has two."""
    monkeypatch.setattr(foreign_checkpoints, "CONFIG", {**foreign_checkpoints.CONFIG, "tie_word_embeddings": True})
    drawn = truth()
    config = foreign_checkpoints.write_config(tmp_path / "config")
    torch.save(drawn.model, tmp_path / "source")
    with pytest.raises(CheckpointDamaged, match="embed_tokens.* differs from its replica"):
        take(tmp_path / "source", tmp_path / "out", config=config)
    torch.save({**drawn.model, "lm_head.weight": drawn.model["model.embed_tokens.weight"]}, tmp_path / "source")
    model = load_file(take(tmp_path / "source", tmp_path / "out", config=config) / "model.safetensors")
    assert model.keys() == drawn.model.keys() - {"lm_head.weight"}


def accelerate_folder(folder: Path, ranks: int, steps: int) -> Path:
    """What accelerate's save_state leaves, whose schedule has taken `steps` steps."""
    trainer_folder(folder, truth())
    (folder / "trainer_state.json").unlink()
    (folder / "optimizer.pt").rename(folder / "optimizer.bin")
    (folder / "scheduler.pt").unlink()
    torch.save({"last_epoch": steps, "lr_lambdas": [{}, {}], "_step_count": steps + 1}, folder / "scheduler.bin")
    for rank in range(ranks):
        torch.save({"step": 0}, folder / f"random_states_{rank}.pkl")
    return folder


@pytest.mark.parametrize(
    ("ranks", "steps", "expected"), [(1, STEP, STEP), (2, 2 * STEP, STEP), (2, STEP, STEP), (2, 5, 5)]
)
def test_schedule_that_every_rank_advances(ranks: int, steps: int, expected: int, tmp_path: Path) -> None:
    """accelerate steps it once a process for each step of the optimizer; a run here counts steps of the optimizer."""
    source = accelerate_folder(tmp_path / "source", ranks, steps)
    found = opened(source)
    assert found.schedule is not None
    assert (found.step, found.schedule["last_epoch"]) == (STEP, expected)
    assert any("schedule" in text for text in found.assumed) == (steps != STEP)
    run = json.loads((take(source, tmp_path / "out") / "state.json").read_text())["sections"]["run"]["value"]
    assert run["schedule"] == {"step": expected}


def test_optimizer_of_a_later_save(tmp_path: Path) -> None:
    source = trainer_folder(tmp_path / "source", truth())
    state = json.loads((source / "trainer_state.json").read_text())
    (source / "trainer_state.json").write_text(json.dumps({**state, "global_step": STEP - 1}))
    refused(source, tmp_path, CheckpointMismatch, "optimizer has taken 3 steps", "trainer_state.json says 2")
    (source / "trainer_state.json").write_text(json.dumps({**state, "global_step": STEP + 1}))
    assert any("3 of the 4 steps" in text for text in opened(source).assumed)


# neuronx-distributed and torch_xla


@pytest.mark.parametrize("place", ["dp_rank_01_tp_rank_00", "dp_rank_00_tp_rank_01"])
def test_optimizer_file_of_a_later_save(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments do not tell that a rank's file is of another save; the steps in it do."""
    source = foreign_checkpoints.nxd_folder(tmp_path / "source", truth(), tp=2)
    monkeypatch.setattr(foreign_checkpoints, "STEP", STEP + 1)
    other = foreign_checkpoints.nxd_folder(tmp_path / "other", truth(), tp=2)
    name = f"optim/{place}_pp_rank_00.pt"
    shutil.copy(other / name, source / name)
    refused(source, tmp_path, CheckpointDamaged, "step", "differs from its replica")


def test_torch_xla_file_of_a_later_save(tmp_path: Path) -> None:
    drawn = truth()
    source = foreign_checkpoints.torch_xla_folder(tmp_path / "source", drawn, form="state dict")
    for moments in drawn.moments.values():
        moments["step"] += 1
    other = foreign_checkpoints.torch_xla_folder(tmp_path / "other", drawn, form="state dict")
    shutil.copy(other / "optimizer_1.pt", source / "optimizer_1.pt")
    refused(source, tmp_path, CheckpointDamaged, "step", "differs from its replica")


@pytest.mark.parametrize(("count", "taken"), [(STEP, True), (1, False)])
def test_lightnings_schedule(count: int, taken: bool, tmp_path: Path) -> None:
    """One that counts epochs is not taken for one of steps; whatever else is in the file is named."""
    path = foreign_checkpoints.lightning_folder(tmp_path / "source", truth()) / "last.ckpt"
    content = torch.load(path, weights_only=True)
    content["lr_schedulers"][0]["last_epoch"] = count
    torch.save(content, path)
    found = opened(path)
    assert (found.schedule is not None) == taken
    assert any("they count epochs" in text for text in found.lost) != taken
    assert "metric.total: no part of model." in found.lost
    assert "epoch, loops: other values of the file" in found.lost
    assert not any("optimizer" in text for text in found.lost)


def test_two_models_in_a_module(tmp_path: Path) -> None:
    """Neither is `model.`, so nothing says which one is meant; a map does."""
    path = foreign_checkpoints.lightning_folder(tmp_path / "source", truth()) / "last.ckpt"
    tensors = {f"{key}.{name}": tensor for key in ("student", "teacher") for name, tensor in truth().model.items()}
    torch.save({"state_dict": tensors}, path)
    with pytest.raises(CheckpointMismatch, match=r"the model as student\. and teacher\."):
        opened(path, model_only=True)
