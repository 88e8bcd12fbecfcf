"""The element types of safetensors files: their names, sizes and torch dtypes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# safetensors' name -> (bytes of an element, torch's name)
DTYPES: dict[str, tuple[int, str]] = {
    "F64": (8, "float64"),
    "I64": (8, "int64"),
    "U64": (8, "uint64"),
    "C64": (8, "complex64"),
    "F32": (4, "float32"),
    "I32": (4, "int32"),
    "U32": (4, "uint32"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "I16": (2, "int16"),
    "U16": (2, "uint16"),
    "I8": (1, "int8"),
    "U8": (1, "uint8"),
    "BOOL": (1, "bool"),
    "F8_E4M3": (1, "float8_e4m3fn"),
    "F8_E4M3FNUZ": (1, "float8_e4m3fnuz"),
    "F8_E5M2": (1, "float8_e5m2"),
    "F8_E5M2FNUZ": (1, "float8_e5m2fnuz"),
    "F8_E8M0": (1, "float8_e8m0fnu"),
}

_NAMES = {torch_name: name for name, (_, torch_name) in DTYPES.items()}


def item_size(dtype: str) -> int:
    """Bytes of an element of the type with this safetensors name."""
    return DTYPES[dtype][0]


def dtype_name(dtype: torch.dtype | str) -> str | None:
    """The safetensors name of a torch dtype or of its name, None where it has none (complex128, quantized types)."""
    return _NAMES.get(str(dtype).removeprefix("torch."))


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a safetensors name."""
    import torch

    dtype = getattr(torch, DTYPES[name][1])
    assert isinstance(dtype, torch.dtype)
    return dtype
