"""Configs of models from elsewhere: code that they name needs the caller's consent, and models have to fit."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stepmark.errors import CheckpointMismatch, UsageError
from stepmark.filesystem.files import check_files, leads_out
from stepmark.filesystem.json_files import read_json
from stepmark.filesystem.sizes import distinct_sizes
from stepmark.liveness.failure_report import describe_error

CONFIG = "config.json"
_KERNELS = re.compile(r"_?(attn|experts)_implementation(_internal)?\Z")  # names with a "/" are code on the hub
_COUNTS = re.compile(r"(num|n)_.*(layer|expert|block)|depth|(layer|expert)s?$")
_ENTRIES, _COUNT = 4096, 1 << 16  # that a list may have, and what seems to be a count: classes make lists of it


def load_config(name: str, trust: bool) -> Any:
    """transformers' config of the model in a folder, or of one on the hub; `trust`: code that it names is executed.

    Raises UsageError where it names code on the hub, CheckpointMismatch where no model has so many layers, and
    FileRefused for a file that a library would wait for, or be led out by.
    """
    from transformers import AutoConfig, PreTrainedConfig

    folder = Path(name)
    where = folder / CONFIG if folder.is_dir() else folder
    check_files(folder)
    for index in folder.glob("*.index.json"):  # of weights; libraries follow the names in it, and say what is malformed
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
            names = set(read_json(index, follow=True)["weight_map"].values())
            if any(leads_out(folder, folder / name) for name in names):
                raise CheckpointMismatch(f"{index} names files outside {folder}")
    given, _ = PreTrainedConfig.get_config_dict(name)
    if not trust:
        refuse_kernels(given, where)
    check_counts(where, given, 0)
    return AutoConfig.from_pretrained(name, trust_remote_code=trust)


def refuse_kernels(values: dict[str, Any], where: Path) -> None:
    """Raises UsageError where nested values name an implementation on the hub, which transformers would execute."""
    for key, value in values.items():
        if _KERNELS.match(str(key)) and "/" in str(value):
            raise UsageError(f"{where}: {key} {str(value)[:80]} is code on the hub; --trust_remote_code executes it")
        if isinstance(value, dict):
            refuse_kernels(value, where)


def check_counts(path: Path, config: dict[str, Any], tensors: int) -> None:
    """Raises CheckpointMismatch where a config counts more layers than a model of so many tensors can have."""
    for key, value in config.items():
        if isinstance(value, dict):
            check_counts(path, value, tensors)
        elif _COUNTS.search(key) and type(value) is int and value > max(_COUNT, tensors):
            raise CheckpointMismatch(f"{path} says {key} {value}, and the checkpoint has {tensors or 'fewer'} tensors")
        elif isinstance(value, list) and len(value) > max(_ENTRIES, tensors):
            raise CheckpointMismatch(f"{path} has {len(value)} values of {key}, more than there are tensors")


@contextlib.contextmanager
def few_modules(limit: int = 1 << 17) -> Iterator[None]:
    """Stops a class that makes more modules. Which fields of a config are counts of layers, only the class knows."""
    from torch.nn.modules.module import register_module_module_registration_hook

    made = itertools.count(1)

    def count(module: Any, name: str, submodule: Any) -> None:
        if next(made) > limit:
            raise CheckpointMismatch(f"its model has more than {limit} modules")

    with register_module_module_registration_hook(count):
        yield


def check_fits(make: Callable[[], Any], folder: Path) -> None:
    """Makes a model without memory. Raises CheckpointMismatch where that fails, or memory is too small for it."""
    import torch

    from stepmark.checkpoint.host_memory import free_host_memory

    where, draws = folder / CONFIG, torch._guards.detect_fake_mode() is None
    try:
        with torch.random.fork_rng(devices=[], enabled=draws), torch.device("meta"), few_modules():
            state = make().state_dict()
    except Exception as error:  # the constructors of models raise anything
        if isinstance(error, RuntimeError) and "meta" in str(error):  # of a class that reads values while it is made
            return
        line = " ".join(describe_error(error).split())[:200]
        raise CheckpointMismatch(f"{where} describes no model that can be made: {line}") from error
    needed, free = sum(each.nbytes for each in state.values()), min(free_host_memory().values(), default=1 << 63)
    if needed > free:
        wanted, there = distinct_sizes(needed, free)
        raise CheckpointMismatch(f"{where} describes a model of {wanted}, and {there} of memory are free")


def model_class(name: Any, where: Path) -> Any:
    """transformers' class of models with this name. Raises CheckpointMismatch where it is none."""
    import transformers

    found = getattr(transformers, name, None) if isinstance(name, str) else None
    if isinstance(found, type) and (name.startswith("AutoModel") or issubclass(found, transformers.PreTrainedModel)):
        return found
    raise CheckpointMismatch(
        f"{where} names a {str(name)[:80]}, which is not a transformers model; restore it into your own model with "
        "Checkpointer.restore, and call stepmark.evaluate"
    )
