"""Plain values as JSON, exactly: every float bit for bit, tuples, keys of any plain type, bytes; never pickle.

What JSON has is written as such. The rest is an object with the key "$" that names its type:
dict, ordered and counter (pairs), float (16 hexadecimal digits), int (hexadecimal), complex, bytes (base64), array and
scalar (numpy), size, dtype, device (torch), tensor (a name in one of the tensor files), and those of `_PARTS`. A class
of the user's own, such as an Enum or a namedtuple, would have to be imported, and nothing that a checkpoint names is.
"""

from __future__ import annotations

import base64
import io
import math
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np

from stepmark.errors import CheckpointDamaged, CheckpointError, UsageError

TAG = "$"
KeyPath = tuple[str, ...]
OnTensor = Callable[[Any, KeyPath], str]  # takes a tensor or a shard out of the value; returns its name in the files
_DICTS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
# What is written as its parts: the name of the type, the parts of a value, and a value of them.
_PARTS: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    tuple: ("tuple", list, tuple),
    set: ("set", lambda value: sorted(value, key=repr), set),
    frozenset: ("frozenset", lambda value: sorted(value, key=repr), frozenset),
    deque: ("deque", lambda value: [list(value), value.maxlen], lambda parts: deque(*parts)),
    range: ("range", lambda value: [value.start, value.stop, value.step], lambda parts: range(*parts)),
    slice: ("slice", lambda value: [value.start, value.stop, value.step], lambda parts: slice(*parts)),
    bytes: (
        "bytes",
        lambda value: base64.b64encode(value).decode(),
        lambda text: base64.b64decode(text.encode(), validate=True),  # bytes would be decoded too
    ),
    bytearray: ("bytearray", bytes, bytearray),
    complex: (
        "complex",
        lambda value: struct.pack(">dd", value.real, value.imag).hex(),
        lambda text: complex(*struct.unpack(">dd", bytes.fromhex(text))),
    ),
    io.BytesIO: ("bytesio", lambda value: [value.getvalue(), value.tell()], lambda parts: _file(*parts)),
    type(Path()): ("path", str, Path),
    date: ("date", date.isoformat, date.fromisoformat),
    datetime: ("datetime", datetime.isoformat, datetime.fromisoformat),
    timedelta: ("timedelta", lambda value: [value.days, value.seconds, value.microseconds], lambda p: timedelta(*p)),
}
_LARGEST_DECIMAL = 1 << 1024  # Python refuses to parse very long decimal integers


def _file(data: bytes, position: int) -> io.BytesIO:
    file = io.BytesIO(data)
    file.seek(position)
    return file


def show(path: KeyPath) -> str:
    """A path as an error message shows it: loader['epoch']."""
    head, *rest = path or ("",)
    return head + "".join(f"[{key!r}]" for key in rest)


class ValueEncoder:
    """Encodes values; tensors, where `is_tensor` finds them, are handed to `on_tensor`."""

    def __init__(self, is_tensor: Callable[[Any], bool], on_tensor: OnTensor) -> None:
        self._is_tensor = is_tensor
        self._on_tensor = on_tensor

    def encode(self, value: Any, path: KeyPath) -> Any:
        """The JSON form. Raises UsageError for a value that is neither a tensor nor plain, naming it."""
        try:
            return self._encode(value, path)
        except RecursionError as error:
            raise UsageError(f"{show(path[:1])} is nested too deep, or contains itself; save a flat value") from error

    def _encode(self, value: Any, path: KeyPath) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind is int:
            return value if abs(value) < _LARGEST_DECIMAL else {TAG: "int", "v": hex(value)}
        if kind is float:
            return value if math.isfinite(value) else {TAG: "float", "v": struct.pack(">d", value).hex()}
        if self._is_tensor(value):
            return {TAG: "tensor", "v": self._on_tensor(value, path)}
        if kind in _DICTS:
            return self._encode_dict(value, path)
        if kind is list:
            return [self._encode(item, (*path, str(index))) for index, item in enumerate(value)]
        if kind in _PARTS and type(getattr(value, "tzinfo", None)) in (type(None), timezone):
            name, parts, _ = _PARTS[kind]
            return {TAG: name, "v": self._encode(parts(value), path)}
        tagged = _encode_foreign(value)
        if tagged is None:
            raise UsageError(
                f"{show(path)} is a {kind.__module__}.{kind.__qualname__}, neither a tensor nor a plain value; "
                "save its parts as numbers, strings, lists and dicts"
            )
        return tagged

    def _encode_dict(self, value: dict[Any, Any], path: KeyPath) -> Any:
        if type(value) is dict and TAG not in value and all(type(key) is str for key in value):
            return {key: self._encode(item, (*path, key)) for key, item in value.items()}
        pairs = [
            [self._encode(key, (*path, "key")), self._encode(item, (*path, str(key)))] for key, item in value.items()
        ]
        return {TAG: _DICTS[type(value)], "v": pairs}


def _encode_foreign(value: Any) -> dict[str, Any] | None:
    """A value of numpy's or torch's; None for any other."""
    kind = type(value)
    name = f"{kind.__module__}.{kind.__qualname__}"  # so that reading a checkpoint's values does not import torch
    if name == "torch.Size":
        return {TAG: "size", "v": list(value)}
    if name in ("torch.dtype", "torch.device"):
        return {TAG: name.removeprefix("torch."), "v": str(value).removeprefix("torch.")}
    is_array = kind in (np.ndarray, np.memmap)
    if not (is_array or isinstance(value, np.generic)) or value.dtype.hasobject or value.dtype.names is not None:
        return None
    found = np.asarray(value)
    if np.dtype(found.dtype.str) != found.dtype:  # of another package, and named as bytes of its size
        return None
    if not found.dtype.itemsize:  # texts of length 0, of which numpy cannot read an array back
        found = found.astype(np.dtype((found.dtype.type, 1)))
    data = base64.b64encode(found.tobytes()).decode()
    return {TAG: "array" if is_array else "scalar", "dtype": found.dtype.str, "shape": list(found.shape), "v": data}


def decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    """The value that was encoded; `tensor` gives the tensor stored under a name.

    Raises CheckpointDamaged for JSON that the encoder cannot have written, and CheckpointError for element types that
    are unknown here.
    """
    try:
        return _decode(value, tensor)
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, struct.error) as error:
        raise CheckpointDamaged(f"a stored value is malformed: {error!r}") from error


def _decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _decode(item, tensor) for key, item in value.items()}
    tag, inner = value[TAG], value["v"]
    if tag == "tensor":
        return tensor(inner)
    if tag in _DICTS.values():
        pairs = [(_decode(key, tensor), _decode(item, tensor)) for key, item in inner]
        return next(kind for kind, name in _DICTS.items() if name == tag)(dict(pairs) if tag == "counter" else pairs)
    for name, _, made in _PARTS.values():
        if tag == name:
            return made(_decode(inner, tensor))
    if tag == "float":
        return struct.unpack(">d", bytes.fromhex(inner))[0]
    if tag == "int":
        return int(inner, 16)
    return _decode_foreign(tag, inner, value)


def _decode_foreign(tag: str, inner: Any, value: dict[str, Any]) -> Any:
    if tag in ("array", "scalar"):
        array = np.frombuffer(base64.b64decode(inner, validate=True), dtype=_numpy_dtype(value["dtype"]))
        shaped = array.reshape(tuple(value["shape"])).copy()
        return shaped if tag == "array" else shaped[()]
    if tag == "dtype":
        return _torch_dtype(inner)
    if tag not in ("size", "device"):
        raise ValueError(f"unknown type {tag!r}")
    import torch

    return torch.Size(inner) if tag == "size" else torch.device(inner)


def _torch_dtype(name: str) -> Any:
    import torch

    try:
        dtype = getattr(torch, name)
    except AttributeError as error:
        raise _unknown(f"torch.{name}", "torch") from error
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch.{name} is not a dtype")
    return dtype


def _numpy_dtype(name: str) -> np.dtype[Any]:
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is not a dtype")
    try:
        return np.dtype(name)
    except (TypeError, ValueError, SyntaxError) as error:
        raise _unknown(f"numpy's {name!r}", "numpy") from error


def _unknown(dtype: str, package: str) -> CheckpointError:
    """The error for an element type of another version of a package: the checkpoint is as it was written."""
    why = f"a stored value has the unknown dtype {dtype[:80]}; use a newer Stepmark and a {package} that has it"
    return CheckpointError(why)


def dicts_in(encoded: Any) -> Iterator[dict[str, Any]]:
    """Every dict in an encoded value: those with a tag, and plain ones."""
    waiting = [encoded]
    while waiting:
        item = waiting.pop()
        if isinstance(item, list):
            waiting.extend(item)
        elif isinstance(item, dict):
            yield item
            waiting.extend(item.values())


def encode_plain(value: Any, name: str) -> Any:
    """The JSON form of a value that may hold no tensors, such as metadata."""

    def refuse(_: Any, path: KeyPath) -> str:
        raise UsageError(f"{show(path)} is a tensor; {name} takes plain values only: give its .item() or .tolist()")

    return ValueEncoder(lambda item: hasattr(item, "data_ptr"), refuse).encode(value, (name,))


def decode_plain(value: Any) -> Any:
    """The reverse of `encode_plain`."""

    def refuse(name: str) -> Any:
        raise ValueError(f"a tensor {name!r} among plain values")

    return decode(value, refuse)
