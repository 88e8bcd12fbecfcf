"""When a run logs, evaluates, saves and stops."""

from __future__ import annotations

import math
from typing import Any

from transformers.trainer_callback import DefaultFlowCallback, TrainerControl, TrainerState

from stepmark.config.training_fields import TrainingFields


class StrategyCallback(DefaultFlowCallback):
    """Sets the control's flags by the strategies of the arguments.

    `epoch` fires at the end of every epoch, also where `max_steps` or a callback ends it early. `steps` evaluates and
    saves at the end of the run too, so that no training is lost. There are no evaluations before `eval_delay`. A
    run in which a callback ends epochs early ends after as many epochs as it would have had without that, also where
    `max_steps` says how many these are.
    """

    _ended_early = False

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._ended_early = False

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> TrainerControl:
        step = state.global_step
        first = step == 1 and args.logging_first_step
        control.should_log |= first or _every(args.logging_strategy, step, state.logging_steps)
        due = step >= args.eval_delay
        control.should_evaluate |= due and _every(args.eval_strategy, step, state.eval_steps)
        control.should_save |= _every(args.save_strategy, step, state.save_steps)
        if step >= state.max_steps:
            self._end_run(args, control)
        return control

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **_: Any) -> TrainerControl:
        control.should_log |= args.logging_strategy == "epoch"
        due = state.epoch is not None and state.epoch >= args.eval_delay
        control.should_evaluate |= due and args.eval_strategy == "epoch"
        control.should_save |= args.save_strategy == "epoch"
        in_last_epoch = state.epoch is not None and state.epoch > state.num_train_epochs - 1
        self._ended_early |= control.should_epoch_stop
        if self._ended_early and in_last_epoch and not control.should_training_stop:
            self._end_run(args, control)
        return control

    def _end_run(self, args: Any, control: TrainerControl) -> None:
        control.should_training_stop = True
        control.should_evaluate |= args.eval_strategy == "steps"
        control.should_save |= args.save_strategy == "steps"


def _every(strategy: str, step: int, interval: float) -> bool:
    return strategy == "steps" and step % int(interval) == 0


def is_better(args: TrainingFields, value: float, best: float | None) -> bool:
    """Whether the metric for the best model improved; NaN is never better."""
    if math.isnan(value):
        return False
    if best is None:
        return True
    return value > best if args.greater_is_better else value < best
