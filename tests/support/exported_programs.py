"""Programs for ranks that read and write stores with torch's own code: models and an AdamW under FSDP2."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support import foreign_checkpoints
from tests.support.foreign_checkpoints import STEP, grouped, truth

_CUT = {"q_proj": ColwiseParallel, "k_proj": ColwiseParallel, "v_proj": ColwiseParallel, "o_proj": RowwiseParallel}
_CUT |= {"gate_proj": ColwiseParallel, "up_proj": ColwiseParallel, "down_proj": RowwiseParallel}


def sharded_load(folder: str, flat: bool) -> list[str]:
    """Loads into a model and an AdamW under FSDP2; the names whose values are not the truth's."""
    model, optimizer = _sharded(folder, one_group=flat)
    parameters = dict(model.named_parameters())
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = get_state_dict(model, optimizer, options=options)
    state = {"model": weights, "optimizer": states, "step": 0}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
    )
    expected = truth()
    wrong = [name for name, tensor in expected.model.items() if not torch.equal(full(parameters[name]), tensor)]
    for name, moments in expected.moments.items():
        own = optimizer.state[parameters[name]]
        wrong += [f"{name}/{key}" for key, value in moments.items() if not torch.equal(full(own[key]), value)]
    wrong += ["step"] if state["step"] != STEP else []
    return wrong + (["lr"] if any(group["lr"] != 0.01 for group in optimizer.param_groups) else [])


def sharded_save(folder: str, form: str, keys: int, mesh: tuple[int, ...]) -> None:
    """Saves the truth from a model and an AdamW under FSDP2, whose optimizer state is `form`: nested, flattened, or
    numbered. With a mesh of two dims, the second one cuts the matrices."""
    foreign_checkpoints.KEYS = keys
    foreign_checkpoints.CONFIG["num_key_value_heads"] = keys
    model, optimizer = _sharded(folder, one_group=form == "flattened", mesh=mesh)
    expected = truth()
    states: Any = {"state": expected.moments, "param_groups": []}
    for names in _listed(list(expected.model), one_group=form == "flattened"):
        states["param_groups"].append({**optimizer.param_groups[0], "lr": 0.01, "params": names})
    whole = StateDictOptions(full_state_dict=True)
    set_state_dict(model, optimizer, model_state_dict=expected.model, optim_state_dict=states, options=whole)
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
    weights, own = get_state_dict(model, optimizer, options=options)
    if form == "numbered":
        weights, own = model.state_dict(), optimizer.state_dict()
    dcp.save({"model": weights, "optimizer": own, "step": STEP}, checkpoint_id=folder)


def _listed(names: list[str], one_group: bool) -> list[list[str]]:
    decaying, others = grouped(names)
    return [[*decaying, *others]] if one_group else [decaying, others]


def _sharded(folder: str, one_group: bool, mesh: tuple[int, ...] = ()) -> tuple[Any, torch.optim.AdamW]:
    """A model under FSDP2 over all ranks, or over a mesh, and its optimizer."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=size)
    config: Any = transformers.LlamaConfig(
        **{key: value for key, value in foreign_checkpoints.CONFIG.items() if key != "model_type"}
    )
    model = transformers.LlamaForCausalLM(config)
    found = init_device_mesh("cpu", mesh or (size,), mesh_dim_names=("dp", "tp")[: len(mesh or (size,))])
    for layer in model.model.layers:
        if len(mesh) == 2:
            cuts = {f"{'mlp' if name[0] in 'gud' else 'self_attn'}.{name}": cut() for name, cut in _CUT.items()}
            parallelize_module(layer, found["tp"], cuts)
        fully_shard(layer, mesh=found["dp"])
    fully_shard(model, mesh=found["dp"])
    parameters = dict(model.named_parameters())
    groups = _listed(list(parameters), one_group)
    return model, torch.optim.AdamW([{"params": [parameters[name] for name in names]} for names in groups])


def full(tensor: Any) -> torch.Tensor:
    """All of a tensor that may be sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
