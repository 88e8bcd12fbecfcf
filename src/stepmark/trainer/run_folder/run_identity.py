"""The identity of a run, which must not change on resuming: model, tokenizer, data and seeds."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from stepmark.config.contradictions import CHANGES
from stepmark.data.loader.own_state import shuffles_of
from stepmark.errors import CheckpointMismatch

_CHECKSUMS = {
    "data": "training data have changed",
    "data, stored_rows": "training data have changed: other rows, or another order, as of a shuffle without a seed",
    "data, shuffled": "training data have changed: a stream's shuffle or interleaving has another seed, or none",
    "tokenizer": "tokenizer has changed: it has other tokens or options",
}
SPECIAL = ("eos_token_id", "bos_token_id", "pad_token_id")
MAY_DIFFER = {"transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache", "architectures", *SPECIAL}


def identity(model: nn.Module, processing_class: Any, dataset: Any, seed: int, data_seed: int) -> dict[str, Any]:
    """Plain values that are saved with each checkpoint and compared on resuming."""
    return {
        "model": _model(model),
        "tokenizer": tokenizer_digest(processing_class),
        "data": getattr(dataset, "fingerprint", None) or _data(dataset),
        "seed": seed,
        "data_seed": data_seed,
    }


def check_same_run(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    where: str,
    changes: str | None = None,
    accepted: Collection[str] = (),
) -> dict[str, str]:
    """What has changed, in words, by the key of the identity; all of it is `accepted`. `changes`: what is known of
    changes of the data. Raises CheckpointMismatch for the first difference that is not accepted."""
    found = {}
    for key, value in current.items():
        difference, name = _difference(key, saved.get(key), value), "seed" if key == "data_seed" else key
        if difference is None:
            continue
        found[key] = _in_words(*difference, changes)
        if name not in accepted:
            remedy = f"pass --accept-changes {name} if it should change, " if name in CHANGES else ""
            raise CheckpointMismatch(
                f"{where} belongs to another run: its {found[key]}; resume with the same model, tokenizer, data and "
                f"seeds, {remedy}or start a new run in another output_dir"
            )
    return found


def _in_words(name: str, before: Any, now: Any, changes: str | None) -> str:
    """Both values, or for a checksum what has changed."""
    if isinstance(before, str) and isinstance(now, str) and name in _CHECKSUMS:
        known = f" ({changes})" if changes is not None and name == "data" else ""
        return f"{_CHECKSUMS[name]}{known}"
    return f"{name} was {_short(before)} and is now {_short(now)}"


def _difference(name: str, before: Any, now: Any) -> tuple[str, Any, Any] | None:
    """The first difference by name; only fields that both versions of a transformers configuration have count."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return None if before == now else (name, before, now)
    older = any(key in now and key not in before for key in ("stored_rows", "shuffled"))  # of data
    of_transformers = "model_type" in before and "model_type" in now
    keys = {*before} & {*now} if of_transformers or older else {*before, *now}
    found = (_difference(f"{name}, {key}", before.get(key), now.get(key)) for key in sorted(keys - MAY_DIFFER))
    return next((each for each in found if each is not None), None)


def _model(model: nn.Module) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_dict"):
        values = {key: value for key, value in config.to_dict().items() if key not in MAY_DIFFER}
        return {"class": type(model).__name__, **json.loads(json.dumps(values, default=str))}
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    return {"class": type(model).__name__, **shapes}


def _data(dataset: Any) -> dict[str, Any]:
    """The number of samples; of a Hugging Face dataset, also a checksum of up to 16 rows as they are stored. Of a file,
    its name counts: it is in another folder on another machine."""
    found: dict[str, Any] = {"samples": len(dataset) if hasattr(dataset, "__len__") else None}
    library = sys.modules.get("datasets")
    if library is not None and isinstance(dataset, library.Dataset) and len(dataset):
        stored = dataset.with_format("arrow")
        rows = [stored[place].to_pylist() for place in range(0, len(dataset), -(-len(dataset) // 16))]
        text = re.sub(r"'/(?:[^'/]+/)+", "'", repr(rows))
        found["stored_rows"] = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    drawn = shuffles_of(dataset)
    return found if drawn is None else {**found, "shuffled": drawn}


def tokenizer_digest(processing_class: Any) -> str | None:
    """A checksum of what a tokenizer does; None without one. Truncation and padding are those of its last call."""
    if processing_class is None:
        return None
    backend = getattr(processing_class, "backend_tokenizer", None)
    if backend is not None:
        own = type(backend).from_str(backend.to_str())
        own.no_truncation()
        own.no_padding()
        text = own.to_str()
    elif hasattr(processing_class, "get_vocab"):
        text = json.dumps(processing_class.get_vocab(), sort_keys=True)
    else:
        text = type(processing_class).__name__
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
