"""The optimizer of a Trainer's runs: the one that the arguments name, or one that a user gave."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from stepmark.config.training_fields import TrainingFields
from stepmark.errors import UsageError
from stepmark.parallel.optimizer.named import NamedOptimizer
from stepmark.parallel.pipeline.staged_model import staged
from stepmark.runtime.mesh import Mesh
from stepmark.training.optimizer import build_optimizer, check_step, decays_by_default, parameter_kinds, wrap_optimizer


def step_optimizer(
    model: nn.Module, args: TrainingFields, mesh: Mesh, given: torch.optim.Optimizer | None = None
) -> NamedOptimizer:
    """The optimizer that a step needs: around `given`, or the one that the arguments name."""
    stages = staged(model)
    if given is None:
        elsewhere = () if stages is None else stages.elsewhere
        return build_optimizer(
            args.optim,
            [(name, each) for name, each in model.named_parameters() if each not in elsewhere],
            mesh.runtime,
            decay=decays_by_default(model),
            kinds=parameter_kinds(model),
            learning_rate=args.learning_rate,
            weight_decay=args.weight_decay,
            betas=(args.adam_beta1, args.adam_beta2),
            epsilon=args.adam_epsilon,
            options=args.parsed_options("optim_args"),
            sharded_over=mesh if args.zero_1 else None,
            stages=mesh.context.host if mesh.pipeline.size > 1 else None,
            mesh=mesh,
            bucket_elements=args.bucket_elements,
        )
    if args.zero_1:
        raise UsageError(
            "zero_1 and optimizers: an optimizer passed to the Trainer, or made by create_optimizer, keeps its "
            "complete state on every rank; leave one of the two out"
        )
    if stages is not None:
        stages.leave_out_elsewhere(given)
    names = {parameter: name for name, parameter in model.named_parameters()}
    return wrap_optimizer(given, names, mesh, bucket_elements=args.bucket_elements)


class RunOptimizer:
    """The optimizer of a Trainer's runs. What was made for the run before is made again; what a user gave stays.
    `given`: a class of optimizers and its arguments, in place of the one that the arguments name."""

    def __init__(self, given: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None) -> None:
        self._given = given
        if given is not None:
            check_step(given[0])
        self.named: NamedOptimizer | None = None  # made last
        self._own: tuple[Any, ...] = None, None  # the optimizer and the schedule that a user has set for this run
        self._made: list[Any] = []  # those that were made for it

    def create(self, model: nn.Module, args: TrainingFields, mesh: Mesh) -> torch.optim.Optimizer:
        """The optimizer of the given class, or the one that the arguments name."""
        if self._given is not None:
            kind, options = self._given
            decays = decays_by_default(model)
            trained = [(decays(name), each) for name, each in model.named_parameters() if each.requires_grad]
            groups: list[dict[str, Any]] = [{"params": [each for decay, each in trained if decay]}]
            groups.append({"params": [each for decay, each in trained if not decay], "weight_decay": 0.0})
            return kind([group for group in groups if group["params"]], **options)
        self.named = step_optimizer(model, args, mesh)
        return self.named.inner

    def without_made(self, optimizer: Any, schedule: Any) -> tuple[Any, ...]:
        """The optimizer and the schedule that a Trainer has; None for what was made for the run before."""
        self._own = tuple(None if any(each is one for one in self._made) else each for each in (optimizer, schedule))
        return self._own

    def of_step(
        self, model: nn.Module, args: TrainingFields, mesh: Mesh, optimizer: Any, schedule: Any
    ) -> NamedOptimizer:
        """The step's optimizer, around the one that the Trainer has after `create_optimizer_and_scheduler`.

        Raises UsageError where that has set none.
        """
        if optimizer is None or schedule is None:
            raise UsageError(
                "create_optimizer_and_scheduler: it has set no optimizer or no lr_scheduler; set both attributes"
            )
        self._made = [each for each, own in zip((optimizer, schedule), self._own, strict=True) if own is None]
        if self.named is not None and self.named.inner is optimizer:
            own = {id(held.tensor) for held in self.named.distribution.held}
            if own == {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}:
                return self.named  # otherwise a user has added tensors to the groups, or removed some
        return step_optimizer(model, args, mesh, optimizer)
