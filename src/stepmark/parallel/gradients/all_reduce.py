"""Mean gradients of complete parameters on every rank: their sums are all-reduced over the data parallel ranks.

From tensors they are sent after the last backward pass in a few large buckets: each rank's mean is weighted by its
target tokens, the buckets are summed, and the sum is divided by the tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from stepmark.parallel.buckets import LAZY_BUCKET_ELEMENTS, runs_of
from stepmark.parallel.gradients.arithmetic import add_ends, add_ends_of_buckets, add_partial, norms, squares, totals
from stepmark.parallel.gradients.flat_sums import FlatSums
from stepmark.parallel.gradients.rank_weights import RankWeights
from stepmark.parallel.gradients.reduced import ReducedGradients, show
from stepmark.parallel.gradients.tensor_sums import TensorSums
from stepmark.runtime.collectives import GroupCollectives
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.replication import replication_of


class AllReduce:
    """Means of `parameters`, None where one took no part on any rank. See `Exchange`.

    Args:
        parameters: All of them, in the order of the result.
        mesh: The mesh.
        reduce_dtype: In which flat buckets are sent.
        bucket_elements: How many elements of tensors are sent at a time.
    """

    weighs_arriving = True

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        mesh: Mesh,
        *,
        reduce_dtype: torch.dtype = torch.float32,
        bucket_elements: int | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self._mesh = mesh
        self._axis = mesh.data_parallel
        self._reduce_dtype = reduce_dtype
        self._bucket_elements = bucket_elements or LAZY_BUCKET_ELEMENTS
        self._replications = [replication_of(parameter, mesh.tensor_parallel.size) for parameter in self._parameters]

    def start(self, sums: FlatSums, number: int, weights: RankWeights) -> Callable[[], Tensor]:
        assert isinstance(self._axis, GroupCollectives)
        weighted = sums.weighted(number, weights.factor())
        if self._reduce_dtype == weighted.dtype:
            return self._axis.start_all_reduce(weighted)
        return self._axis.start_all_reduce_in(self._reduce_dtype, weighted)

    def reduced(self, sums: FlatSums, means: list[Tensor], loss: Tensor, tokens: Tensor) -> ReducedGradients:
        flat = add_ends_of_buckets(means, sums.buckets, self._mesh)
        shards = [self._axis.own_shard(each) for each in flat]  # of which each rank computes the norm
        used = self._mesh.runtime.place([torch.tensor(sums.got(), dtype=torch.float32)])[0]
        loss, square, head = totals(shards, sums.buckets, loss, tokens, self._mesh, used)
        return ReducedGradients(self._members_of(sums, flat, head[1:]), loss, head[0], square.sqrt())

    def _members_of(self, sums: FlatSums, flat: Sequence[Tensor], used: Tensor) -> list[Tensor | None]:
        """Views of each parameter's mean gradient, in the parameters' order; None where no rank has `used` it. A rank
        that has used all of them need not wait for the device to know."""
        own = sums.got()
        assert isinstance(self._axis, GroupCollectives)
        anywhere = own if all(own) else [number > 0 for number in self._axis.read(used)]
        pairs = zip(sums.buckets, flat, strict=True)
        members = [(member, each) for bucket, each in pairs for member in bucket.members]
        found = {
            id(member.parameter): member.read(each)
            for (member, each), there in zip(members, anywhere, strict=True)
            if there
        }
        return [found.get(id(parameter)) for parameter in self._parameters]

    def at_once(self, sums: TensorSums, loss: Tensor, tokens: Tensor) -> ReducedGradients:
        gradients = add_partial(sums.tensors(), self._replications, self._mesh)
        if self._axis.size > 1:
            gradients, loss, tokens = self._mean(gradients, loss, tokens)
        gradients = add_ends(gradients, self._replications, self._mesh)
        norm, loss = self._norm(gradients, loss)
        return ReducedGradients(gradients, loss, tokens, norm)

    def _mean(
        self, gradients: Sequence[Tensor | None], loss: Tensor, tokens: Tensor
    ) -> tuple[list[Tensor | None], Tensor, Tensor]:
        """Over the data parallel ranks, weighted by their tokens."""
        complete = [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(self._parameters, gradients, strict=True)
        ]
        weighted = [loss.float() * tokens, tokens, *complete]
        runs = [
            weighted[run.start : run.stop]
            for run in runs_of([each.numel() for each in weighted], self._bucket_elements)
        ]
        flat = [torch.cat([tensor.reshape(-1) for tensor in run]) for run in runs]
        flat[0][2:] *= tokens  # loss and tokens at its head are weighted already
        for each in flat[1:]:
            each *= tokens
        reduced = self._axis.all_reduce(flat[::-1])[::-1]  # the last layers' gradients come first
        total = reduced[0][1]
        divisor = total.clamp(min=1)
        sums = [each for run, values in zip(runs, reduced, strict=True) for each in _split(values, run)]
        return [each / divisor for each in sums[2:]], sums[0] / divisor, total

    def _norm(self, gradients: Sequence[Tensor | None], loss: Tensor) -> tuple[Tensor, Tensor]:
        """The 2-norm of the complete model's gradient, of which every element counts once, however many ranks hold it,
        and the loss, which only the last stage of a pipeline has: elsewhere it is 0."""
        present = [gradient for gradient in gradients if gradient is not None]
        if self._mesh.tensor_parallel.size == self._mesh.pipeline.size == 1:
            return torch.linalg.vector_norm(torch.stack(norms(present))) if present else torch.zeros(()), loss
        pairs = zip(self._replications, gradients, strict=True)
        copies = [replication.copies for replication, gradient in pairs if gradient is not None]
        square = squares(present, copies, self._mesh.runtime.device)
        (square,) = self._mesh.tensor_parallel.all_reduce([square])
        if self._mesh.pipeline.size > 1:
            (both,) = self._mesh.pipeline.all_reduce([torch.cat([square, loss.float().reshape(1)])])
            square, loss = both[0], both[1]
        return square.reshape(()).sqrt(), loss

    def show(self, sums: FlatSums | TensorSums, gradients: Sequence[Tensor | None]) -> Callable[[], None]:
        return show(list(zip(self._parameters, gradients, strict=True)))


def _split(flat: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    sections = flat.split([tensor.numel() for tensor in like])
    for section, tensor in zip(sections, like, strict=True):
        yield section.view(tensor.shape)
