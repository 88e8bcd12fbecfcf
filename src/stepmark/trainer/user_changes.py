"""What user code changes in training, besides the tensors that a checkpoint has: a callback that has frozen a layer or
set another weight decay is not called for that step again in a resumed run."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from stepmark.filesystem.printable import listed
from stepmark.parallel.optimizer.named import NUMBERS
from stepmark.runtime.base import Runtime
from stepmark.trainer.components import TrainingComponents

logger = logging.getLogger("stepmark")
LISTED = 5  # names in one warning
# Arguments that training reads when it begins.
READ_AT_BEGIN = """
    per_device_train_batch_size gradient_accumulation_steps max_steps num_train_epochs learning_rate lr_scheduler_type
    warmup_steps warmup_ratio weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm optim label_smoothing_factor
    neftune_noise_alpha bf16 fp16 seed data_seed train_sampling_strategy dataloader_drop_last save_total_limit
"""


class UserChanges:
    """Compares a run with how it was when this was made: before it restores anything. Frozen parameters,
    hyperparameters and base learning rates are saved and restored; for what cannot be, there is a warning."""

    def __init__(self, parts: TrainingComponents, callbacks: Sequence[Any] = ()) -> None:
        self._context, self._runtime = parts.context, parts.context.runtime
        self._pipelined = parts.mesh.pipeline.size > 1
        self._model, self._optimizer, self._schedule = parts.model, parts.optimizer, parts.schedule
        self._parameters = dict(parts.model.named_parameters())
        self._trained = self._flags()
        self._rates = list(getattr(self._schedule, "base_lrs", ()))
        self._callbacks = callbacks
        self._unsaved = self._beside_tensors()
        attributes = (each for module in (*parts.model.modules(), *callbacks) for each in vars(module).values())
        self._first = [each for each in attributes if isinstance(each, Tensor)]  # so that no other gets their identity
        self._warned: set[str] = set()
        self._restored = False
        self._args = parts.args
        self._read = {name: getattr(parts.args, name) for name in READ_AT_BEGIN.split()}

    def state_dict(self) -> dict[str, Any]:
        """What has changed, as plain values. Collective in a pipeline, whose ranks have parameters of their own."""
        trained = {name: flag for name, flag in self._flags().items() if flag != self._trained[name]}
        if self._pipelined:
            trained = {name: flag for each in self._context.host.all_gather(trained) for name, flag in each.items()}
        rates = list(getattr(self._schedule, "base_lrs", ()))
        found = {"trained": trained, "groups": self._optimizer.changed_groups()}
        return {**found, "base_rates": rates if rates != self._rates else []}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Makes these changes, and no others, to what there was."""
        self._restored = True
        for name, flag in self._trained.items():
            self._parameters[name].requires_grad_(state["trained"].get(name, flag))
        self._optimizer.load_changed_groups(state["groups"])
        if self._rates:
            self._schedule.base_lrs = list(state["base_rates"] or self._rates)

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """In the block, callbacks are told that training begins. What they change then was changed long ago where the
        run is a resumed one, and maybe changed again since: it stays as it was restored. Collective."""
        if not self._restored:
            yield
            return
        restored = self.state_dict()
        with self.watching("written to in on_train_begin, which a resumed run calls again; do that at global_step 0"):
            yield
        self.load_state_dict(restored)

    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Warns, with these words, of parameters that callbacks write to in the block."""
        before = self._written()
        yield
        self._warn([name for name, state in self._written().items() if state != before[name]], what)

    def check(self) -> None:
        """Warns, once of each kind, of what a checkpoint of this moment does not have."""
        left = [name for name, parameter in self._parameters.items() if parameter.grad is not None]
        remedy = "change gradients in on_substep_end or on_pre_optimizer_step"
        self._warn(left, f"a gradient is there between steps, and in no checkpoint; {remedy}")
        now = self._beside_tensors()
        before = {name: state for name, state in now.items() if type(state) is not list} | self._unsaved
        changed = [name for name, state in now.items() if before.get(name) != state]  # or a copy of the model is new
        self._warn(changed, "changed by training, and in no checkpoint; a persistent buffer would be")
        live = dict(self._model.named_parameters())
        replaced = [name for name, each in self._parameters.items() if live.get(name, each) is not each]
        self._warn(replaced, "replaced after the optimizer was made, which has the ones before; write to these")

    def check_arguments(self) -> None:
        """Warns, once of each, of arguments that were set too late to have an effect."""
        for name, value in self._read.items():
            if getattr(self._args, name) != value:
                self._warn([name], f"set in training, which goes on with {name}={value}; set it earlier")

    def _warn(self, names: list[str], what: str) -> None:
        if not names or what in self._warned or self._context.host.rank != 0:
            return
        self._warned.add(what)
        logger.warning("%s: %s. A resumed run may train differently", listed(names, LISTED), what)

    def _flags(self) -> dict[str, bool]:
        return {name: parameter.requires_grad for name, parameter in self._parameters.items()}

    def _written(self) -> dict[str, Any]:
        return {name: _state_of(parameter, self._runtime) for name, parameter in self._parameters.items()}

    def _beside_tensors(self) -> dict[str, Any]:
        """By name: the states of what modules and callbacks keep that is in no checkpoint. Left out are modules with
        an extra state, and numbers of callbacks."""
        found: dict[str, Any] = {}
        for name, owner in (*self._model.named_modules(), *((type(each).__name__, each) for each in self._callbacks)):
            is_module = isinstance(owner, nn.Module)
            buffers = {key: owner._buffers[key] for key in owner._non_persistent_buffers_set} if is_module else {}
            plain = is_module and type(owner).get_extra_state is nn.Module.get_extra_state
            for key, value in {**(vars(owner) if plain or not is_module else {}), **buffers}.items():
                state = self._state_of_value(value, plain=plain)
                found |= {} if state is None or key == "training" else {f"{name}.{key}".lstrip("."): state}
        return found

    def _state_of_value(self, value: Any, *, plain: bool) -> Any:
        """Differs once a tensor, or a module such as an average of the model, was changed or replaced; with `plain`
        also a number, and the length of a list. None for anything else."""
        if isinstance(value, nn.Module):
            inside = None if value is self._model else value.state_dict().values()
            return inside and [_state_of(each, self._runtime) for each in inside if isinstance(each, Tensor)]
        if isinstance(value, Tensor):
            return None if value.requires_grad else (id(value), _state_of(value, self._runtime))
        return len(value) if plain and type(value) is list else value if plain and type(value) in NUMBERS else None


def _state_of(tensor: Tensor, runtime: Runtime) -> Any:
    """Differs once the tensor was written to, or got another storage."""
    return runtime.version(tensor) if runtime.lazy else (tensor.untyped_storage()._cdata, tensor._version)
