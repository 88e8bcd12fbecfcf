"""Attention masks on lazy devices, without reading values.

transformers chooses between attention masks by their values: whether any token is padded, whether positions restart
within a row. On a lazy device each such read ends the graph and waits; and if ranks read different values, their graphs
differ, and the first collective hangs. So there the choice depends on which inputs a batch has, not on their values: a
mask whenever an attention mask is given, separate sequences whenever positions are given.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from stepmark.training.lazy.recording import is_recorded, replace_everywhere

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
    """Replaces the function of transformers that reads positions; tensors on other devices are unaffected."""
    from transformers import masking_utils

    find_packed = masking_utils.find_packed_sequence_indices

    def find_packed_if_given(position_ids: Tensor) -> Tensor | None:
        if is_recorded(position_ids) and not _positions_given.get():
            return None
        return find_packed(position_ids)

    replace_everywhere("find_packed_sequence_indices", find_packed, find_packed_if_given)
