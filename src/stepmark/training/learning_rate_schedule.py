"""Learning rate schedules of transformers, set to a step directly rather than replayed up to it."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from stepmark.checkpoint.sections import without_functions
from stepmark.config.fields import described_at
from stepmark.errors import UsageError
from stepmark.filesystem.error_advice import explained
from stepmark.parallel.optimizer.named import NamedOptimizer

_signature = functools.cache(inspect.signature)  # asked in every step


def build_schedule(
    name: str, optimizer: torch.optim.Optimizer, total_steps: int, warmup_steps: int, options: Mapping[str, Any]
) -> LRScheduler:
    """Any schedule of `transformers.get_scheduler`, by name; `options` are its other arguments.

    Raises UsageError for an unknown name or option.
    """
    from transformers import SchedulerType, get_scheduler

    names = [kind.value for kind in SchedulerType]
    if name not in names:
        where = described_at("lr_scheduler_type")
        raise UsageError(f"lr_scheduler_type: {name!r} is unknown; choose one of {', '.join(names)}{where}")
    if options and name in ("constant", "constant_with_warmup"):  # get_scheduler ignores them silently
        raise UsageError(f"lr_scheduler_kwargs: the schedule {name} takes no arguments; remove them")
    refused = f"lr_scheduler_kwargs: the schedule {name} does not accept {dict(options)}"
    with explained(lambda error: UsageError(f"{refused}: {error}"), (TypeError, ValueError)):
        return get_scheduler(
            name,
            optimizer,
            num_warmup_steps=warmup_steps,
            num_training_steps=total_steps,
            scheduler_specific_kwargs=dict(options),
        )


def check_schedule(name: str, learning_rate: float = 1.0, options: Mapping[str, Any] = {}) -> None:
    """Raises UsageError as `build_schedule`, before there are parameters."""
    build_schedule(name, torch.optim.SGD([torch.zeros(1)], learning_rate), 1, 0, options)


def warmup_length(warmup_steps: float, warmup_ratio: float, total_steps: int) -> int:
    """Steps of warm-up: `warmup_steps` where it is 1 or more, else the fraction of all steps, rounded up."""
    if warmup_steps >= 1:
        return int(warmup_steps)
    return math.ceil(total_steps * (warmup_steps or warmup_ratio))


def kept_by_functions(schedule: LRScheduler) -> str:
    """What objects that compute a schedule's rates keep, and torch saves, as text to be compared."""
    objects = (each for each in getattr(schedule, "lr_lambdas", ()) if not isinstance(each, FunctionType))
    return repr([getattr(each, "__dict__", None) for each in objects])


def schedule_state(schedule: LRScheduler, kept: str | None = None) -> dict[str, Any]:
    """What to save: the step for a function of the step, otherwise the schedule's complete state but for functions.
    Where a callback has set the groups' rates or the base rates since the last step, also the rates of that step.
    `kept`: `kept_by_functions` of the new schedule; changes since are state. Default: there are none."""
    changed = kept not in (None, kept_by_functions(schedule)) or _has_own_rates(schedule)
    if isinstance(schedule, LambdaLR) and not changed:
        step, rates = schedule.last_epoch, [float(group["lr"]) for group in schedule.optimizer.param_groups]
        asked = all(isinstance(each, FunctionType | partial) for each in schedule.lr_lambdas)  # others may count calls
        follows = not asked or all(map(partial(math.isclose, rel_tol=1e-6), rates, _at(schedule, step)))
        return {"step": step} if follows else {"step": step, "last_rates": [*map(float, schedule.get_last_lr())]}
    return without_functions(schedule.state_dict())


def _has_own_rates(schedule: LRScheduler) -> bool:
    """Whether a class of the user's computes rates in another way, from a state of its own perhaps."""
    kind = type(schedule)
    derived = isinstance(schedule, LambdaLR) and kind is not LambdaLR
    return derived or (getattr(kind, "get_lr", None) is not LambdaLR.get_lr and not shows_rates(schedule))


def restore_schedule(schedule: LRScheduler, state: Mapping[str, Any], rates: list[float]) -> None:
    """Restores the schedule. A function of the step computes its rates from this run's arguments, which may differ from
    those of the run that saved; any other schedule gets `rates`, the groups' saved ones, as well.

    Raises UsageError where the state is that of another kind of schedule.
    """
    complete = "step" not in state and (_has_own_rates(schedule) or any(state.get("lr_lambdas") or ()))
    if isinstance(schedule, LambdaLR) and not complete:
        step = state.get("step", state.get("last_epoch"))
        if type(step) is not int:
            raise UsageError("lr_scheduler_type: the checkpoint's schedule is not one that follows from the step")
        schedule.last_epoch, schedule._last_lr = step, _at(schedule, step)
        _set_rates(schedule, schedule._last_lr)
        if "last_rates" in state:  # else they are those of the step
            _set_rates(schedule, rates)
            schedule._last_lr = list(state["last_rates"])
        return
    if "step" in state:
        raise UsageError(
            f"lr_scheduler_type: the checkpoint's schedule follows from the step, and has no state for a "
            f"{type(schedule).__name__}; resume with the lr_scheduler_type that saved it"
        )
    schedule.load_state_dict(dict(state))
    _set_rates(schedule, rates)


def _at(schedule: LambdaLR, step: int) -> list[float]:
    """The learning rates after so many calls of `schedule.step()`."""
    return [base * function(step) for base, function in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]


def _set_rates(schedule: LRScheduler, rates: Sequence[float | Tensor]) -> None:
    """A rate that is a tensor stays the same one, in its precision."""
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def advance(schedule: LRScheduler, optimizer: NamedOptimizer | None = None) -> None:
    """Advances the schedule by one optimizer step, unless it follows a metric: then evaluations advance it. Before
    torch's schedules find out, the groups of `optimizer` are checked."""
    if optimizer is not None:
        optimizer.check_groups()
    if not follows_metric(schedule):
        schedule.step()


def follows_metric(schedule: LRScheduler) -> bool:
    """Whether `schedule.step` takes a metric, like torch's ReduceLROnPlateau and transformers' GreedyLR."""
    metrics = _signature(type(schedule).step).parameters.get("metrics")
    return metrics is not None and metrics.default is metrics.empty


def shows_rates(schedule: LRScheduler) -> bool:
    """Whether a schedule sets no rates, but shows those of the last step, which its optimizer sets itself."""
    from transformers.optimization import AdafactorSchedule

    return isinstance(schedule, AdafactorSchedule)
