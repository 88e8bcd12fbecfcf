"""Gradients of one step on an eager device: summed in buckets, and averaged over the data parallel ranks while the last
backward pass makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from stepmark.errors import UsageError
from stepmark.parallel.buckets import Bucket
from stepmark.parallel.gradients.arithmetic import add_ends, squares
from stepmark.parallel.gradients.hooks import weakly
from stepmark.parallel.gradients.overlap import OverlappedReduction
from stepmark.parallel.gradients.rank_weights import RankWeights
from stepmark.parallel.gradients.sums import GradientSums
from stepmark.runtime.collectives import GroupCollectives
from stepmark.runtime.mesh import Mesh

Finish = Callable[[], Tensor]
Start = Callable[[int, RankWeights], Finish]


class BucketedGradients:
    """The phases of `GradientReducer` that plain data parallelism and ZeRO-1 have in common.

    Args:
        buckets: Parameters in the order of the model.
        mesh: The mesh.
        start: Starts the reduction of one bucket's sums, given its number, to their mean by the ranks' weights.
        weigh_arriving: Whether gradients are multiplied by this rank's weight on their way into the bucket, so that
            `start` asks for `sums.weighted`.

    Attributes:
        sums: The gradients.
    """

    def __init__(self, buckets: Sequence[Bucket], mesh: Mesh, start: Start, *, weigh_arriving: bool = False) -> None:
        self._buckets = list(buckets)
        self._mesh = mesh
        self._axis = mesh.data_parallel
        self._start = start
        self._weigh_arriving = weigh_arriving
        self._weights: RankWeights | None = None
        self._overlap: OverlappedReduction | None = None
        if isinstance(self._axis, GroupCollectives):
            self._overlap = OverlappedReduction(self._buckets, self._axis, mesh.runtime.device, weakly(self._send))
        self.sums = GradientSums(self._buckets, mesh.runtime, weakly(self._arrived))
        self._sent_versions: dict[int, int] = {}  # of the sums when they were sent, by bucket

    def _arrived(self, number: int, position: int) -> None:
        if self._overlap is not None:
            self._overlap.arrived(number, position)

    def begin(self, tokens: Tensor) -> None:
        """Tells the other ranks this one's target tokens in the step. Optional."""
        self.sums.hooks.check()
        self.sums.hooks.come_last()
        if isinstance(self._axis, GroupCollectives):
            self._weights = RankWeights(tokens, self._axis)

    def last_backward(self) -> None:
        """Sends each bucket as soon as its gradients are complete; `begin` comes before."""
        if self._overlap is not None:
            assert self._weights is not None, "begin() was not called"
            self._overlap.begin()
            if self._weigh_arriving:
                self.sums.weigh_arriving(self._weights.factor(), self._overlap.independent)

    @torch.no_grad()
    def reduce(self, tokens: Tensor) -> tuple[list[Tensor], Tensor]:
        """The mean of each bucket, weighted by tokens, as `start` has reduced it, and the tokens of all ranks.

        Raises UsageError where gradients were changed after they were sent, which would have no effect."""
        self.sums.hooks.check()
        self._check_unchanged()
        self._add_partial()
        if self._overlap is None:
            return [self.sums.complete(number) for number in range(len(self._buckets))], tokens
        if self._weights is None:
            self.begin(tokens)
        assert self._weights is not None
        return self._overlap.finish(), self._weights.total()

    def _add_partial(self) -> None:
        """Completes the gradients of which tensor parallel neighbours have a part each."""
        partial: dict[int, list[int]] = {}
        for number, bucket in enumerate(self._buckets):
            if bucket.replication.partial and bucket.replication.count > 1:
                partial.setdefault(bucket.replication.count, []).append(number)
        for count, numbers in sorted(partial.items()):
            flat = [self.sums.complete(number) for number in numbers]
            for own, total in zip(flat, self._mesh.replicas(count).all_reduce(flat), strict=True):
                if total is not own:
                    own.copy_(total)

    @torch.no_grad()
    def _send(self, number: int) -> Finish:
        assert self._weights is not None
        finish = self._start(number, self._weights)
        self._sent_versions[number] = self.sums.flat[number]._version
        return finish

    def _check_unchanged(self) -> None:
        if any(self.sums.flat[number]._version != version for number, version in self._sent_versions.items()):
            raise UsageError(
                "gradients were changed after the backward pass that last_backward() announced, which has sent them; "
                "change them in hooks of the parameters (register_hook), or leave out last_backward()"
            )

    def close(self) -> None:
        """Takes no gradients from now on."""
        self.sums.hooks.close()

    def reset(self) -> None:
        """Forgets the sums, for the next step."""
        self._sent_versions.clear()
        if self._overlap is not None:
            self._overlap.drop()
        self._weights = None
        self.sums.reset()


def add_ends_of_buckets(shards: list[Tensor], buckets: Sequence[Bucket], mesh: Mesh) -> list[Tensor]:
    """Sums what is of tables that both ends of a pipeline use: buckets of their own, or shards of them, divided
    alike."""
    found = add_ends(shards, [bucket.replication for bucket in buckets], mesh)
    return [shard for shard in found if shard is not None]


def totals(
    shards: Sequence[Tensor], buckets: Sequence[Bucket], loss: Tensor, tokens: Tensor, mesh: Mesh, *more: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss over the tokens of all ranks, 0 where there are none; the sum of squares of the shards over all
    ranks; and the tokens, followed by `more` numbers (vectors), summed over the data parallel ranks."""
    sums = squares(shards, [bucket.replication.copies for bucket in buckets], mesh.runtime.device)
    head = torch.cat([(loss.float() * tokens).reshape(1), sums, tokens.reshape(1), *more])
    (heads,) = mesh.data_parallel.all_reduce([head])
    (square,) = mesh.tensor_parallel.all_reduce([heads[1:2]])
    (both,) = mesh.pipeline.all_reduce([torch.cat([heads[:1], square])])  # only the last stage has a loss
    return both[0] / heads[2].clamp(min=1), both[1], heads[2:]
