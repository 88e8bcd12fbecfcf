"""Programs for ranks of plain torch.distributed jobs, which shard by torch's own means and save with Checkpointer."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from stepmark import Checkpointer
from stepmark.checkpoint.format.dtypes import dtype_name
from stepmark.errors import StepmarkError
from stepmark.sharding.dtensor import is_dtensor, local_of
from stepmark.sharding.views import host_array
from tests.support.faults import Faults
from tests.support.gate import CopyGate


class Model(nn.Module):
    """No size is a multiple of 2, 3 or 4; one has fewer rows than the largest job has ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 11)
        self.down = nn.Linear(11, 5)
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 3)
        self.scale = nn.Buffer(torch.full((3,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.down(self.up(x).tanh()))) * self.scale[0]
        return y.square().mean()


@contextmanager
def job(name: str) -> Iterator[None]:
    """Joins the ranks, with nothing but torch; `name` is a file that no other job uses."""
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", init_method=f"file://{name}", rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_ranks(shape: tuple[int, ...], rank: int) -> Iterator[DeviceMesh]:
    """This process as one of a mesh's ranks, of which the others are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(shape))
    names = [f"{name}_of_{rank}" for name in ("dp", "tp")]  # torch keeps results by names and ranks of a mesh
    try:
        yield init_device_mesh("cpu", shape, mesh_dim_names=tuple(names[: len(shape)]))
    finally:
        dist.destroy_process_group()


def tensor_parallel_and_sharded(module: nn.Module, mesh: DeviceMesh) -> None:
    """Divides the parameters by tensor parallelism, and then by fully_shard."""
    dp, tp = (mesh[name] for name in mesh.mesh_dim_names or ())
    for name, parameter in list(module.named_parameters()):
        placed = distribute_tensor(parameter.detach(), tp, [Shard(0)], src_data_rank=None)
        setattr(module, name, nn.Parameter(placed))
    fully_shard(module, mesh=dp)


def sharded(kind: str) -> nn.Module:
    """A model whose parameters are DTensors, except with "plain". "twice" cuts one dim by two mesh dims, and "few"
    leaves the last rank without a part."""
    model, world = Model(), dist.get_world_size()
    if kind == "plain":
        return model
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
    elif kind == "few":
        mesh = DeviceMesh("cpu", list(range(world - 1)))
    else:
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    if kind in ("fsdp", "hsdp"):
        for layer in (model.up, model.down):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "fsdp+tp":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, mesh["tp"], plan)
        for layer in (model.up, model.down):
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    else:
        placements = [Shard(0)] * mesh.ndim
        for module in list(model.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, placements)))
    return model


def optimizers(model: nn.Module, kind: str) -> dict[str, torch.optim.Optimizer]:
    """AdamW in its ways to compute; with "muon", Muon for the matrices."""
    parameters = list(model.parameters())
    if kind != "muon":
        options: dict[str, Any] = {"foreach": False} if kind == "loop" else {kind: True}
        return {"optimizer": torch.optim.AdamW(parameters, lr=0.01, **options)}
    matrices = [each for each in parameters if each.dim() == 2]
    others = [each for each in parameters if each.dim() != 2]
    return {"muon": torch.optim.Muon(matrices, lr=0.01), "optimizer": torch.optim.AdamW(others, lr=0.01)}


def train(model: nn.Module, kinds: dict[str, torch.optim.Optimizer], steps: int, seed: int = 0) -> list[float]:
    """Steps on one batch, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(12, 7, generator=generator))
        loss.backward()
        for optimizer in kinds.values():
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def update(model: nn.Module, kinds: dict[str, torch.optim.Optimizer], steps: int) -> None:
    """Steps with gradients of one's own: DTensors that lie as no layer can compute."""
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone().mul_(0.1 + step)  # another result loses its stride in torch 2.9
        for optimizer in kinds.values():
            optimizer.step()


def advance(kind: str, model: nn.Module, kinds: dict[str, torch.optim.Optimizer], steps: int) -> None:
    """Trains, where torch can compute what is sharded so unevenly."""
    (train if kind in ("plain", "fsdp", "hsdp") else update)(model, kinds, steps)


def run(folder: str, kind: str, ways: list[str], saved: int | None, step: int, steps: int) -> list[dict[str, str]]:
    """For each way to optimize: restores the checkpoint `saved`, or begins, trains for some steps, and saves as `step`.
    Returns what torch says that the tensors are, in the form of mesh_checkpoints.checksums."""
    found = []
    with job(f"{folder}-{step}.store"):
        for way in ways:
            torch.manual_seed(0 if saved is None else 1)
            model = sharded(kind)
            kinds = optimizers(model, way)
            state = {"model": model, **kinds}
            with Checkpointer(f"{folder}/{way}") as checkpointer:
                if saved is not None:
                    assert checkpointer.restore(state, saved) == saved
                advance(kind, model, kinds, steps)
                checkpointer.save(step, state).result()
            found.append(complete(model, kinds))
    return found


def resumed(folder: str, kind: str, way: str, place: str | None = None) -> list[bool]:
    """Whether a run changes after its checkpoint, and one that begins anew from there comes to the same."""
    with job(f"{folder}-{kind}-{way}.store"), Checkpointer(f"{place or folder}/{kind}-{way}") as checkpointer:
        model = sharded(kind)
        kinds = optimizers(model, way)
        advance(kind, model, kinds, 2)
        checkpointer.save(1, {"model": model, **kinds})
        before = complete(model, kinds)
        advance(kind, model, kinds, 2)
        after = complete(model, kinds)
        torch.manual_seed(1)
        model = sharded(kind)
        kinds = optimizers(model, way)
        checkpointer.restore({"model": model, **kinds})
        advance(kind, model, kinds, 2)
        return [before != after, complete(model, kinds) == after]


def complete(model: nn.Module, kinds: dict[str, torch.optim.Optimizer]) -> dict[str, str]:
    """The checksums of all tensors, as torch itself gathers them."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = {f"model/{name}": value for name, value in model.state_dict().items()}
    for section, optimizer in kinds.items():
        for parameter, state in optimizer.state.items():
            found |= {f"optimizer/{section}/{names[id(parameter)]}/{key}": value for key, value in state.items()}
    shown = {}
    for name, value in found.items():
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        digest = xxhash.xxh3_128_hexdigest(whole.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
        shown[name] = f"{dtype_name(whole.dtype)} {list(whole.shape)} {digest}"
    return shown


def killed(folder: str, calls: int) -> None:
    """Trains, saves, and is killed in the next save: the last rank, before this number of changes to the folder."""
    with job(f"{folder}.store"):
        torch.manual_seed(0)
        model = sharded("fsdp")
        kinds = optimizers(model, "foreach")
        with Checkpointer(folder, save_timeout=20) as checkpointer:
            train(model, kinds, 2)
            checkpointer.save(1, {"model": model, **kinds}).result()
            train(model, kinds, 2)
            if dist.get_rank() == dist.get_world_size() - 1:
                Faults("killed-before", at=calls).install()
            checkpointer.save(2, {"model": model, **kinds}).result()


def again(folder: str) -> None:
    """Restores the newest checkpoint, and saves it as step 3."""
    with job(f"{folder}-again.store"), Checkpointer(folder) as checkpointer:
        model = sharded("fsdp")
        state = {"model": model, **optimizers(model, "foreach")}
        assert checkpointer.restore(state) == 1
        checkpointer.save(3, state)


@torch.no_grad()
def write_late(how: str, model: nn.Module, kinds: dict[str, torch.optim.Optimizer], before: Any) -> None:
    """Writes to what is being saved, in one way."""
    if how == "passes":  # gathers the parameters, and writes to none
        with torch.enable_grad():
            model(torch.ones(12, 7)).backward()
        return
    if how == "load":
        model.load_state_dict(before)
    for parameter in model.parameters():
        assert is_dtensor(parameter)
        if how == "array":
            host_array(local_of(parameter), write=True).fill(7)
        elif how == "in place":
            parameter.mul_(3)
        elif how == "local":
            parameter.to_local().add_(1)
        elif how == "data":
            local_of(parameter.data).fill_(7)
        for state in kinds["optimizer"].state[parameter].values() if how == "states" else ():
            state.fill_(7)


def saved_late(folder: str, kind: str) -> list[tuple[str, int, bool, bool]]:
    """For each way to write before anything is copied: how many copies waited, whether the model changed, and whether
    what it was can be restored. An update waits until copies are made."""
    found = []
    with job(f"{folder}.store"), Checkpointer(folder) as checkpointer:
        model = sharded(kind)
        kinds = optimizers(model, "foreach")
        for step, how in enumerate(("passes", "array", "in place", "local", "data", "load", "states", "update")):
            before = {name: value.detach().clone() for name, value in model.state_dict().items()}
            train(model, kinds, 2)
            saved = complete(model, kinds)
            with pytest.MonkeyPatch.context() as patch:
                gate = CopyGate(patch)
                handle = checkpointer.save(step, {"model": model, **kinds})
                if how == "update":
                    opened = threading.Timer(0.3, gate.open)
                    opened.start()
                    train(model, kinds, 1)
                else:
                    write_late(how, model, kinds, before)
                written = complete(model, kinds) != saved
                gate.open()
                handle.result()
            checkpointer.restore({"model": model, **kinds}, step)
            found.append((how, gate.pending[0], written, complete(model, kinds) == saved))
    return found


class LocalMomentum(torch.optim.Optimizer):
    """Keeps plain tensors of the size of the local ones, as optimizers do that know nothing of DTensors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter.to_local())
                state["momentum"].mul_(0.9).add_(parameter.grad.to_local())
                parameter.to_local().sub_(group["lr"] * state["momentum"])


def local_states(folder: str) -> list[Any]:
    """Whether training goes on from a checkpoint as if nothing had happened, and the slices of a state in it."""
    with job(f"{folder}.store"), Checkpointer(folder) as checkpointer:
        model = sharded("fsdp")
        optimizer = LocalMomentum(model.parameters())
        state = {"model": model, "optimizer": optimizer}
        train(model, {"": optimizer}, 2)
        checkpointer.save(1, state).result()
        train(model, {"": optimizer}, 2)
        expected = complete(model, {})
        checkpointer.restore(state, 1)
        train(model, {"": optimizer}, 2)
        entry = checkpointer.manifest(1).tensors["optimizer/optimizer"]["up.weight/momentum"]
        return [complete(model, {}) == expected, entry.shape, len(entry.slices)]


class Everywhere(nn.Module):
    """A DTensor in each place where a module has tensors: parameter, buffer, a tensor made for the purpose, and extra
    state."""

    def __init__(self, mesh: DeviceMesh, value: float) -> None:
        super().__init__()
        self.made = distribute_tensor(torch.full((5, 2), value), mesh, [Shard(0)])
        self.weight = nn.Parameter(self.made.clone())
        self.register_buffer("buffer", self.made.clone())

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "made"] = self.made.clone()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        self.made = state_dict.pop(prefix + "made")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def get_extra_state(self) -> Any:
        return [self.made]

    def set_extra_state(self, state: Any) -> None:
        self.extra = state[0]


class Holder:
    """An object that is saved by its state dict."""

    def __init__(self, value: DTensor) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def flattened(folder: str) -> list[str]:
    """What a save says of a model whose ranks have different values in parameters of one name and shape."""
    told = []
    with job(f"{folder}.store"), Checkpointer(folder) as checkpointer:
        for own_names in (False, True):
            model = FullyShardedDataParallel(nn.Linear(4, 3), device_id=torch.device("cpu"), use_orig_params=own_names)
            with pytest.raises(StepmarkError) as error:
                checkpointer.save(1, {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
            told.append(str(error.value))
    return told


def everywhere(folder: str) -> dict[str, Any]:
    """Puts DTensors wherever a state may hold tensors, restores them to others that are placed in another way, and
    returns each one's values, and whether its placement stayed."""
    with job(f"{folder}.store"), Checkpointer(folder) as checkpointer:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))

        def state(value: float, placement: Any) -> dict[str, Any]:
            tensors = [distribute_tensor(torch.full((3, 5), value + i), mesh, [placement]) for i in range(3)]
            return {"model": Everywhere(mesh, value), "nest": {"list": [tensors[0], 1]}, "object": Holder(tensors[1])}

        checkpointer.save(1, state(2.0, Shard(0)))
        restored = state(7.0, Shard(1))
        checkpointer.restore(restored, 1)
        model = restored["model"]
        found = {"parameter": model.weight, "buffer": model.buffer, "made": model.made, "extra": model.extra}
        found |= {"nest": restored["nest"]["list"][0], "object": restored["object"].value}
        shown: dict[str, Any] = {
            name: [value.full_tensor().unique().tolist(), str(value.placements)] for name, value in found.items()
        }
        same = distribute_tensor(torch.zeros(4), mesh, [Shard(0)])
        alias = DTensor.from_local(same.to_local(), mesh, [Shard(0)])
        checkpointer.save(2, {"two": {"a": same + 1, "b": same + 2}})
        two = {"a": same, "b": alias}
        checkpointer.restore({"two": two}, 2)
        shown["shared memory"] = [two["a"].full_tensor().tolist(), two["b"].full_tensor().tolist()]
        try:
            checkpointer.save(3, {"sums": {"a": DTensor.from_local(torch.ones(2), mesh, [Partial()])}})
        except StepmarkError as error:
            shown["partial"] = str(error)
        return shown
