"""Model folders beside those of `save_pretrained`: small models of many classes, written by one rank and by two."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from scripts.small_models import narrow_model
from stepmark.checkpoint import Checkpointer
from stepmark.launch.world import World
from stepmark.liveness.host_group import HostGroup
from stepmark.runtime.collectives import NoCollectives
from stepmark.runtime.context import Context
from stepmark.runtime.eager import EagerRuntime
from stepmark.runtime.mesh import Mesh
from stepmark.runtime.rank_grid import RankGrid
from stepmark.trainer.run_folder.adapters import saved_module
from stepmark.trainer.run_folder.model_export import write_model, write_model_files
from tests.support import label_models
from tests.support.models import with_lora

SAVED_BY = ("one rank", "two ranks", "checkpoint", "adapter")
COLUMNS = ("model", "class", "tensors", "other names in memory", "digest", *SAVED_BY, "why")
EQUAL = "equal"
NOT_MADE = "not made"
LARGE = ("blt",)  # some of whose parts have the published sizes, whatever the configuration says
TIMEOUT = 60.0


def make(name: str) -> Any:
    """A small model of a class, or of a model type's class for causal language models. Raises NotMade."""
    if name in LARGE:
        raise label_models.NotMade("no small configuration")
    if hasattr(transformers, name):
        return label_models.small(name)
    try:
        return narrow_model(name)
    except Exception as error:
        raise label_models.NotMade(f"no small configuration: {_first_line(error)}") from error


def compare_all(names: list[str]) -> list[dict[str, Any]]:
    """A row for each model; that of rank 0 is complete."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    mesh = Mesh.create(device="cpu")
    devices = init_device_mesh("cpu", (mesh.context.world.size,))
    return [compare(name, mesh, devices) for name in names]


def compare(name: str, mesh: Mesh, devices: DeviceMesh) -> dict[str, Any]:
    """What differs between what `save_pretrained` of a model writes and what Stepmark does. Collective."""
    row: dict[str, Any] = dict.fromkeys(COLUMNS, "") | {"model": name}
    try:
        model = make(name)
    except label_models.NotMade as error:
        return row | {"one rank": NOT_MADE, "why": str(error)}
    host = mesh.context.host
    with tempfile.TemporaryDirectory() as own:
        folder = Path(host.broadcast(own if host.rank == 0 else None))
        if host.rank == 0:
            row |= by_one_rank(model, folder)
        divide(model, devices)
        row["two ranks"] = _outcome(lambda: _same(folder, "two", lambda out: _write(out, model, mesh), host.rank == 0))
        host.barrier()
    row["why"] = "; ".join(f"{key}: {row[key]}" for key in SAVED_BY if row[key] not in ("", EQUAL))
    return row | {key: "different" for key in SAVED_BY if row[key] not in ("", EQUAL)}


def by_one_rank(model: Any, folder: Path) -> dict[str, Any]:
    """The row without its last columns; leaves what `save_pretrained` writes in the folder `theirs`."""
    context, axes = Context(World(), EagerRuntime(torch.device("cpu")), HostGroup()), ("dp", "tp")
    alone = Mesh(context, RankGrid(dict.fromkeys(axes, 1)), dict.fromkeys(axes, NoCollectives()))
    own = dict(model.state_dict())
    try:
        model.save_pretrained(folder / "theirs")
    except Exception as error:
        return {"class": type(model).__name__, "why": f"save_pretrained: {_first_line(error)}"}
    names = tensors_in(folder / "theirs")
    found: dict[str, Any] = {
        "class": type(model).__name__,
        "tensors": len(names),
        "other names in memory": len(names.keys() - own.keys()),
        "digest": digest(names),
    }
    config, model.config = model.config, copy.deepcopy(model.config)
    model.config.architectures = None  # which save_pretrained has set
    found["one rank"] = _outcome(lambda: _same(folder, "one", lambda out: _write(out, model, alone)))
    found["checkpoint"] = _outcome(lambda: _checkpoint(model, folder / "run", folder / "theirs"))
    model.config = config
    found["adapter"] = _adapter(model, folder, alone)
    return found


def _write(out: Path, model: nn.Module, mesh: Mesh) -> None:
    write_model(out, saved_module(model), mesh, None, TIMEOUT)


def _same(folder: Path, name: str, write: Callable[[Path], None], compares: bool = True) -> str:
    write(folder / name)
    return difference(folder / "theirs", folder / name) if compares else EQUAL


def _outcome(check: Callable[[], str]) -> str:
    try:
        return check()
    except Exception as error:
        return f"{type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [repr(error)])[0][:160]


def _checkpoint(model: Any, folder: Path, theirs: Path) -> str:
    """Whether `from_pretrained` reads all that it reads of that folder from the checkpoint itself, too, which may have
    the names in memory."""
    with Checkpointer(folder, group=HostGroup()) as checkpointer:
        write = functools.partial(write_model_files, model=model, processing_class=None)
        path = checkpointer.save(1, {"model": model}, files=write, block=True).result()
    (one, told), (other, _) = (type(model).from_pretrained(each, output_loading_info=True) for each in (path, theirs))
    here, there, own = one.state_dict(), other.state_dict(), model.state_dict()
    lost = list(told["missing_keys"])
    lost += [name for name in own if _equal(own[name], there[name]) and not _equal(own[name], here[name])]
    return f"{lost[0]} and {len(lost) - 1} more are not read" if lost else EQUAL


def _adapter(model: Any, folder: Path, alone: Mesh) -> str:
    """The same for a LoRA adapter and PEFT's `save_pretrained`; nothing for a model that it cannot adapt."""
    if not any(type(module) is nn.Linear for module in model.modules()):
        return ""
    try:
        adapted = with_lora(copy.deepcopy(model), {"target_modules": "all-linear", "task_type": None})
        adapted.save_pretrained(folder / "theirs_adapter")
    except Exception:
        return ""
    return _outcome(lambda: difference_of_adapters(adapted, folder, alone))


def difference_of_adapters(adapted: Any, folder: Path, alone: Mesh) -> str:
    _write(folder / "adapter", adapted, alone)
    return difference(folder / "theirs_adapter", folder / "adapter")


def divide(model: nn.Module, devices: DeviceMesh) -> None:
    """Shards every parameter over the ranks, along its first or its second dim in turn."""
    divided: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in divided:
                dim = len(divided) % 2 if parameter.dim() > 1 else 0
                placement = Shard(dim) if parameter.dim() else Replicate()
                made = distribute_tensor(parameter.detach(), devices, [placement], src_data_rank=None)
                divided[id(parameter)] = nn.Parameter(made, parameter.requires_grad)
                divided[id(divided[id(parameter)])] = divided[id(parameter)]
            if parameter is not None:
                module._parameters[name] = divided[id(parameter)]


def difference(theirs: Path, ours: Path) -> str:
    """The first difference between the tensors and configs of two model folders; `equal` without one."""
    one, other = tensors_in(theirs), tensors_in(ours)
    if one.keys() != other.keys():
        strange = sorted(one.keys() ^ other.keys())
        return f"{strange[0]} and {len(strange) - 1} more are in one folder only"
    names = [name for name in one if not _equal(one[name], other[name])]
    if names:
        return f"{names[0]} and {len(names) - 1} more have other values"
    for name in ("config.json", "generation_config.json", "adapter_config.json"):
        configs = [json.loads((each / name).read_text()) if (each / name).exists() else {} for each in (theirs, ours)]
        strange = sorted(
            key for key in configs[0].keys() | configs[1].keys() if configs[0].get(key) != configs[1].get(key)
        )
        if strange:
            return f"{name}: {strange[0]}"
    return EQUAL


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """All tensors of a model folder."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - a file is no dict
    return found


def _equal(one: Tensor, other: Tensor) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def digest(tensors: dict[str, Tensor]) -> str:
    """Of names, types, shapes and values."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
