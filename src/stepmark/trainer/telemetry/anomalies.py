"""Early signs that a run does not learn, found in numbers that reach the host anyway. Each kind is reported once, but
spikes each time.

not finite     a loss or a gradient norm is nan or infinite
zero           the gradient norm is exactly 0 while there is a loss: nothing reaches the parameters
repeated       loss and gradient norm stay the same to the last bit, step after step, while the learning rate is not 0
starved        an expert of a mixture gets almost no tokens, over several logs
weights stuck  a checkpoint holds the same weights as the one before, bit for bit, though steps were trained in between

Steps without a target token, steps whose learning rate is 0 (the first of a warm-up, the last of a schedule) and steps
that a loss scaler skips do not count: they are not meant to change anything.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

REPEATS = 5  # steps in a row with the same loss and gradient norm
STARVED_LOGS = 5  # logs over which an expert gets less than STARVED of its layer's mean
STARVED = 0.01
FEWEST_TOKENS = 1000  # of an expert on average over these logs, below which chance decides


class SpikeDetector:
    """Judges loss spikes, by the rule of OLMo-core's SkipStepOptimizer (https://github.com/allenai/OLMo-core): steps in
    order, the same on all ranks. Its window is state that is saved.

    A step is a spike if its loss or the 2-norm of its gradient before clipping is above the mean of the last `window`
    steps by more than `threshold` of their standard deviations, or is not finite. Steps are judged once half of the
    window is there. Spikes are part of the window too, so that a loss that stays high is not one for long.

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

    def state_dict(self) -> dict[str, Any]:
        return {"past": {name: list(past) for name, past in self._past.items()}, "rollbacks": self.rollbacks}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from a checkpoint's values, of which the newest count where the window is shorter now."""
        for name, past in self._past.items():
            past.clear()
            past.extend(state["past"][name])
        self.rollbacks = int(state["rollbacks"])


@dataclass(eq=False)
class AnomalyDetector:
    """Checks every step's numbers when they reach the host, and calls `report(kind, step, message)` once for each kind
    of anomaly: `kind` identifies it for programs, `step` is the first step that shows it.

    `stop_on_nan`: consecutive steps that are not finite after which the run has diverged; 0: never. `not_finite` has
    the numbers of the last step on the host that are not finite, by name, the same on all ranks. `spikes` judges the
    steps that have updated the weights."""

    report: Callable[[str, int, str], None]
    stop_on_nan: int = 0
    spikes: SpikeDetector | None = None

    def __post_init__(self) -> None:
        self.not_finite: dict[str, float] = {}
        self._streak, self._first = 0, 0
        self._message = ""
        self._reported: set[str] = set()
        self._marks: set[int] = set()
        self._last: tuple[float, float] | None = None
        self._same = 0
        self._moved = 0  # steps since the last checkpoint that must have changed the weights
        self._weights: tuple[int, str] | None = None
        self._loads: deque[Mapping[str, Tensor]] = deque(maxlen=STARVED_LOGS)

    def look(self, step: int, loss: float, tokens: float, norm: float, updated: bool = True, rate: float = 0.0) -> None:
        """Takes a step's numbers, in order, once they are on the host: whether it `updated`, its learning `rate`."""
        if not tokens:
            return
        if not math.isfinite(loss):
            self._found("loss_not_finite", step, f"the loss of step {step} is {loss}; {self._remedy(step)}")
        elif not math.isfinite(norm) and updated:
            self._found("grad_norm_not_finite", step, f"grad_norm of step {step} is {norm}; {self._remedy(step)}")
        elif norm == 0.0 and loss != 0.0:
            message = f"grad_norm of step {step} is exactly 0{self._since(step)}: no gradient reaches the parameters"
            self._found("grad_norm_zero", step, message)
        if updated:
            self._count(step, {"loss": loss, "grad_norm": norm})
            if self.spikes is not None and (reason := self.spikes.judge(loss, norm)) is not None:
                first, _ = self.spikes.found or (step, step)
                self.spikes.found = first, step
                self.report("loss_spike", step, f"step {step} is a loss spike: {reason}")
        self._look_for_repeats(step, loss, norm, rate)
        self._moved += rate > 0.0 and math.isfinite(norm) and norm > 0.0

    def _count(self, step: int, numbers: dict[str, float]) -> None:
        """Counts the steps in a row that are not finite."""
        self.not_finite = {name: value for name, value in numbers.items() if not math.isfinite(value)}
        if 0 < self.stop_on_nan <= self._streak:
            return  # the run has diverged, whatever follows
        if not self.not_finite:
            self._streak = 0
            return
        self._first = self._first if self._streak else step
        self._streak += 1
        found = ", ".join(f"{name} {value}" for name, value in numbers.items())
        self._message = f"training has diverged: since step {self._first} nothing is finite ({found})"

    def diverged(self, *, ended: bool = False) -> str | None:
        """The error of a diverged run, else None. `ended`: one step that is not finite suffices if it is the last."""
        if not self.stop_on_nan or self._streak < (1 if ended else self.stop_on_nan):
            return None
        remedy = f"lower learning_rate, or look at the samples of step {self._first} (stop_on_nan: {self.stop_on_nan})"
        return f"{self._message}; {self._remedy(self._first)}; {remedy}"

    def rolled_back(self) -> None:
        """The run continues from an earlier checkpoint, without the steps since."""
        self.not_finite, self._streak = {}, 0
        if self.spikes is not None:
            self.spikes.found = None

    def _look_for_repeats(self, step: int, loss: float, norm: float, rate: float) -> None:
        usable = rate > 0.0 and norm > 0.0 and math.isfinite(loss) and math.isfinite(norm)
        self._same = self._same + 1 if usable and self._last == (loss, norm) else int(usable)
        self._last = (loss, norm) if usable else None
        if self._same == REPEATS:
            first = step - REPEATS + 1
            message = f"loss and grad_norm have been the same to the last bit since step {first}{self._since(first)}"
            self._found("repeated", first, f"{message}, with a learning rate above 0: the weights do not change")

    def loads(self, step: int, loads: Mapping[str, Tensor]) -> None:
        """Takes the tokens of each expert of each layer since the last log, at the log of this step."""
        self._loads.append(loads)
        if len(self._loads) < STARVED_LOGS:
            return
        for layer in loads:
            tokens = torch.stack([each[layer] for each in self._loads if layer in each]).sum(0)
            mean = float(tokens.double().mean())
            starved = (tokens < STARVED * mean).nonzero().flatten().tolist()
            if starved and mean >= FEWEST_TOKENS:
                worst = min(starved, key=lambda expert: int(tokens[expert]))
                message = (
                    f"{len(starved)} of {len(tokens)} experts of {layer} got less than {STARVED:.0%} of the mean over "
                    f"the last {STARVED_LOGS} logs: expert {worst} got {int(tokens[worst])} tokens, the mean is "
                    f"{mean:.0f}; balance the router (output_router_logits with router_aux_loss_coef, or "
                    "router_bias_update_rate)"
                )
                self._found("expert_starved", step, message)

    def marked(self, step: int) -> None:
        """After this step a save began, or the run continues from its checkpoint."""
        self._marks.add(step)

    def moved(self) -> int:
        """How many steps since the last call must have changed the weights; for `weights`."""
        moved, self._moved = self._moved, 0
        return moved

    def weights(self, step: int, fingerprint: str, moved: int) -> None:
        """The checkpoint of this step holds weights with this fingerprint; `moved` is what `moved` returned then."""
        before, self._weights = self._weights, (step, fingerprint)
        if before is None or before[1] != fingerprint or before[0] == step or not moved:
            return
        message = (
            f"checkpoint-{step} holds the same weights as checkpoint-{before[0]}, bit for bit, though {moved} steps "
            "between them had a gradient and a learning rate above 0: the optimizer does not update this model"
        )
        self._found("weights_stuck", step, message)

    def _since(self, step: int) -> str:
        """In words, whether the anomaly began right after a save or a resumption."""
        return f", since checkpoint-{step - 1} was saved or resumed from" if step - 1 in self._marks else ""

    def _remedy(self, step: int) -> str:
        good = [saved for saved in self._marks if saved < step]  # a save that fails ends the run with its own error
        if not good:
            return "there is no checkpoint from before it"
        return f"the last checkpoint from before it is checkpoint-{max(good)}"

    def _found(self, kind: str, step: int, message: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            self.report(kind, step, message)
