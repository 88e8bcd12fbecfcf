"""Operations that torch_xla would run on the host, composed of operations that it compiles."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def register_operations() -> torch.library.Library:
    """Registers them for lazy tensors, in this process. The library lives as long as the process."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("linalg_solve_triangular", _solve_triangular, "XLA")
    library.impl("polar", _polar, "XLA")
    return library


def _solve_triangular(
    matrix: Tensor, right: Tensor, *, upper: bool, left: bool = True, unitriangular: bool = False
) -> Tensor:
    """X of matrix X = right, or of X matrix = right where not `left`; (…, n, n) and (…, n, k) or (…, k, n)."""
    if not left:
        return _solve_triangular(matrix.mT, right.mT, upper=not upper, unitriangular=unitriangular).mT
    return torch.ops.aten.triangular_solve(right, matrix, upper, False, unitriangular)[0]


def _polar(absolute: Tensor, angle: Tensor) -> Tensor:
    """Complex numbers of these absolute values and angles."""
    parts = torch.stack([absolute * torch.cos(angle), absolute * torch.sin(angle)], -1)
    return torch.ops.aten.view_as_complex_copy(parts)
