"""The names, order and shapes of a model's parameters, from its Hugging Face config alone."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stepmark.errors import CheckpointMismatch
from stepmark.sharding.layout import Shape

_COUNTS = re.compile(r"(num|n)_.*(layer|expert|block)|depth|(layer|expert)s?$")
_ENTRIES = 4096  # a list of a config may have so many, or as many as the checkpoint has tensors


@dataclass(frozen=True)
class ModelOutline:
    """A model without values.

    Args:
        config: The contents of config.json.
        architecture: The class's name.
        parameters: Names to shapes, in the order of `named_parameters()`; of tied ones the first name.
        state: Names in the state dict to shapes, without those of tied tensors that are not stored.
        tied: Names of tied tensors to the names they are stored under.
        layer_norms: Parameters of torch's LayerNorm.
        optional: Patterns of names that old versions of the model stored, and that it does not need.
    """

    config: dict[str, Any]
    architecture: str
    parameters: dict[str, Shape]
    state: dict[str, Shape]
    tied: dict[str, str] = field(default_factory=dict)
    layer_norms: frozenset[str] = frozenset()
    optional: tuple[str, ...] = ()


def read_config(path: Path) -> dict[str, Any]:
    """The contents of a config.json. Raises CheckpointMismatch where it is not one."""
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointMismatch(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointMismatch(f"{path} is not a JSON file: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointMismatch(f"{path} is not the config of a model")
    return found


def outline_of(path: Path, tensors: int) -> ModelOutline:
    """The model that a config.json describes.

    Args:
        path: The file.
        tensors: How many tensors the checkpoint has: a config of many more layers is refused before it is built.

    Returns:
        Its outline.

    Raises:
        CheckpointMismatch: It is not the config of a model that transformers knows, or not of this checkpoint.
    """
    config = read_config(path)
    _check_counts(path, config, tensors)
    try:
        return _outline(config)
    except CheckpointMismatch as error:
        raise CheckpointMismatch(f"{path}: {error}") from error
    except Exception as error:  # the constructors of models raise anything
        reason = (str(error).splitlines() or [repr(error)])[0][:200]
        raise CheckpointMismatch(f"{path} does not describe a model that transformers can make: {reason}") from error


def _check_counts(path: Path, config: dict[str, Any], tensors: int) -> None:
    for key, value in config.items():
        if isinstance(value, dict):
            _check_counts(path, value, tensors)
        elif _COUNTS.search(key) and type(value) is int and value > tensors:
            raise CheckpointMismatch(f"{path} says {key} {value}, and the checkpoint has {tensors} tensors")
        elif isinstance(value, list) and len(value) > max(_ENTRIES, tensors):
            raise CheckpointMismatch(f"{path} has {len(value)} values of {key}, more than there are tensors")


def _outline(config: dict[str, Any]) -> ModelOutline:
    import torch
    import transformers

    from stepmark.checkpoint.sections import kept_names

    kind = config.get("model_type")
    if type(kind) is not str or "auto_map" in config:
        raise CheckpointMismatch("it names no model_type of transformers")
    values = {key: value for key, value in config.items() if key != "model_type"}
    made = transformers.AutoConfig.for_model(kind, **values)
    names = config.get("architectures") or []
    found = getattr(transformers, str(names[0]), None) if names else None
    with torch.device("meta"):
        model: Any = found(made) if found is not None else transformers.AutoModelForCausalLM.from_config(made)
    model.tie_weights()
    state = model.state_dict(keep_vars=True)
    kept = kept_names(model, state)
    norms = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, torch.nn.LayerNorm)
        for name, _ in module.named_parameters(recurse=False)
    }
    return ModelOutline(
        config=config,
        architecture=type(model).__name__,
        parameters={kept.get(name, name): tuple(p.shape) for name, p in model.named_parameters()},
        state={name: tuple(state[name].shape) for name in state if kept[name] == name},
        tied={name: other for name, other in kept.items() if name != other},
        layer_norms=frozenset(norms),
        optional=tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()),
    )
