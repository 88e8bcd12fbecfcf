"""Where the host waits for the simulated native device, in the steps of transformers' models."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from tests.support import lazy_models
from tests.support.native import DEVICE

WARM_UP = 2
SKIPPED = ("torch", "tests", "runpy.py", "contextlib.py", "threading.py")


class Waits(TrainerCallback):
    """What the host waits for from the beginning of each step to that of the next: the kind of wait, and the line that
    causes it. Threads that place batches may wait."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.steps.append([])

    def tell(self, kind: str) -> None:
        if self.steps:
            self.steps[-1].append(f"{kind} {line_outside_torch()}")

    @contextmanager
    def watching(self) -> Iterator[None]:
        import simulated_device

        simulated_device.c.tell_of_waits(self.tell)
        try:
            yield
        finally:
            simulated_device.c.tell_of_waits(None)


def line_outside_torch() -> str:
    """The innermost line that is neither torch's nor ours that watches."""
    for frame in reversed(traceback.extract_stack()[:-2]):
        parts = Path(frame.filename).parts
        inside = parts[parts.index("site-packages") + 1 :] if "site-packages" in parts else parts[-3:]
        if inside[0] not in SKIPPED and frame.filename != __file__:
            return f"{'/'.join(inside)}:{frame.lineno} ({frame.name})"
    return "the backward pass"


def count(name: str) -> dict[str, list[str]]:
    """What the worst step after warm-up waits for, without accumulation ("1") and with two micro-batches ("2"); see
    `lazy_models.count`."""
    found: dict[str, list[str]] = {}
    for accumulation in (1, 2):
        waits = Waits()
        if name in lazy_models.OTHERS:
            model, sample = lazy_models.OTHERS[name][0](), lazy_models.OTHERS[name][1]
        else:
            model = lazy_models.causal(name)
            sample = lazy_models.padded if accumulation == 2 else lazy_models.packed
        with waits.watching():
            lazy_models.train(model, sample, waits, device=DEVICE, gradient_accumulation_steps=accumulation)
        found[str(accumulation)] = max(waits.steps[WARM_UP:-1], key=len)
    return found


def logs(every: int, options: dict[str, Any]) -> list[int]:
    """How often the host waits in each step but the last, where every so many steps are logged; `options` are more
    arguments."""
    waits = Waits()
    with waits.watching():
        given = {"device": DEVICE, "logging_steps": every, "max_steps": 9, **options}
        lazy_models.train(lazy_models.causal("gpt2"), lazy_models.packed, waits, **given)
    return [len(step) for step in waits.steps[WARM_UP:-1]]
