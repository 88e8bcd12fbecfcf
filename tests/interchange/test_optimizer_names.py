"""Whose a numbered optimizer's states are: by its own names, by the order of the program that saved, or by nobody's."""

from __future__ import annotations

import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from stepmark.cli.main import run
from stepmark.errors import CheckpointMismatch, UsageError
from stepmark.interchange.recognition import open_foreign
from stepmark.interchange.sinks.stepmark_checkpoint import write_checkpoint
from stepmark.interchange.sources.foreign import ImportOptions
from stepmark.interchange.sources.optimizer_names import numbered_names
from stepmark.model_folder.new_folder import WritingListener
from tests.support import foreign_checkpoints
from tests.support.foreign_checkpoints import (
    GROUP,
    Truth,
    save_dcp,
    torch_xla_folder,
    trainer_folder,
    truth,
    write_config,
)

SILENT = WritingListener(lambda size: None, lambda size: None)
KEY, VALUE = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"


def states(source: Path, **options: Any) -> dict[str, torch.Tensor]:
    out = source.with_name(f"{source.name}-out")
    write_checkpoint(open_foreign(source, ImportOptions(**options)), out, SILENT)
    return load_file(out / "optimizer" / "optimizer.safetensors")


def check(source: Path, **options: Any) -> None:
    found, expected = states(source, **options), truth()
    for name, moments in expected.moments.items():
        assert all(torch.equal(found[f"{name}/{key}"], value) for key, value in moments.items()), name


def values_first(names: Any) -> list[str]:
    """Another order, in which all shapes are the same."""
    found = list(names)
    one, other = found.index(KEY), found.index(VALUE)
    found[one], found[other] = VALUE, KEY
    return found


def numbered(names: list[str], *, own: list[str] | None = None) -> dict[str, Any]:
    """An AdamW over all parameters in this order, in one group, perhaps with names of its own."""
    moments = truth().moments
    group = {**GROUP, "params": list(range(len(names))), **({"param_names": own} if own else {})}
    return {"state": {number: moments[name] for number, name in enumerate(names)}, "param_groups": [group]}


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.module."])
@pytest.mark.parametrize("form", ["trainer", "file", "store"])
def test_names_that_the_optimizer_has(form: str, prefix: str, tmp_path: Path) -> None:
    """torch keeps them where an optimizer was made of named parameters, which may be in any order."""
    source, names = tmp_path / "source", values_first(truth().model)
    optimizer = numbered(names, own=[prefix + name for name in names])
    if form == "trainer":
        torch.save(optimizer, trainer_folder(source, truth()) / "optimizer.pt")
    elif form == "file":
        torch.save({"model": truth().model, "optimizer": optimizer}, source)
    else:
        save_dcp({"model": truth().model, "optimizer": optimizer}, source)
    check(source)


def test_names_of_another_model(tmp_path: Path) -> None:
    names = list(truth().model)
    source = trainer_folder(tmp_path / "source", truth())
    torch.save(numbered(names, own=["other.weight", *names[1:]]), source / "optimizer.pt")
    with pytest.raises(CheckpointMismatch, match=r"optimizer\.pt.*'other\.weight'.*--model-only"):
        states(source)
    torch.save(numbered(names, own=[names[-2], *names[1:-2], names[0], names[-1]]), source / "optimizer.pt")
    with pytest.raises(CheckpointMismatch, match=r"optimizer\.pt.*state 0 is .*64, 32.*norm"):
        states(source)


@pytest.mark.parametrize("form", ["file", "store"])
def test_order_of_another_program(form: str, tmp_path: Path) -> None:
    """Whose names a map changes: its class, and not the config's, has the order that its optimizer numbers."""
    source, drawn = tmp_path / "source", truth()
    names = values_first(drawn.model)
    model = {name.replace("model.layers", "net.blocks"): drawn.model[name] for name in names}
    state = {"model": model, "optimizer": numbered(names), "step": 3}
    torch.save(state, source) if form == "file" else save_dcp(state, source)
    config = foreign_checkpoints.write_config(tmp_path / "config")
    pairs = [(f"net.blocks.*{rest}", f"model.layers.*{rest}") for rest in (".*.weight", ".*.*.weight")]
    check(source, config=config, names=pairs)


@pytest.mark.parametrize("form", ["file", "store", "torch_xla"])
def test_two_orders_that_fit(form: str, tmp_path: Path) -> None:
    """The names are the config's, the order is not, and shapes do not tell: taking either would be a guess."""
    source, drawn = tmp_path / "source", truth()
    names = values_first(drawn.model)
    model = {name: drawn.model[name] for name in names}
    state = {"model": model, "optimizer": numbered(names), "step": 3}
    if form == "torch_xla":
        torch_xla_folder(source, Truth(model, {name: drawn.moments[name] for name in names}), form="state dict")
    else:
        torch.save(state, source) if form == "file" else save_dcp(state, source)
    config = foreign_checkpoints.write_config(tmp_path / "config")
    with pytest.raises(CheckpointMismatch, match=r"order of names.* differ in which is which.*--model-only"):
        states(source, config=config)
    assert open_foreign(source, ImportOptions(config=config, model_only=True)).model
    if form != "torch_xla":
        check(source)


@pytest.mark.parametrize("reordered", [False, True])
def test_one_group_where_the_trainer_makes_two(reordered: bool, tmp_path: Path) -> None:
    """The program made the optimizer, and how it listed parameters of one shape is in no file."""
    source = trainer_folder(tmp_path / "source", truth())
    names = values_first(truth().model) if reordered else list(truth().model)
    torch.save(numbered(names), source / "optimizer.pt")
    with pytest.raises(CheckpointMismatch, match=r"optimizer\.pt.*one parameter group.*--model-only"):
        states(source)
    assert open_foreign(source, ImportOptions(model_only=True)).model
    torch.save(numbered(names, own=names), source / "optimizer.pt")
    check(source)


@pytest.mark.parametrize("old", [False, True])
def test_one_group_where_the_neuron_trainer_makes_two(old: bool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    names = list(truth().model)
    if old:
        place = source / "tensor_parallel_shards" / "tp_rank_00_pp_rank_00" / "checkpoint.pt"
        foreign_checkpoints.write_config(source)
        value = {"model": truth().model, "optimizer_state_dict": numbered(names), "sharded_metadata": {}}
        foreign_checkpoints.save_rank(place, value, xser=False)
    else:
        foreign_checkpoints.optimum_folder(source, truth(), tp=1, xser=False)
        for path in (source / "shards" / "optim").iterdir():
            state = torch.load(path, weights_only=True)
            state["param_groups"] = [{**GROUP, "params": list(range(len(state["state"])))}]
            torch.save(state, path)
    with pytest.raises(CheckpointMismatch, match=r"one parameter group.*optimum-neuron.*--model-only"):
        states(source)


def test_two_rules_that_fit() -> None:
    """As many norms as biases, of one size: which of them do not decay is not known."""
    parameters = {"a.norm.weight": (4,), "b.bias": (4,), "c.weight": (4,), "d.rms.bias": (4,)}
    groups = [{"params": [0, 1]}, {"params": [2, 3]}]
    shapes = dict.fromkeys(range(4), (4,))
    with pytest.raises(CheckpointMismatch, match="several rules fit"):
        numbered_names(groups, shapes, parameters, "here", frozenset({"a.norm.weight"}))


def test_map_renames_the_names_of_a_store(tmp_path: Path) -> None:
    source, drawn = tmp_path / "source", truth()
    new = {name: f"inner.{name}" for name in drawn.model}
    groups = [{**GROUP, "params": list(new.values())}]
    moments = {new[name]: one for name, one in drawn.moments.items()}
    weights = {new[name]: tensor for name, tensor in drawn.model.items()}
    save_dcp({"model": weights, "optimizer": {"state": moments, "param_groups": groups}}, source)
    config = foreign_checkpoints.write_config(tmp_path / "config")
    pairs = [(f"inner.{stars}", stars) for stars in (".".join("*" * count) for count in range(2, 7))]
    check(source, config=config, names=[pair for pair in pairs if pair[0].count("*") in (2, 3, 5, 6)])


def adafactor(names: list[str], own: str) -> dict[str, Any]:
    """The state dict of an Adafactor of transformers or torch, after a step."""
    drawn = truth()
    parameters = [torch.nn.Parameter(drawn.model[name].clone()) for name in names]
    kind: Any = transformers.optimization.Adafactor if own == "transformers" else torch.optim.Adafactor
    settings = {"scale_parameter": False, "relative_step": False} if own == "transformers" else {}
    optimizer = kind(parameters, lr=0.1, **settings)
    for name, parameter in zip(names, parameters, strict=True):
        parameter.grad = drawn.moments[name]["exp_avg"]
    optimizer.step()
    return dict(optimizer.state_dict())


@pytest.mark.parametrize("own", ["transformers", "torch"])
@pytest.mark.parametrize("form", ["accelerate", "file", "store"])
def test_adafactor(form: str, own: str, tmp_path: Path) -> None:
    """Whose sums over rows and columns show a parameter's shape together."""
    source, names = tmp_path / "source", list(truth().model)
    saved = adafactor(names, own)
    config = foreign_checkpoints.write_config(tmp_path / "config")
    if form == "accelerate":
        (trainer_folder(source, truth()) / "trainer_state.json").unlink()
        torch.save(saved, source / "optimizer.pt")
    elif form == "file":
        torch.save({"model": truth().model, "optimizer": saved}, source)
    else:
        save_dcp({"model": truth().model, "optimizer": saved}, source)
    found = states(source, config=config)
    items = [(f"{names[n]}/{key}", value) for n, state in saved["state"].items() for key, value in state.items()]
    wanted = {key: value for key, value in items if isinstance(value, torch.Tensor)}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    swapped = adafactor([names[4], *names[1:4], names[0], *names[5:]], own)  # [32, 32] for [64, 32]
    torch.save({"model": truth().model, "optimizer": swapped}, tmp_path / "swapped.pt")
    with pytest.raises(CheckpointMismatch, match=r"swapped\.pt.*state \d+ is"):
        open_foreign(tmp_path / "swapped.pt", ImportOptions(config=config))


@pytest.mark.parametrize("tool", ["neuronx-distributed", "torch_xla ZeRO-1"])
def test_sums_of_a_part_of_a_parameter(tool: str, tmp_path: Path) -> None:
    """Each rank's Adafactor has its own sums, of which the whole parameter's do not follow."""
    source = foreign_checkpoints.WRITERS[tool](tmp_path / "source", truth())
    for path in [*source.glob("optim/*"), *source.glob("*.tar")]:
        value = torch.load(path, weights_only=True)
        inner = value.get("optimizer_state_dict", value)
        for number, shape in inner["shape_info"].items():
            if len(shape) == 2:
                part = inner["base_state"][number].pop("exp_avg_sq")
                inner["base_state"][number].pop("exp_avg")
                inner["base_state"][number] |= {"exp_avg_sq_row": part.mean(1), "exp_avg_sq_col": part.mean(0)}
        torch.save(value, path)
    with pytest.raises(CheckpointMismatch, match=r"exp_avg_sq_row.*--model-only"):
        open_foreign(source, ImportOptions())


def test_options_of_other_formats(tmp_path: Path) -> None:
    """An option that would change nothing is an error."""
    source = trainer_folder(tmp_path / "source", truth())
    with pytest.raises(UsageError, match="--map: .*source has the names of its tool"):
        open_foreign(source, ImportOptions(names=[("a", "b")]))
    with pytest.raises(UsageError, match="--heads: .*source has no replicated heads"):
        open_foreign(source, ImportOptions(heads="natural"))
    assert run(["import", str(source), str(tmp_path / "out"), "--heads", "natural"]) == UsageError.exit_code


FROZEN = ("model.embed_tokens.*", "model.layers.0.*")


@pytest.mark.parametrize("groups", [2, 1])
def test_frozen_parameters_are_named(groups: int, tmp_path: Path) -> None:
    """An optimizer has states of those that were trained, by number, and nothing says which these are."""
    moments = truth().moments
    trained = [name for name in truth().model if not any(map(partial(fnmatch.fnmatch, name), FROZEN))]
    assert 2 < len(trained) < len(moments)
    divided = [[name for name in trained if ("norm" in name) is last] for last in (False, True)]
    listed = divided if groups == 2 else [trained]
    order = [name for group in listed for name in group]
    numbers = [[order.index(name) for name in group] for group in listed]
    optimizer = {
        "state": {number: moments[name] for number, name in enumerate(order)},
        "param_groups": [{**GROUP, "params": group} for group in numbers],
    }
    if groups == 2:
        source = trainer_folder(tmp_path / "source", truth())
        torch.save(optimizer, source / "optimizer.pt")
    else:
        source = tmp_path / "source"
        source.mkdir()
        torch.save({"model": truth().model, "optimizer": optimizer}, source / "state.pt")
        with pytest.raises(UsageError, match="^--frozen: names are those of the model's config"):
            states(source, frozen=FROZEN)
        write_config(source)
    with pytest.raises(CheckpointMismatch, match=r"name those that were frozen \(--frozen 'model.layers.0.\*'\)"):
        states(source)
    assert run(["import", str(source), str(tmp_path / "out"), "--frozen", *FROZEN]) == 0
    found = states(source, frozen=FROZEN)
    assert load_file(tmp_path / "out" / "optimizer" / "optimizer.safetensors").keys() == found.keys()
    assert {name.rpartition("/")[0] for name in found} == set(trained)
    for name in trained:
        assert all(torch.equal(found[f"{name}/{key}"], value) for key, value in moments[name].items()), name
    with pytest.raises(UsageError, match="^--frozen: no parameter of the .* is like 'nothing'"):
        states(source, frozen=["nothing"])
