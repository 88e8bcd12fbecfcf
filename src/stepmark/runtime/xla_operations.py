"""Operations that torch_xla would run on the host, composed of operations that it compiles; and attention in autocast,
which torch_xla leaves out of the operations that compute in the lower precision."""

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
    library.impl("scaled_dot_product_attention", _attention_in_autocast, "AutocastXLA")
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


def _attention_in_autocast(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """In autocast's dtype, as on other devices. Rotary embeddings, which are float32, make query and key float32, and
    attention takes tensors of one dtype only."""
    dtype = torch.get_autocast_dtype("xla")
    query, key, value = (tensor.to(dtype) for tensor in (query, key, value))
    if attn_mask is not None and attn_mask.is_floating_point():
        attn_mask = attn_mask.to(dtype)
    with torch.autocast("xla", enabled=False):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
