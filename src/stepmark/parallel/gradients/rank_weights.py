"""How much each data parallel rank's gradients count in a step: by its target tokens."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from stepmark.runtime.collectives import GroupCollectives


class RankWeights:
    """The ranks' shares of a step's target tokens. What they have to tell each other is on its way from the start.

    Args:
        tokens: This rank's target tokens, a 0-dim float32 tensor on the device.
        axis: The data parallel axis.
    """

    def __init__(self, tokens: Tensor, axis: GroupCollectives) -> None:
        self._rank = axis.rank
        self._finish: Callable[[], Tensor] | None = axis.start_all_gather(tokens.reshape(1))
        self._tokens = tokens
        self._on_host: list[float] | None = None

    def own(self) -> Tensor:
        """This rank's share: a 0-dim float32 tensor on the device."""
        return self._shares()[self._rank]

    def factor(self) -> Tensor | float:
        """This rank's share, as a number where that is known without waiting for the device."""
        known = self._tokens.device.type == "cpu" and not is_fake(self._tokens)
        return self.on_host()[self._rank] if known else self.own()

    def on_host(self) -> list[float]:
        """The share of each rank; waits for the device."""
        if self._on_host is None:
            self._on_host = [float(share) for share in self._shares().tolist()]
        return self._on_host

    def total(self) -> Tensor:
        """The tokens of all ranks: a 0-dim float32 tensor on the device."""
        return self._all().sum()

    def _shares(self) -> Tensor:
        """Zeros in a step without any target."""
        return self._all() / self.total().clamp(min=1)

    def _all(self) -> Tensor:
        if self._finish is not None:
            self._tokens, self._finish = self._finish(), None
        return self._tokens
