"""Programs for ranks that read an exported store with torch's own code."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.support.foreign_checkpoints import CONFIG, grouped, truth


def sharded_load(folder: str, flat: bool) -> list[str]:
    """Loads into a model and an AdamW under FSDP2; the names whose values are not the truth's."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=size)
    config: Any = transformers.LlamaConfig(**{key: value for key, value in CONFIG.items() if key != "model_type"})
    model = transformers.LlamaForCausalLM(config)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    parameters = dict(model.named_parameters())
    groups = [[*grouped(list(parameters))[0], *grouped(list(parameters))[1]]] if flat else grouped(list(parameters))
    optimizer = torch.optim.AdamW([{"params": [parameters[name] for name in group]} for group in groups])
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
    wrong += ["step"] if state["step"] != 3 else []
    return wrong + (["lr"] if any(group["lr"] != 0.01 for group in optimizer.param_groups) else [])


def full(tensor: Any) -> torch.Tensor:
    """All of a tensor that may be sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
