"""Dynamic loss scaling for float16, as in Mixed Precision Training (Micikevicius et al., 2018), with the constants of
torch.amp.GradScaler."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("stepmark")

FIRST = 2.0**16
GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000  # factors; steps without an overflow before the scale grows


class LossScaler:
    """Multiplies losses, so that small gradients do not become 0 in float16, and divides the gradients again.

    A step whose gradients are not finite is left out, and the scale halved; after 2000 steps without one it is doubled.
    All ranks decide by the same norm.

    Args:
        ranks: How many (logical) ranks have a part of a step's loss each. A part is multiplied by their number too,
            rounded up to a power of two: otherwise gradients would be smaller on more ranks.
    """

    def __init__(self, scale: float = FIRST, ranks: int = 1) -> None:
        self.scale = scale  # what the loss of a step is multiplied with
        self._of_rank = 2.0 ** math.ceil(math.log2(ranks))
        self._good_steps = 0  # since the scale has changed
        self._warned = False

    def of(self, loss: Tensor) -> Tensor:
        """The gradient that the backward pass of a loss starts from: the factor, in the loss's shape and dtype."""
        return torch.full_like(loss, self.factor)

    @property
    def factor(self) -> float:
        """What a rank's part of the loss, and so its gradients, are multiplied with."""
        return self.scale * self._of_rank

    def accept(self, norm: float) -> bool:
        """Follows the norm of a step's gradient: whether the step may update the parameters."""
        if not math.isfinite(norm):
            self.scale, self._good_steps = self.scale * BACKOFF, 0
            logger.info("fp16: a gradient overflowed; the step is left out, and the loss scale is %g", self.scale)
            if self.scale < 1 and not self._warned:
                self._warned = True
                logger.warning("fp16: gradients overflow even at a loss scale of %g; training has diverged", self.scale)
            return False
        self._good_steps += 1
        if self._good_steps == INTERVAL:
            self.scale, self._good_steps = self.scale * GROWTH, 0
        return True

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good_steps": self._good_steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self._good_steps = float(state["scale"]), int(state["good_steps"])
