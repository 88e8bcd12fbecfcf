"""Programs of ranks that save and load state dicts, with our functions or torch's."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.support.faults import Faults


def join(folder: str) -> None:
    """Connects the ranks through a file."""
    warnings.simplefilter("ignore")
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    store = dist.FileStore(f"{folder}/store-{os.environ.get('MASTER_PORT')}", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))


def functions(whose: str) -> Any:
    """The module with save, async_save and load."""
    if whose == "torchs":
        import torch.distributed.checkpoint as dcp
    else:
        from stepmark.checkpoint import dcp  # type: ignore[no-redef]
    return dcp


class App:
    """A model and its optimizer, as torch's tutorial has them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def train(folder: str, whose: str, shard: bool, steps: int, place: str | None = None) -> list[Any]:
    """Goes on for so many steps, from the last checkpoint if there is one; returns the step and a digest of all."""
    join(folder)
    dcp = functions(whose)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.BatchNorm1d(7), nn.Linear(7, 3))
    if shard:
        fully_shard(model[0])  # type: ignore[index]
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model) if dist.get_world_size() > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state: dict[str, Any] = {"app": App(model, optimizer), "schedule": schedule, "step": 0}
    last = Path(folder) / "last"
    if last.exists():
        dcp.load(state, checkpoint_id=last.read_text())
    for step in range(state["step"], state["step"] + steps):
        torch.manual_seed(step)
        model(torch.randn(6, 5)).sum().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    state["step"] += steps
    path = f"{place or folder}/step-{state['step']}"
    dcp.save(state, checkpoint_id=path)
    dcp.async_save(state, checkpoint_id=path).result()
    dist.barrier()
    last.write_text(path)
    digest = _digest({**App(model, optimizer).state_dict(), "schedule": schedule.state_dict()})
    dist.destroy_process_group()
    return [state["step"], digest]


def _digest(value: Any) -> str:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, Tensor):
        text = f"{value.dtype} {list(value.shape)} {hashlib.sha256(value.detach().numpy().tobytes()).hexdigest()}"
    elif isinstance(value, dict):
        text = str([(key, _digest(value[key])) for key in sorted(value)])
    else:
        text = str([_digest(item) for item in value]) if isinstance(value, list) else repr(value)
    return hashlib.sha256(text.encode()).hexdigest()


def differing(folder: str, whose: str) -> dict[str, Any]:
    """What is loaded of values that differ between ranks: under one name, and under names of the ranks'."""
    join(folder)
    rank = dist.get_rank()
    large = torch.full((3 << 18,), float(rank))
    mine = {"seed": rank, "generator": torch.full((9,), rank), "large": large, f"rank-{rank}": {"at": rank}}
    mine |= {"equal": torch.ones(3), "as equal": 1}
    dcp = functions(whose)
    dcp.save({**mine, "by rank": {rank: torch.full((2,), rank)}}, checkpoint_id=f"{folder}/c")
    state: dict[str, Any] = {name: value * 0 - 1 if isinstance(value, Tensor) else None for name, value in mine.items()}
    state |= {f"rank-{each}": {"at": None} for each in range(2)}
    state["by rank"] = {each: torch.full((2,), -1) for each in range(2)}
    dcp.load(state, checkpoint_id=f"{folder}/c")
    found = {name: value.unique().tolist() if isinstance(value, Tensor) else value for name, value in state.items()}
    found["by rank"] = [value.tolist() for value in state["by rank"].values()]
    dist.destroy_process_group()
    return found


def refused(folder: str) -> dict[str, str]:
    """What each rank is told about what cannot be saved or loaded."""
    join(folder)
    from stepmark.checkpoint import dcp

    rank, told = dist.get_rank(), {}
    tensor = {"w": torch.ones(2)}

    def attempt(name: str, call: Any, state: Any, path: str) -> None:
        try:
            call(state, checkpoint_id=f"{folder}/{path}")
        except Exception as error:
            told[name] = f"{type(error).__name__}: {error}"

    attempt("folder", dcp.save, tensor, f"step-{rank}")
    attempt("value", dcp.save, {"odd": object()} if rank == 1 else tensor, "c")
    attempt("shape", dcp.save, {"w": torch.ones(2 + rank)}, "c")
    for name, outer in (("kind", "state"), ("kind in the model", "model")):
        attempt(name, dcp.save, {outer: tensor if rank == 0 else {"w": "a text"}}, "c")
    dcp.save(tensor, checkpoint_id=f"{folder}/c")
    attempt("name", dcp.load, {"w": torch.zeros(2)} if rank == 0 else {"v": torch.zeros(2)}, "c")
    attempt("missing", dcp.load, {"w": torch.zeros(2)}, "nothing")
    dist.destroy_process_group()
    return told


def groups(folder: str) -> list[Any]:
    """Three ranks: the last two save together, and each saves alone."""
    join(folder)
    from stepmark.checkpoint import dcp

    rank = dist.get_rank()
    pair = dist.new_group([1, 2])
    found = []
    if rank:
        dcp.save({"w": torch.ones(2), f"of-{rank}": rank}, checkpoint_id=f"{folder}/pair", process_group=pair)
        state: dict[str, Any] = {"w": torch.zeros(2), "of-1": None, "of-2": None}
        dcp.load(state, checkpoint_id=f"{folder}/pair", process_group=pair)
        found = [state["w"].tolist(), state["of-1"], state["of-2"]]
    dcp.save({"rank": rank}, checkpoint_id=f"{folder}/alone-{rank}", no_dist=True)
    state = {"rank": None}
    dcp.load(state, checkpoint_id=f"{folder}/alone-{rank}", no_dist=True)
    dist.destroy_process_group()
    return [*found, state["rank"]]


def save(folder: str, value: float, calls: list[int]) -> None:
    """Saves; a rank is killed at its call that changes the file system (0: none)."""
    join(folder)
    from stepmark.checkpoint import dcp

    Faults("killed-before", calls[dist.get_rank()]).install()
    dcp.save(state_of(value), checkpoint_id=f"{folder}/c")
    dist.destroy_process_group()


def state_of(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((300,), value)}, "step": value}


def loaded(folder: str) -> float:
    """The value that was saved; all of it has to be there."""
    from stepmark.checkpoint import dcp

    state = state_of(0.0)
    dcp.load(state, checkpoint_id=f"{folder}/c")
    assert state["model"]["w"].unique().tolist() == [state["step"]]
    return float(state["step"])


class RenameFaults(Faults):
    """Counts only the calls that give a file or folder another name."""

    def _call(self, name: str, call: Callable[[], Any], *records: tuple[Any, ...]) -> Any:
        return super()._call(name, call, *records) if "rename" in name else call()


def killed_everywhere(folder: str, exchange: bool) -> list[float]:
    """Kills a save after each call that renames something; what can be loaded then, after another save if need be."""
    from stepmark.checkpoint import dcp

    def in_child(value: float, at: int = 0) -> bool:
        if (child := os.fork()) == 0:
            RenameFaults("killed-after", at, exchange=exchange).install()
            dcp.save(state_of(value), checkpoint_id=f"{folder}/c")
            os._exit(0)
        return os.waitpid(child, 0)[1] == 0

    assert in_child(1.0)
    found, at, done = [loaded(folder)], 0, False
    while not done:
        at += 1
        done = in_child(found[-1] + 1.0, at)
        if not Path(folder, "c").exists():  # names cannot be exchanged here, and it died between two renames
            assert not exchange
            assert in_child(found[-1] + 1.0)
        found.append(loaded(folder))
    return found
