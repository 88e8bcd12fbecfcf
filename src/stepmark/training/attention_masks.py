"""Attention masks on lazy devices, without looking at values.

transformers chooses between attention masks by their values: whether any token is padded, whether positions tell of
several sequences in a row. On a lazy device each such look cuts the graph and waits; and where ranks see different
values, their graphs differ, and the first collective hangs. So there the choice is made by what the batch holds, not by
what is in it: always a mask where an attention mask is given, always separate sequences where positions are given.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from stepmark.training.recording import is_recorded, replace_everywhere

_positions_given: ContextVar[bool] = ContextVar("positions_given", default=True)


@contextlib.contextmanager
def masks_by_shape(inputs: Mapping[str, Any]) -> Iterator[None]:
    """Around a forward pass with `inputs` on a lazy device."""
    _patch_transformers()
    token = _positions_given.set("position_ids" in inputs)
    try:
        yield
    finally:
        _positions_given.reset(token)


@functools.cache
def _patch_transformers() -> None:
    """Replaces transformers' look at positions; tensors of other devices are treated as before."""
    from transformers import masking_utils

    find_packed = masking_utils.find_packed_sequence_indices

    def find_packed_if_given(position_ids: Tensor) -> Tensor | None:
        if is_recorded(position_ids) and not _positions_given.get():
            return None
        return find_packed(position_ids)

    replace_everywhere("find_packed_sequence_indices", find_packed, find_packed_if_given)
