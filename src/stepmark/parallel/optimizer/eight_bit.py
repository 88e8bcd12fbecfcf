"""bitsandbytes' AdamW with a state of 8 bits, where the library is installed."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from stepmark.errors import UsageError

# What a parameter group says of its state. Tensors of fewer than `min_8bit_size` elements have 32 bits in any case.
EIGHT_BITS = {"optim_bits": 8}
FULL_PRECISION = {"optim_bits": 32}


@cache
def adamw_8bit_class() -> type[torch.optim.Optimizer]:
    """`bitsandbytes.optim.AdamW8bit` (Dettmers et al. 2022) whose groups say how many bits the state has:
    EIGHT_BITS or FULL_PRECISION.

    bitsandbytes' own way of saying that is a table for the whole process by the parameters' `id`, which another tensor
    may get later.

    Raises:
        UsageError: bitsandbytes is not installed, or cannot be loaded here.
    """
    try:
        from bitsandbytes.optim import AdamW8bit
    except (ImportError, OSError, RuntimeError) as error:
        raise UsageError(f"optim: adamw_8bit needs bitsandbytes, which cannot be loaded: {error}") from error

    class GroupedAdamW8bit(AdamW8bit):
        per_parameter = True

        @staticmethod
        def elementwise_group(group: Mapping[str, Any]) -> bool:
            """Whether no block of 8 bits is scaled by its largest element."""
            return group.get("optim_bits") == FULL_PRECISION["optim_bits"]

        def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            config: dict[str, Any] = super().get_config(gindex, pindex, group)
            return {**config, "optim_bits": group.get("optim_bits", config["optim_bits"])}

    return GroupedAdamW8bit
