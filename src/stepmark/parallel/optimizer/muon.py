"""Muon for the matrices of hidden layers and AdamW for everything else, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

MUON = {"muon": True}
NOT_MUON = {"muon": False}


class MuonAdamW(torch.optim.Optimizer):
    """`torch.optim.Muon` (Jordan et al. 2024) over the groups with `"muon": True`, whose parameters are matrices, and
    `torch.optim.AdamW` over the others. Both work on the groups and the state of this optimizer.

    Args:
        params: Groups, each with a bool `muon`.
        lr: Learning rate of both.
        weight_decay: Decoupled weight decay of both.
        betas: Of AdamW.
        eps: Of AdamW.
        momentum: Of Muon.
        nesterov: Of Muon.
        ns_steps: Steps of Muon's Newton-Schulz iteration.
        adjust_lr_fn: How Muon scales its learning rate by a matrix's shape: `match_rms_adamw` (updates as long as
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
