"""The identity of a run: a run that resumes another must have its model, tokenizer, data and seeds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import nn

from stepmark.errors import CheckpointMismatch

MAY_DIFFER = {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "architectures"}


def identity(model: nn.Module, processing_class: Any, dataset: Any, seed: int, data_seed: int) -> dict[str, Any]:
    """Plain values that are saved with each checkpoint and compared on resuming."""
    samples = len(dataset) if hasattr(dataset, "__len__") else None
    return {
        "model": _model(model),
        "tokenizer": _tokenizer(processing_class),
        "data": getattr(dataset, "fingerprint", None) or {"samples": samples},
        "seed": seed,
        "data_seed": data_seed,
    }


def check_same_run(saved: Mapping[str, Any], current: Mapping[str, Any], where: str) -> None:
    """Raises CheckpointMismatch, which names the first difference, where the identities differ."""
    for key, value in current.items():
        before = saved.get(key)
        if before == value:
            continue
        if isinstance(before, dict) and isinstance(value, dict):
            name = next(name for name in sorted({*before, *value}) if before.get(name) != value.get(name))
            key, before, value = f"{key}, {name}", before.get(name), value.get(name)
        raise CheckpointMismatch(
            f"{where} belongs to another run: its {key} was {_short(before)} and is now {_short(value)}; resume with "
            "the same model, tokenizer, data and seeds, or start a new run in another output_dir"
        )


def _model(model: nn.Module) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        values = {key: value for key, value in config.to_dict().items() if key not in MAY_DIFFER}
        return {"class": type(model).__name__, **json.loads(json.dumps(values, default=str))}
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    return {"class": type(model).__name__, **shapes}


def _tokenizer(processing_class: Any) -> str | None:
    if processing_class is None:
        return None
    backend = getattr(processing_class, "backend_tokenizer", None)
    if backend is not None:
        text = backend.to_str()
    elif hasattr(processing_class, "get_vocab"):
        text = json.dumps(processing_class.get_vocab(), sort_keys=True)
    else:
        text = type(processing_class).__name__
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
