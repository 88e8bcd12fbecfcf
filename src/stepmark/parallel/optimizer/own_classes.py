"""Optimizer classes of our own: AdamW and SGD for lazy devices, Muon together with AdamW, AdamW with a state of 8 bits.

The lazy ones are torch's classes, states and arithmetic, with every number that changes from step to step in a device
tensor. A Python number that is 0 or 1 becomes a constant of the graph, so another graph is compiled: for a learning
rate that reaches 0, or a bias correction `1 - beta1**step` that rounds to 1 after some 350 steps. And torch's
`capturable` AdamW divides by the learning rate, which at 0 turns every weight that never had a gradient into NaN. So
the host computes the factors in float64, as torch does, and sends them as one small tensor per step. States exist from
the start: if the first step created them, the second step would be another graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from stepmark.errors import UsageError


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
                zeros = {name: _zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                if group["amsgrad"]:
                    zeros["max_exp_avg_sq"] = _zeros_like(parameter)
                self.state[parameter] = {"step": torch.tensor(0.0), **zeros}

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


BY_MUON = {"muon": True}
BY_ADAMW = {"muon": False}


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` (Jordan et al. 2024) over the groups with `"muon": True`, whose parameters are matrices, and
    `torch.optim.AdamW` over the others. Both work on the groups and the state of this optimizer.

    `lr` and `weight_decay` (decoupled) are those of both, `betas` and `eps` AdamW's, and what follows Muon's.
    `adjust_lr_fn`: how Muon scales its learning rate by a matrix's shape: `match_rms_adamw` (updates as long as
    AdamW's, so that one learning rate serves both; Liu et al. 2025) or `original`.
    """

    per_parameter = True

    @staticmethod
    def elementwise_group(group: Mapping[str, Any]) -> bool:
        """Whether its parameters are AdamW's."""
        return not group["muon"]

    def __init__(
        self,
        params: Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        adjust_lr_fn: str = "match_rms_adamw",
    ) -> None:
        groups = [dict(group) for group in params]
        common: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        matrices, others = _split(groups)
        self._parts: list[torch.optim.Optimizer] = []  # they fill in what their groups lack
        if matrices:
            scaled: dict[str, Any] = {"nesterov": nesterov, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
            self._parts.append(torch.optim.Muon(matrices, momentum=momentum, **scaled, **common))
        if others:
            self._parts.append(torch.optim.AdamW(others, betas=betas, eps=eps, **common))
        super().__init__(groups, common)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all parameters that have gradients; returns what `closure` returns, which computes these again."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        own = [groups for groups in _split(self.param_groups) if groups]  # load_state_dict() makes new ones
        for part, groups in zip(self._parts, own, strict=True):
            part.state, part.param_groups = self.state, groups
            part.step()
        return result


def _split(groups: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Muon's groups, and AdamW's."""
    return [group for group in groups if group["muon"]], [group for group in groups if not group["muon"]]


# What a parameter group says of its state. Tensors of fewer than `min_8bit_size` elements have 32 bits in any case.
EIGHT_BITS = {"optim_bits": 8}
FULL_PRECISION = {"optim_bits": 32}


@cache
def adamw_8bit_class() -> type[torch.optim.Optimizer]:
    """`bitsandbytes.optim.AdamW8bit` (Dettmers et al. 2022) whose groups say how many bits the state has:
    EIGHT_BITS or FULL_PRECISION.

    bitsandbytes' own way of saying that is a table for the whole process by the parameters' `id`, which another tensor
    may get later. Raises UsageError where it cannot be loaded here.
    """
    try:
        from bitsandbytes.optim import AdamW8bit
    except (ImportError, OSError, RuntimeError) as error:
        raise UsageError(f"optim: adamw_8bit needs bitsandbytes, which cannot be loaded: {error}") from error

    class GroupedAdamW8bit(AdamW8bit):
        per_parameter = True

        @staticmethod
        def elementwise_group(group: Mapping[str, Any]) -> bool:
            """Whether no block of 8 bits is scaled by its largest element."""
            return group.get("optim_bits") == FULL_PRECISION["optim_bits"]

        def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
            config: dict[str, Any] = super().get_config(gindex, pindex, group)
            return {**config, "optim_bits": group.get("optim_bits", config["optim_bits"])}

    return GroupedAdamW8bit
