"""Checkpoints with one tensor an expert, as transformers writes them, become those of fused experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_state_dict
from transformers.core_model_loading import revert_weight_conversion

from stepmark.errors import CheckpointError, CheckpointMismatch
from stepmark.interchange.recognition import open_foreign
from stepmark.interchange.sources.foreign import ImportOptions
from tests.interchange.test_import import take
from tests.support.models import build

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, as it saves a store
KINDS = ["mixtral", "qwen3_moe", "deepseek_v3"]


def trained(kind: str) -> tuple[Any, torch.optim.AdamW]:
    """A model after two steps, with states that differ from element to element."""
    model = build(kind)
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.copy_(torch.randn(buffer.shape))
    named = list(model.named_parameters())
    groups = [[each for name, each in named if ("norm" in name) is norms] for norms in (False, True)]
    optimizer = torch.optim.AdamW([{"params": each} for each in groups], lr=1e-3)  # two, as transformers makes them
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return model, optimizer


def check(folder: Path, model: Any, optimizer: torch.optim.Optimizer | None) -> None:
    found, state = load_file(folder / "model.safetensors"), model.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    if optimizer is None:
        return
    states = load_file(folder / "optimizer" / "optimizer.safetensors")
    for name, parameter in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(states[f"{name}/{key}"], optimizer.state[parameter][key]), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_of_transformers_trainer(kind: str, tmp_path: Path) -> None:
    model, optimizer = trained(kind)
    source = tmp_path / "source"
    model.save_pretrained(source, max_shard_size="20KB")  # an expert's tensors are in different files
    assert any(
        ".experts.3." in name
        for name in json.loads((source / "model.safetensors.index.json").read_text())["weight_map"]
    )
    torch.save(optimizer.state_dict(), source / "optimizer.pt")
    (source / "trainer_state.json").write_text(json.dumps({"global_step": 2}))
    check(take(source, tmp_path / "out"), model, optimizer)


def single(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By the names that transformers writes."""
    return {name: tensor.contiguous() for name, tensor in revert_weight_conversion(model, dict(tensors)).items()}


def store(folder: Path, model: Any, optimizer: torch.optim.Optimizer, late: str | None = None) -> Path:
    """What a training of single experts saves: states by their names. `late`: an expert that has taken fewer steps."""
    _, states = get_state_dict(model, optimizer)
    moments = {
        key: single(model, {name: each[key] for name, each in states["state"].items()})
        for key in ("exp_avg", "exp_avg_sq")
    }
    body: dict[str, Any] = {
        name: {**{key: each[name] for key, each in moments.items()}, "step": torch.tensor(1.0 if name == late else 2.0)}
        for name in moments["exp_avg"]
    }
    names = {name: list(single(model, {name: each["exp_avg"]})) for name, each in states["state"].items()}
    groups = [
        {**group, "params": [each for name in group["params"] for each in names[name]]}
        for group in states["param_groups"]
    ]
    saved = {"model": single(model, model.state_dict()), "optimizer": {"state": body, "param_groups": groups}}
    dcp.save(saved, checkpoint_id=folder, no_dist=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_single_experts(kind: str, tmp_path: Path) -> None:
    model, optimizer = trained(kind)
    source = store(tmp_path / "source", model, optimizer)
    check(take(source, tmp_path / "out"), model, optimizer)


def test_an_expert_that_has_taken_fewer_steps(tmp_path: Path) -> None:
    """Its states cannot be in one tensor with those of others."""
    model, optimizer = trained("mixtral")
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    source = store(tmp_path / "source", model, optimizer, late=name)
    with pytest.raises(
        CheckpointMismatch, match=r"step differs between .*layers.1.mlp.experts.down_proj'.*--model-only"
    ):
        take(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def save(folder: Path, changed: Any) -> Path:
    model = build("qwen3_moe")
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    changed(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 2}))
    return folder


EXPERT = "model.layers.0.mlp.experts.{}.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda all: all.pop(EXPERT.format(2)), r"'model.layers.0.mlp.experts.2.up_proj.weight' is not there"),
        (lambda all: all.update({EXPERT.format(2): torch.zeros(3, 32)}), "experts"),
        (lambda all: all.update({EXPERT.format(4): torch.zeros(16, 32)}), "experts.4.up_proj"),
        (lambda all: all.update({EXPERT.format(2): torch.zeros(16, 32, dtype=torch.bfloat16)}), "BF16"),
        (lambda all: all.update({"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(4, 32, 32)}), "there as well"),
    ],
)
def test_parts_that_do_not_fit_are_named(change: Any, words: str, tmp_path: Path) -> None:
    source = save(tmp_path / "source", change)
    with pytest.raises(CheckpointError, match=words):
        open_foreign(source, ImportOptions(model_only=True))
