"""Conversions between floating point types, without torch: numpy lacks bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmark.checkpoint.format.dtypes import DTYPES, item_size

Elements = NDArray[Any]

_NUMPY = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
FLOATS = (*_NUMPY, "BF16")  # types that can be converted
_WIDER = {("F32", "F64"), ("F16", "F64"), ("BF16", "F64"), ("F16", "F32"), ("BF16", "F32")}  # every value fits


def convert(stored: memoryview, source: str, target: str, memory: memoryview) -> bool:
    """Converts elements from one type of FLOATS to another, rounding to the nearest, ties to even. `memory` gets the
    bytes. Returns whether every value is the same as before; a NaN stays one."""
    with np.errstate(all="ignore"):  # infinities and NaNs are values like others here
        wide = _widened(stored, source)
        found = np.frombuffer(memory, f"<u{item_size(target)}")
        if target == "BF16":
            _to_bfloat16(wide.astype("<f4", copy=False), found)
        else:
            found.view(_NUMPY[target])[...] = wide
        if (source, target) in _WIDER:
            return True
        back = _widened(memory, target)
        return bool(np.all((back == wide) | (np.isnan(back) & np.isnan(wide))))


def _widened(stored: bytes | memoryview, dtype: str) -> Elements:
    """The elements in a type that numpy has."""
    if dtype != "BF16":
        return np.frombuffer(stored, _NUMPY[dtype])
    return (np.frombuffer(stored, "<u2").astype("<u4") << 16).view("<f4")


def _to_bfloat16(values: Elements, found: Elements) -> None:
    bits = values.view("<u4")
    rounded = bits + (((bits >> 16) & 1) + 0x7FFF)
    nan = np.isnan(values)
    if nan.any():  # adding could carry a NaN's payload over into its sign
        rounded[nan] = bits[nan] | 0x400000
    found[...] = rounded >> 16


def number(data: bytes, dtype: str) -> int | float | bool | None:
    """The value of one element; None where its type has no number in Python."""
    if dtype == "BF16":
        return float(_widened(data, dtype)[0])
    try:
        found = np.frombuffer(data, dtype=DTYPES[dtype][1])[0].item()
    except TypeError:  # numpy has no such type
        return None
    return found if isinstance(found, int | float) else None
