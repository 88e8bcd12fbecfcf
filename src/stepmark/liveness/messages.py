"""What ranks tell each other: JSON, and arrays behind it. Nothing of it runs when it is read.

Where the ranks have a secret, every message begins with a code that only they can make.
"""

from __future__ import annotations

import hmac
import io
import json
import os
from dataclasses import is_dataclass
from pathlib import Path, PurePath
from typing import Any

import numpy as np

from stepmark import errors
from stepmark.errors import FileRefused, LaunchError, StepmarkError
from stepmark.filesystem.json_values import ValueEncoder, decode
from stepmark.liveness.failure_report import SECRET

_ERRORS: dict[str, Any] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and kind is not FileRefused
}


class _Encoder(ValueEncoder):
    """Named tuples arrive as tuples, instances of dataclasses as dicts."""

    def _encode(self, value: Any, path: tuple[str, ...]) -> Any:
        value = tuple(value) if isinstance(value, tuple) else value
        return super()._encode(vars(value) if is_dataclass(value) else value, path)


def pack(value: Any) -> bytes:
    """The message. Raises UsageError for a value that is not plain, naming it."""
    arrays = io.BytesIO()

    def attached(item: Any) -> bool:
        array = isinstance(item, np.ndarray) and not item.dtype.hasobject
        return array or isinstance(item, (bytes, PurePath, StepmarkError))

    def attach(item: Any, _: tuple[str, ...]) -> str:
        if isinstance(item, StepmarkError):
            return f"{next(kind.__name__ for kind in type(item).__mro__ if kind in _ERRORS.values())}:{item}"
        if isinstance(item, PurePath):
            return f"path:{item}"
        np.save(arrays, np.frombuffer(item, np.uint8) if isinstance(item, bytes) else item, allow_pickle=False)
        return type(item).__name__

    text = json.dumps(_Encoder(attached, attach).encode(value, ("message",))).encode()
    body = len(text).to_bytes(8, "little") + text + arrays.getbuffer()
    return _code(body) + body


def unpack(data: bytes) -> Any:
    """The value that was packed. Raises LaunchError where no rank of this run has packed it."""

    def attached(item: str) -> Any:
        kind, _, text = item.partition(":")
        if kind == "path" or kind in _ERRORS:
            return {"path": Path, **_ERRORS}[kind](text)
        array = np.load(arrays, allow_pickle=False)
        return array.tobytes() if kind == "bytes" else array

    code, body = data[: len(names()) // 2], data[len(names()) // 2 :]
    end = 8 + int.from_bytes(body[:8], "little")
    arrays = io.BytesIO(body[end:])
    try:
        if not hmac.compare_digest(_code(body), code):
            raise ValueError("its code is wrong")
        return decode(json.loads(body[8:end]), attached)
    except (StepmarkError, ValueError, LookupError, TypeError, EOFError, OSError) as error:
        raise LaunchError(
            f"a message is not of a rank of this run ({error}); {SECRET} has to be the same on all ranks of one run"
        ) from error


def names() -> str:
    """What is in front of this run's names in the ranks' store: it does not tell the secret."""
    return _code(b"names").hex()


def _code(body: bytes) -> bytes:
    key = os.environ.get(SECRET, "").encode()
    return hmac.digest(key, body, "sha256") if key else b""
