"""From the tensors of a Hugging Face folder to those of a model on the meta device: names, ties, dtypes, buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stepmark.errors import CheckpointMismatch, UsageError
from stepmark.parallel.loading.tensor_source import StoredSource, blocks, joined
from stepmark.runtime.module_placement import replace
from stepmark.sharding.layout import Layout
from stepmark.tensor_files.global_tensor import GlobalTensor, StoredArray

Stored = Mapping[str, StoredArray]
Named = dict[str, GlobalTensor]


def prepare(model: Any, stored: Stored, config: Any) -> dict[str, StoredSource]:
    """Ties tied parameters, converts parameters to their final dtype and sets the values of buffers.

    Returns the sources of the parameters by name. `config` is transformers' account of this loading. Raises
    CheckpointMismatch where the folder and the model differ, with the first tensor's name.
    """
    wanted = dict(model.state_dict(keep_vars=True))
    named = take_names(model, stored, config, wanted)
    missing = _tie(model, named, wanted)
    _check(model, named, wanted, missing, config.pretrained_model_name_or_path)
    _apply_dtypes(model, config)
    _fill_buffers(model, named)
    return {name: StoredSource(tensor) for name, tensor in named.items()}


def take_names(model: Any, stored: Stored, config: Any, wanted: Mapping[str, Tensor]) -> Named:
    """The stored tensors by the model's names, as transformers renames and joins them, and the base model's prefix."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = config.weight_mapping or []
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    prefix = model.base_model_prefix
    named: Named = {}
    to_join: dict[str, tuple[Any, dict[str, list[GlobalTensor]]]] = {}

    def take(target: str, tensor: GlobalTensor) -> None:
        if target in named:
            raise CheckpointMismatch(f"{tensor.where} and {named[target].name!r} are both {target!r}")
        named[target] = tensor

    for name in sorted(stored, key=dot_natural_key):  # experts by number
        tensor = GlobalTensor.whole(name, stored[name])
        target, pattern = rename_source_key(name, renamings, converters, prefix, dict(wanted))
        if target not in wanted and name in wanted:
            target, pattern = name, None
        if pattern is not None:
            converter = next(each for each in converters if pattern in each.source_patterns)
            if _joining(converter) is None:
                raise UsageError(
                    f"{tensor.where} has to be converted for {type(model).__name__}, and cannot be loaded in parts; "
                    "load the complete model and save it with save_original_format=False"
                )
            to_join.setdefault(target, (converter, {}))[1].setdefault(pattern, []).append(tensor)
        else:
            take(target, tensor)
    for target, (converter, groups) in to_join.items():
        stacked, dim = _joining(converter) or (False, 0)
        ordered = [groups[pattern] for pattern in converter.source_patterns if pattern in groups]
        take(target, joined(ordered, stacked, dim))
    return named


def _joining(converter: Any) -> tuple[bool, int] | None:
    """Whether a conversion stacks tensors, and the dim along which it then concatenates them; None for others."""
    from transformers.core_model_loading import Concatenate, MergeModulelist

    operations = list(converter.operations)
    stacked = bool(operations) and type(operations[0]) is MergeModulelist and operations[0].dim == 0
    rest = operations[stacked:]
    if len(converter.target_patterns) != 1 or len(rest) > 1 or any(type(each) is not Concatenate for each in rest):
        return None
    return stacked, rest[0].dim if rest else 0


def _tie(model: Any, named: Named, wanted: Mapping[str, Tensor]) -> set[str]:
    """Ties parameters as transformers does, from the one that is stored; where both are, only if they are equal.
    Returns the names for which nothing is stored."""
    missing = set(wanted) - set(named)
    for target, source in list(model.all_tied_weights_keys.items()):
        if target in named and source in named:
            if _equal(named[target], named[source]):
                del named[target]
                missing.add(target)
            else:
                model.all_tied_weights_keys.pop(target)
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    return missing


def _equal(*tensors: GlobalTensor) -> bool:
    """Whether two tensors that are stored as they are have the same bytes; reads both, block by block."""
    one, other = (each.pieces[0].array for each in tensors)
    if any(len(each.pieces) > 1 for each in tensors) or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(mine == theirs for mine, theirs in zip(blocks(one), blocks(other), strict=True))


def _check(model: Any, named: Named, wanted: Mapping[str, Tensor], missing: set[str], at: Any) -> None:
    from transformers.utils.loading_report import LoadStateDictInfo

    report = LoadStateDictInfo(set(missing), set(named) - set(wanted), set(), [], {}, set())
    model._adjust_missing_and_unexpected_keys(report)
    model_name = type(model).__name__
    if absent := sorted(missing):  # also those that transformers would initialize
        raise CheckpointMismatch(
            f"{at} lacks tensor {absent[0]!r} of {model_name}{_more(absent)}; give the folder of a complete model"
        )
    if surplus := sorted(report.unexpected_keys):
        tensor = named[surplus[0]]
        raise CheckpointMismatch(
            f"{tensor.where} is none of {model_name}{_more(surplus)}; load it with the class that its config.json names"
        )
    for name in set(named) - set(wanted):
        del named[name]
    for name, tensor in named.items():
        if tensor.shape != tuple(wanted[name].shape):
            raise CheckpointMismatch(
                f"{tensor.where} is {list(tensor.shape)}; in {model_name} it is {list(wanted[name].shape)}"
            )


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _apply_dtypes(model: Any, config: Any) -> None:
    """Some models keep some parameters in fp32 whatever the others are."""
    if not config.dtype_plan:
        return
    from transformers.core_model_loading import build_glob_alternation

    pattern, patterns, _ = build_glob_alternation(list(config.dtype_plan))
    for name, parameter in model.named_parameters():
        found = pattern.search(name)
        if found is not None and found.lastgroup is not None:
            parameter.data = parameter.data.to(config.dtype_plan[patterns[found.lastgroup]])


def _fill_buffers(model: Any, named: Named) -> None:
    """Stored buffers are read, the others computed as the model's initialisation does; parameters stay without values.

    On the meta device initialising a parameter costs nothing and draws nothing.
    """
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            replace(buffer, torch.zeros(buffer.shape, dtype=buffer.dtype))
        if name in named:
            StoredSource(named.pop(name)).fill(buffer, Layout.full(buffer.shape))
            buffer._is_hf_initialized = True
    model.initialize_weights()
