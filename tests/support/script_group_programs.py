"""Programs for ranks: a script that creates torch's default process group before Stepmark starts."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from stepmark.errors import LaunchError
from tests.support.processes import free_port


def create_group(kind: str, port: int) -> None:
    """Creates the group as `kind` says, with a store at `port`: "gloo", "accelerate", "file:PATH", "xla" or "env-xla"
    (torch_xla's backend with its own rendezvous, or torch's)."""
    os.environ.pop("STEPMARK_STORE_FD", None)
    os.environ["MASTER_PORT"] = str(port)
    if kind == "accelerate":
        from accelerate import PartialState

        with mock.patch("accelerate.state.is_torch_xla_available", return_value=False):  # as where it is not installed
            PartialState(cpu=True)
    elif kind.startswith("file:"):
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=f"file://{kind[5:]}", rank=rank, world_size=size)
    elif kind.endswith("xla"):
        import torch_xla.distributed.xla_backend  # noqa: F401

        if kind == "xla":  # every rank is alone, and serves a store; under torchrun all connect to the agent's
            os.environ["MASTER_PORT"] = str(free_port())
        dist.init_process_group("xla", init_method="env://" if kind == "env-xla" else "xla://")
    else:
        dist.init_process_group(kind)
    assert dist.is_initialized()


def connected(kind: str, port: int, device: str) -> dict[str, Any]:
    """What the ranks' store, the host group and the mesh give in a script with its own group."""
    from stepmark import Mesh
    from stepmark.runtime.context import start

    create_group(kind, port)
    context = start(device)
    store = context.store
    assert store is not None
    rank = context.world.rank
    store.set(f"mine/{rank}", str(rank))
    with context.leader_first("a task") as first:
        led = first
    mesh = Mesh.create(context=context)
    (total,) = mesh.data_parallel.all_reduce([mesh.runtime.place(torch.ones(2))])
    (total,) = mesh.runtime.to_host([total])
    connection = store.clone()  # as the heartbeats use it
    return {
        "others": [key.decode() for key in connection.multi_get([f"mine/{each}" for each in range(2)])],  # type: ignore[attr-defined]
        "leader": led,
        "ranks": context.host.all_gather(rank),
        "total": total.tolist(),
    }


def refusal(kind: str, port: int, device: str, environment: dict[str, str | None]) -> str:
    """The error of starting in a script with its own group, after which the launcher's variables changed."""
    from stepmark.runtime.context import start

    create_group(kind, port)
    for name, value in environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        start(device)
    except LaunchError as error:
        return str(error)
    return ""


def train(kind: str, port: int, options: dict[str, Any]) -> dict[str, Any]:
    """`programs.train` in a script with its own group."""
    from tests.support import programs

    create_group(kind, port)
    return programs.train(options)
