"""AdamW and SGD for lazy devices: torch's own classes, states and arithmetic, with every number that changes from step
to step in a device tensor.

A Python number that is 0 or 1 becomes a constant of the graph, so another graph is compiled: for a learning rate that
reaches 0, or a bias correction `1 - beta1**step` that rounds to 1 after some 350 steps. And torch's `capturable` AdamW
divides by the learning rate, which at 0 turns every weight that never had a gradient into NaN. So the host computes the
factors in float64, as torch does, and sends them as one small tensor per step. States exist from the start: if the
first step created them, the second step would be another graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _send(values: list[float], device: torch.device) -> tuple[Tensor, ...]:
    """The values as 0-dim float32 tensors on the device, in one transfer."""
    return torch.tensor(values, dtype=torch.float32).to(device).unbind()


def _zeros_like(parameter: Tensor) -> Tensor:
    """Zeros that are device data, not an operation of the first graph."""
    return torch.zeros(parameter.shape, dtype=parameter.dtype).to(parameter.device)


class LazyAdamW(torch.optim.AdamW):
    """Loshchilov and Hutter 2019, with torch.optim.AdamW's arguments, state names and formula."""

    elementwise = True

    def __init__(self, params: Any, **keywords: Any) -> None:
        super().__init__(params, **{**keywords, "foreach": False})  # it chooses kernels, which there are none of here
        for group in self.param_groups:
            for parameter in group["params"]:
                state: dict[str, Tensor] = {"step": torch.tensor(0.0)}
                state["exp_avg"] = _zeros_like(parameter)
                state["exp_avg_sq"] = _zeros_like(parameter)
                if group["amsgrad"]:
                    state["max_exp_avg_sq"] = _zeros_like(parameter)
                self.state[parameter] = state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            factors: dict[float, tuple[Tensor, ...]] = {}
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["step"] += 1
                count = state["step"].item()
                if count not in factors:
                    factors[count] = _send(self._factors(group, count), parameter.device)
                self._update(parameter, state, group, factors[count])

    @staticmethod
    def _factors(group: dict[str, Any], count: float) -> list[float]:
        beta1, beta2 = group["betas"]
        step_size = group["lr"] / (1 - beta1**count)
        return [1 - group["lr"] * group["weight_decay"], step_size, (1 - beta2**count) ** 0.5]

    @staticmethod
    def _update(
        parameter: Tensor, state: dict[str, Tensor], group: dict[str, Any], factors: tuple[Tensor, ...]
    ) -> None:
        keep, step_size, correction = factors
        beta1, beta2 = group["betas"]
        gradient = -parameter.grad if group["maximize"] else parameter.grad  # type: ignore[operator]
        assert gradient is not None
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        second = state["exp_avg_sq"]
        if group["amsgrad"]:
            second = state["max_exp_avg_sq"].copy_(torch.maximum(state["max_exp_avg_sq"], second))
        denominator = (second.sqrt() / correction).add_(group["eps"])
        parameter.mul_(keep).sub_(step_size * (state["exp_avg"] / denominator))


class LazySGD(torch.optim.SGD):
    """torch.optim.SGD: momentum (Sutskever et al. 2013), Nesterov, weight decay. No dampening: it does not
    apply to the first step, so the second would be another graph."""

    elementwise = True

    def __init__(self, params: Any, **keywords: Any) -> None:
        super().__init__(params, **{**keywords, "foreach": False})
        if any(group["dampening"] for group in self.param_groups):
            raise ValueError("dampening is not supported on lazy devices")
        for group in self.param_groups:
            for parameter in group["params"] if group["momentum"] else ():
                self.state[parameter] = {"momentum_buffer": _zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if trained:
                (rate,) = _send([group["lr"]], trained[0].device)
            for parameter in trained:
                self._update(parameter, group, rate)

    def _update(self, parameter: Tensor, group: dict[str, Any], rate: Tensor) -> None:
        gradient = -parameter.grad if group["maximize"] else parameter.grad  # type: ignore[operator]
        assert gradient is not None
        if group["weight_decay"]:
            gradient = gradient.add(parameter, alpha=group["weight_decay"])
        if group["momentum"]:
            buffer = self.state[parameter]["momentum_buffer"]
            buffer.mul_(group["momentum"]).add_(gradient)
            gradient = gradient.add(buffer, alpha=group["momentum"]) if group["nesterov"] else buffer
        parameter.sub_(rate * gradient)


def lazy_class(kind: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """The class to use on a lazy device instead of torch's; other classes are used as they are."""
    return {torch.optim.AdamW: LazyAdamW, torch.optim.SGD: LazySGD}.get(kind, kind)
