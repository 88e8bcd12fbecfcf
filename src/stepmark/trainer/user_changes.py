"""What user code changes in training, besides the tensors that a checkpoint has: a callback that has frozen a layer or
set another weight decay is not called for that step again in a resumed run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils.data import Sampler

from stepmark.data.loader.own_state import LIBRARIES, LONGEST, parts_of
from stepmark.filesystem.printable import listed
from stepmark.parallel.optimizer.named import NUMBERS, to_python
from stepmark.trainer.callbacks import RunCallbacks
from stepmark.trainer.components import TrainingComponents

logger = logging.getLogger("stepmark")
LISTED = 5  # names in one warning
# Arguments that training reads when it begins.
READ_AT_BEGIN = """
    per_device_train_batch_size gradient_accumulation_steps max_steps num_train_epochs learning_rate lr_scheduler_type
    warmup_steps warmup_ratio weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm optim label_smoothing_factor
    neftune_noise_alpha bf16 fp16 seed data_seed train_sampling_strategy dataloader_drop_last save_total_limit
"""
COLLATOR = "data_collator"
STOPS = ("should_epoch_stop", "should_training_stop")  # flags of the control
HOOKS = """
    _forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks _post_accumulate_grad_hooks
    _optimizer_step_pre_hooks _optimizer_step_post_hooks
"""


class UserChanges:
    """Compares a run with how it was when this was made: before it restores anything. Frozen parameters,
    hyperparameters, base learning rates, and numbers and strings of datasets are saved and restored; for what cannot
    be, there is a warning."""

    def __init__(self, parts: TrainingComponents, run: RunCallbacks) -> None:
        self._context, self._runtime = parts.context, parts.context.runtime
        self._model, self._optimizer, self._schedule = parts.model, parts.optimizer, parts.schedule
        self._parameters = dict(parts.model.named_parameters())
        self._trained, held = self._flags(), {id(each) for each in parts.saved.parameters()}
        self._base = {name: each for name, each in self._parameters.items() if id(each) not in held}
        self._first_saved = self._saved()
        self._rates = list(getattr(self._schedule, "base_lrs", ()))
        self._run, self._callbacks = run, run.handler.callbacks
        self._datasets = dict(_own_datasets(parts.loader.dataset))
        given = parts_of(getattr(parts.loader, "given", None))
        self._samplers = {type(each).__name__: each for each in given if isinstance(each, Sampler)}
        self._in_datasets = self._of_datasets()
        self._collator = getattr(parts.loader.collate_fn, "__self__", parts.loader.collate_fn)
        self._begun = 0  # steps of this process
        self._unsaved = self._beside_tensors()
        owners = (*parts.model.modules(), *self._callbacks, *self._datasets.values())
        self._first = [each for owner in owners for each in vars(owner).values()]  # no other gets their identity
        self._warned: set[str] = set()
        self._restored = False
        self._args = parts.args
        self._read = {name: getattr(parts.args, name) for name in READ_AT_BEGIN.split()}

    def state_dict(self) -> dict[str, Any]:
        """What has changed, as plain values. Collective."""
        trained = {name: flag for name, flag in self._flags().items() if flag != self._trained[name]}
        values = {key: each for key, each in self._of_datasets().items() if each != self._in_datasets.get(key)}
        told = self._context.host.all_gather((trained, values))
        others = [key for _, each in told for key in each if each[key] != told[0][1].get(key)]
        self._warn(others, "changed by training, differs between ranks, and only rank 0's is saved")
        rates = list(getattr(self._schedule, "base_lrs", ()))
        return {
            "trained": {name: flag for each, _ in told for name, flag in each.items()},  # stages have their own
            "datasets": told[0][1],
            "groups": self._optimizer.changed_groups(),
            "base_rates": rates if rates != self._rates else [],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes these changes, and no others, to what there was."""
        self._restored = True
        for name, flag in self._trained.items():
            self._parameters[name].requires_grad_(state["trained"].get(name, flag))
        self._optimizer.load_changed_groups(state["groups"])
        if self._rates:
            self._schedule.base_lrs = list(state["base_rates"] or self._rates)
        for name, value in {**self._in_datasets, **state.get("datasets", {})}.items():
            owner, _, attribute = name.rpartition(".")
            if owner in self._datasets:
                setattr(self._datasets[owner], attribute, value)

    @contextmanager
    def beginning(self, event: str) -> Iterator[None]:
        """In the block, callbacks are told that training or an epoch begins. What they change then was changed long ago
        where the run is a resumed one, and maybe changed again since: it stays as it was restored. Collective."""
        if not self._restored:
            yield
            return
        restored, state, groups = self.state_dict(), vars(self._run.state), self._optimizer.inner.param_groups
        hyperparameters = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        intervals, known = {name: state[name] for name in self._run.intervals}, self._of_datasets().keys()
        with self.watching(f"written to in {event}, which a resumed run calls again; do that in a step's event"):
            yield
        self.load_state_dict(restored)
        for name in self._of_datasets().keys() - known:  # up to now the value of a class
            owner, _, attribute = name.rpartition(".")
            delattr(self._datasets[owner], attribute)
        state.update(intervals)
        for group, values in zip(groups, hyperparameters, strict=True):
            group.update(values)

    @contextmanager
    def watching(self, what: str, *, settings: bool = False) -> Iterator[None]:
        """Warns, with these words, of parameters, and `settings`, that callbacks write to in the block."""
        before = self._written() | (self._settings() if settings else {})
        yield
        after = self._written() | (self._settings() if settings else {})
        self._warn([name for name, state in after.items() if state != before.get(name)], what)

    def _settings(self) -> dict[str, Any]:
        """By name, what else a checkpoint has of user code."""
        groups, state = self._optimizer.param_groups, vars(self._run.state)
        given = sorted({key for group in groups for key in group} - {"params"})
        return {
            **{f"{name}.requires_grad": flag for name, flag in self._flags().items()},
            **{f"{key} of the optimizer": [to_python(each.get(key)) for each in groups] for key in given},
            **{f"state.{name}": state[name] for name in self._run.intervals},
            **self._of_datasets(),
            "base_lrs": list(getattr(self._schedule, "base_lrs", ())),
        }

    def check(self) -> None:
        """Warns, once of each kind, of what a checkpoint of this moment does not have."""
        left = [name for name, parameter in self._parameters.items() if parameter.grad is not None]
        remedy = "change gradients in on_substep_end or on_pre_optimizer_step"
        self._warn(left, f"a gradient is there between steps, and in no checkpoint; {remedy}")
        now = self._beside_tensors() | self._hooks()
        before = {name: state for name, state in now.items() if type(state) is not list} | self._unsaved
        changed = [name for name, state in now.items() if before.get(name) != state]  # or a copy of the model is new
        remedy = "a persistent buffer, and a number or a string of a dataset, would be; hooks belong in on_train_begin"
        self._warn(changed, f"changed by training, and in no checkpoint; {remedy}")
        saved = self._saved()
        other = [name for name in {**self._first_saved, **saved} if saved.get(name) != self._first_saved.get(name)]
        remedy = "so that the optimizer lacks it, or a new process cannot restore it; write to what was there instead"
        self._warn(other, f"added, removed, replaced or reshaped in training, {remedy}")

    def step_begins(self) -> None:
        """Warns, once of each, of arguments that were set too late to have an effect."""
        self._begun += 1
        if self._begun == 2:  # callbacks have registered what a resumed run registers in its first step again
            self._unsaved |= self._hooks()
        for name, value in self._read.items():
            if getattr(self._args, name) != value:
                self._warn([name], f"set in training, which goes on with {name}={value}; set it earlier")

    def _warn(self, names: list[str], what: str) -> None:
        if not names or what in self._warned or self._context.host.rank != 0:
            return
        self._warned.add(what)
        logger.warning("%s: %s. A resumed run may train differently", listed(names, LISTED), what)

    def _saved(self) -> dict[str, Any]:
        """By name, which parameters and what shapes of buffers a checkpoint has."""
        state, parameters = self._model.state_dict(), self._model.named_parameters()
        buffers = {name: tuple(each.shape) for name, each in self._model.named_buffers() if name in state}
        return {**{name: id(each) for name, each in parameters}, **buffers}

    def _hooks(self) -> dict[str, int]:
        """By name: how many hooks there are of modules, parameters and the optimizer."""
        named = (*self._model.named_modules(), *self._parameters.items(), ("optimizer", self._optimizer.inner))
        found = ((name, sum(len(getattr(each, key, None) or ()) for key in HOOKS.split())) for name, each in named)
        return {f"hooks of {name or 'the model'}": count for name, count in found}

    def _of_datasets(self) -> dict[str, Any]:
        values = ((name, key, each) for name, owner in self._datasets.items() for key, each in vars(owner).items())
        return {f"{name}.{key}": each for name, key, each in values if type(each) in (*NUMBERS, str)}

    def _flags(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in self._parameters.items()}

    def _written(self) -> dict[str, Any]:
        flags = {f"control.{name}": getattr(self._run.control, name) for name in STOPS}
        return {name: self._runtime.version(each) for name, each in self._parameters.items()} | flags

    def _beside_tensors(self) -> dict[str, Any]:
        """By name: the states of what modules and callbacks keep that is in no checkpoint, the base of an adapter too.
        Left out are modules with an extra state, and numbers of callbacks and datasets."""
        found: dict[str, Any] = {name: self._runtime.version(each) for name, each in self._base.items()}
        callbacks = ((type(each).__name__, each) for each in self._callbacks)
        data = self._datasets | self._samplers
        collators = {COLLATOR: self._collator}.items() if hasattr(self._collator, "__dict__") else ()
        for name, owner in (*self._model.named_modules(), *callbacks, *data.items(), *collators):
            is_module = isinstance(owner, nn.Module)
            buffers = {key: owner._buffers[key] for key in owner._non_persistent_buffers_set} if is_module else {}
            plain = name == COLLATOR or (is_module and type(owner).get_extra_state is nn.Module.get_extra_state)
            for key, value in {**(vars(owner) if plain or not is_module else {}), **buffers}.items():
                counted = name in data and type(value) in (list, np.ndarray)
                state = _state_of_list(value) if counted else self._state_of_value(value, plain=plain)
                found |= {} if state is None or key == "training" else {f"{name}.{key}".lstrip("."): state}
        return found

    def _state_of_value(self, value: Any, *, plain: bool) -> Any:
        """Differs once a tensor, or a module such as an average of the model, was changed or replaced; with `plain`
        also a number, and the length of a list. None for anything else."""
        if isinstance(value, nn.Module):
            inside = None if value is self._model else value.state_dict().values()
            return inside and [self._runtime.version(each) for each in inside if isinstance(each, Tensor)]
        if not plain and not isinstance(value, Tensor):
            kept = [each for each in _tensors_of(value) if not each.requires_grad]
            return [(id(each), self._runtime.version(each)) for each in kept] or None
        if isinstance(value, Tensor):
            return None if value.requires_grad else (id(value), self._runtime.version(value))
        return len(value) if plain and type(value) is list else value if plain and type(value) in NUMBERS else None


def _state_of_list(value: Any) -> tuple[int, str]:
    """Differs once it was replaced, or changed where it has few plain values, not samples."""
    values = value if type(value) is list else value.reshape(-1)
    plain = len(values) <= LONGEST and all(np.isscalar(each) for each in values)
    return id(value), repr(value) if plain else ""


def _tensors_of(value: Any, depth: int = 2) -> list[Tensor]:
    """Those of a list or dict of tensors, such as an average of the model, or of an object that has such."""
    if isinstance(value, Mapping | list | tuple):
        inside = list(value.values() if isinstance(value, Mapping) else value)
        return [each for each in inside if isinstance(each, Tensor)] if isinstance([*inside, 0][0], Tensor) else []
    own = {} if type(value).__module__.partition(".")[0] in LIBRARIES or not depth else getattr(value, "__dict__", {})
    return [one for each in [*own.values()] for one in _tensors_of(each, depth - 1)]


def _own_datasets(dataset: Any, name: str = "train_dataset") -> Iterator[tuple[str, Any]]:
    """A user's dataset, and the one around which it or torch's `Subset` is, by name."""
    if hasattr(dataset, "__dict__") and type(dataset).__module__.partition(".")[0] not in ("stepmark", "datasets"):
        yield name, dataset
        yield from _own_datasets(vars(dataset).get("dataset"), f"{name}.dataset")
