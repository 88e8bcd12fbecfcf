"""Loss spikes, by the rule of OLMo-core's SkipStepOptimizer (https://github.com/allenai/OLMo-core), and what was found.

A step is a spike if its loss or the 2-norm of its gradient before clipping is above the mean of the last `window` steps
by more than `threshold` of their standard deviations, or is not finite. Steps are judged once half of the window is
there. Spikes are part of the window too, so that a loss that stays high is not one for long.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any


class SpikeDetector:
    """Judges the steps in order, the same on all ranks; its window is state that is saved.

    Attributes:
        found: The first and the last spike since `forget`, by step; None without one.
        rollbacks: How often the run has gone back.
    """

    def __init__(self, window: int, threshold: float) -> None:
        self._past = {name: deque[float](maxlen=window) for name in ("loss", "grad_norm")}
        self._least, self._threshold = max(2, window // 2), threshold
        self.found: tuple[int, int] | None = None
        self.rollbacks = 0

    def judge(self, loss: float, norm: float) -> str | None:
        """Takes the numbers of a step: why it is a spike, None if it is none."""
        reasons = []
        for (name, past), value in zip(self._past.items(), (loss, norm), strict=True):
            if not math.isfinite(value):
                reasons.append(f"{name} {value}")
                continue
            if len(past) >= self._least:
                mean = math.fsum(past) / len(past)
                deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in past) / (len(past) - 1))
                if value > mean + self._threshold * deviation:
                    reasons.append(f"{name} {value:.6g}, after {mean:.6g} ± {deviation:.2g} in {len(past)} steps")
            past.append(value)
        return "; ".join(reasons) or None

    def note(self, step: int) -> None:
        """The step, from 1, is a spike."""
        self.found = (self.found[0] if self.found else step, step)

    def forget(self) -> None:
        self.found = None

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        return {"past": {name: list(past) for name, past in self._past.items()}, "rollbacks": self.rollbacks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a checkpoint's values, of which the newest count where the window is shorter now."""
        for name, past in self._past.items():
            past.clear()
            past.extend(state["past"][name])
        self.rollbacks = int(state["rollbacks"])
