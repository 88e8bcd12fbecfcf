"""What user code changes in training, besides the tensors that a checkpoint has: a callback that has frozen a layer or
set another weight decay is not called for that step again in a resumed run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

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

    def __init__(self, parts: TrainingComponents) -> None:
        self._context, self._runtime = parts.context, parts.context.runtime
        self._pipelined = parts.mesh.pipeline.size > 1
        self._model, self._optimizer, self._schedule = parts.model, parts.optimizer, parts.schedule
        self._parameters = dict(parts.model.named_parameters())
        self._trained = self._flags()
        self._rates = list(getattr(self._schedule, "base_lrs", ()))
        self._unsaved = self._beside_tensors()
        self._warned: set[str] = set()
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
        for name, flag in self._trained.items():
            self._parameters[name].requires_grad_(state["trained"].get(name, flag))
        self._optimizer.load_changed_groups(state["groups"])
        if self._rates:
            self._schedule.base_lrs = list(state["base_rates"] or self._rates)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In the block, callbacks are told of a checkpoint, which has nothing of what they change."""
        before = self._written()
        yield
        changed = [name for name, state in self._written().items() if state != before[name]]
        self._warn(changed, "written to in on_save, after the checkpoint was made; do that in on_step_end")

    def check(self) -> None:
        """Warns, once of each kind, of what a checkpoint of this moment does not have."""
        left = [name for name, parameter in self._parameters.items() if parameter.grad is not None]
        remedy = "change gradients in on_substep_end or on_pre_optimizer_step"
        self._warn(left, f"a gradient is there between steps, and in no checkpoint; {remedy}")
        now = self._beside_tensors()
        changed = [name for name, state in self._unsaved.items() if now.get(name, state) != state]
        self._warn(changed, "changed by training, and in no checkpoint; a persistent buffer would be")

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
        """By name: the numbers that modules keep, and the states of buffers that are in no checkpoint."""
        found: dict[str, Any] = {}
        for name, module in self._model.named_modules():
            prefix = f"{name}." if name else ""
            numbers = {
                key: value for key, value in vars(module).items() if type(value) in NUMBERS and key != "training"
            }
            buffers = {key: module._buffers[key] for key in module._non_persistent_buffers_set}
            found |= {prefix + key: value for key, value in numbers.items()}
            found |= {
                prefix + key: _state_of(buffer, self._runtime) for key, buffer in buffers.items() if buffer is not None
            }
        return found


def _state_of(tensor: Tensor, runtime: Runtime) -> Any:
    """Differs once the tensor was written to, or got another storage."""
    return runtime.version(tensor) if runtime.lazy else (tensor.untyped_storage()._cdata, tensor._version)
