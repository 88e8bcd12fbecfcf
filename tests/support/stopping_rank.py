"""A rank of `stepmark train` that stops itself with SIGSTOP somewhere in a run.

Called as `STOPPED_RANK WHERE NOTE` followed by the arguments of `stepmark`. WHERE is a phase of a save or restore, or
one of PLACES; the file NOTE gets the time of the stop.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stepmark.__main__ import main
from stepmark.checkpoint.operation import Operation
from stepmark.liveness.status_board import StatusBoard


def stop_before(owner: type, name: str, stops: Callable[..., bool]) -> None:
    """From now on the process stops before the method is called with arguments for which `stops` is true."""
    method = getattr(owner, name)

    def stop_and_call(self: Any, *arguments: Any, **named: Any) -> Any:
        if stops(self, *arguments):
            note = Path(sys.argv[3])
            note.write_text(str(time.time()))
            signal.raise_signal(signal.SIGSTOP)
        return method(self, *arguments, **named)

    setattr(owner, name, stop_and_call)


def stop_in_phase(phase: str) -> None:
    enter = Operation.enter

    def enter_and_look(self: Operation, name: str) -> None:
        enter(self, name)
        self.entered(name)  # type: ignore[attr-defined]

    Operation.enter = enter_and_look  # type: ignore[method-assign]
    Operation.entered = lambda self, name: None  # type: ignore[attr-defined]
    stop_before(Operation, "entered", lambda self, name: name == phase)


def stop_in_training() -> None:
    """In the third step, on the way to the gradients' exchange."""
    from stepmark.training.step import TrainStep

    stop_before(TrainStep, "__call__", lambda self, step, *_: step == 2)


def stop_between_stages() -> None:
    """In the second step, in the middle of a pipeline's passes: before a transfer."""
    from stepmark.parallel.pipeline.transfers import Transfers
    from stepmark.training.step import TrainStep

    steps: list[int] = []
    stop_before(TrainStep, "__call__", lambda self, step, *_: bool(steps.append(step)))  # type: ignore[func-returns-value]
    stop_before(Transfers, "settle", lambda *_: len(steps) == 2)


def stop_in_evaluation() -> None:
    from stepmark.evaluation.evaluator import Evaluator

    stop_before(Evaluator, "__call__", lambda *_: True)


def stop_after_saving() -> None:
    """When this rank's part of the first save is done, and it has heard that all is committed."""
    stop_before(StatusBoard, "leave", lambda self: self.has("committed", 0))


PLACES: dict[str, Callable[[], None]] = {
    "training": stop_in_training,
    "between stages": stop_between_stages,
    "evaluating": stop_in_evaluation,
    "saved": stop_after_saving,
}


if __name__ == "__main__":
    stopped, where, _, *arguments = sys.argv[1:]
    if os.environ["RANK"] == stopped:
        PLACES.get(where, lambda: stop_in_phase(where))()
    main(arguments)
