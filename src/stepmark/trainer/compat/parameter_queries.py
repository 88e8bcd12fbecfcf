"""What scripts ask a Trainer about its parameters and their optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from stepmark.errors import UsageError


class ParameterQueries:
    """Questions about `model` and `optimizer`, with transformers' names. Before `create_optimizer`, or `train`, those
    about the optimizer raise UsageError."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None

    def get_num_trainable_parameters(self) -> int:
        """The number of values in the parameters that are trained, of this rank's part of the model."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each of the optimizer's parameter groups."""
        return [group["lr"] for group in self._groups()]

    def get_optimizer_group(self, param: str | Tensor | None = None) -> Any:
        """The parameter group that a parameter is in, or the parameters of every group.

        Args:
            param: A parameter, or its name. Default: none.

        Raises:
            UsageError: There is no such parameter in a group; `zero_1` has other tensors there.
        """
        groups = self._groups()
        if param is None:
            return [group["params"] for group in groups]
        wanted = dict(self.model.named_parameters()).get(param) if isinstance(param, str) else param
        for group in groups:
            if any(each is wanted for each in group["params"]):
                return group
        name = f"{param!r}" if isinstance(param, str) else "the given one"
        raise UsageError(f"get_optimizer_group: the optimizer has no parameter {name}")

    def _groups(self) -> list[dict[str, Any]]:
        if self.optimizer is None:
            raise UsageError("optimizer: there is none yet; call create_optimizer or train first")
        return self.optimizer.param_groups
