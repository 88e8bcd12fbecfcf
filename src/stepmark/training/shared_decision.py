"""Which labels are targets, where a call shows it, on ranks that call the model together.

Where layers communicate among data parallel ranks, a call that only some of them make meets other collectives of the
others: of a rank without targets nothing shows which labels are targets, and it would not make that call.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from stepmark.data.loader.batch import MicroBatch
from stepmark.runtime.mesh import Mesh
from stepmark.training.weighted_loss import MicroBatchLoss


class SharedDecision:
    """What the ranks ask for and decide together; with `together` off each rank does so alone. Its methods are called
    on all of these ranks alike, until `made`.

    Attributes:
        made: Whether nothing is to be decided any more, on any rank.
    """

    def __init__(self, loss: MicroBatchLoss, mesh: Mesh, *, together: bool) -> None:
        self._loss = loss
        self._runtime = mesh.runtime
        self._host = mesh.context.host if together else None
        self.made = False

    def along(self, micro_batch: MicroBatch) -> Tensor | None:
        """The targets of a batch of which a call shows nothing; see `MicroBatchLoss.call_first`."""
        if self._asks(micro_batch):
            return None
        return self._runtime.numbers([self._loss.count(micro_batch)]).reshape(())

    def _asks(self, micro_batch: MicroBatch) -> bool:
        """Whether only a call shows which labels of this batch are targets, and this one does."""
        return bool(micro_batch.targets) and self._loss.undecided(micro_batch.inputs)

    def first(self, micro_batches: Sequence[MicroBatch]) -> int | None:
        """The micro-batch that all ranks have to call before their targets are counted, by number; None for none."""
        own = next((number for number, each in enumerate(micro_batches) if self._asks(each)), None)
        if self._host is None:
            return own
        open_ = any(self._loss.undecided(each.inputs) for each in micro_batches)
        found = self._host.all_gather((own, open_, self._loss.labels.causal_shift))
        if self._adopt([known for *_, known in found]):
            return None
        self.made = not any(each for _, each, _ in found)
        return min((number for number, *_ in found if number is not None), default=None)

    def conclude(self) -> None:
        """After the call."""
        if self._host is not None:
            self._adopt(self._host.all_gather(self._loss.labels.causal_shift))

    def _adopt(self, decisions: Sequence[bool | None]) -> bool:
        """What one rank has found counts on all; of several, what is no guess."""
        known = {each for each in decisions if each is not None}
        if known:
            guess = self._loss.guess
            self._loss.decide(guess if known == {guess} else not guess)
            self.made = True
        return self.made
