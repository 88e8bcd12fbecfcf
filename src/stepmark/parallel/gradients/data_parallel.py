"""Reduces the gradients of a step to one mean, the same on every rank.

Phases of a step: `collect` after each backward pass, `reduce` once. The sums are fp32.

On eager devices with several data parallel ranks, gradients are summed in flat buckets and sent while the last backward
pass makes them. Otherwise, without accumulation, fp32 gradients stay where autograd put them; with it they are added to
persistent buffers, so that every micro-batch of a lazy device runs the same graph, and sent afterwards in a few large
buckets: each rank's mean is weighted by its target tokens, the buckets are summed, and the sum is divided by the tokens
of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from stepmark.parallel.buckets import LAZY_BUCKET_ELEMENTS, make_buckets
from stepmark.parallel.gradients.arithmetic import add_ends, add_partial, norms, squares
from stepmark.parallel.gradients.bucketed_gradients import BucketedGradients, add_ends_of_buckets, totals
from stepmark.parallel.gradients.hooks import GradientHooks, weakly
from stepmark.parallel.gradients.protocols import ReducedGradients
from stepmark.parallel.gradients.rank_weights import RankWeights
from stepmark.parallel.gradients.shown import show
from stepmark.runtime.collectives import GroupCollectives
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.replication import replication_of


def data_parallel_gradients(
    named: Sequence[tuple[str, nn.Parameter]],
    mesh: Mesh,
    *,
    accumulation: int,
    reduce_dtype: torch.dtype = torch.float32,
    bucket_elements: int | None = None,
) -> DataParallelGradients | OverlappedGradients:
    """The reducer of these parameters' gradients over one step of `accumulation` micro-batches: the same kind on all
    ranks, also on those of a pipeline stage that has no parameter to train. `reduce_dtype`: in which they are sent, on
    eager devices. `bucket_elements`: how many at a time; None: by the device."""
    if isinstance(mesh.data_parallel, GroupCollectives):
        return OverlappedGradients(named, mesh, reduce_dtype=reduce_dtype, bucket_elements=bucket_elements)
    parameters = [parameter for _, parameter in named]
    return DataParallelGradients(parameters, mesh, accumulation=accumulation, bucket_elements=bucket_elements)


class OverlappedGradients:
    """Gradients of `named` parameters on an eager device with several data parallel ranks. See `GradientReducer`."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        mesh: Mesh,
        *,
        reduce_dtype: torch.dtype = torch.float32,
        bucket_elements: int | None = None,
    ) -> None:
        assert isinstance(mesh.data_parallel, GroupCollectives)
        self._reduce_dtype = reduce_dtype
        self._mesh = mesh
        self._axis = mesh.data_parallel
        self._buckets = make_buckets(
            [named], mesh.data_parallel, mesh.tensor_parallel.size, mesh.runtime, bucket_elements, reordered=False
        )
        self._parameters = [parameter for _, parameter in named]
        position = {id(parameter): index for index, (_, parameter) in enumerate(named)}
        self._order = [position[id(member.parameter)] for bucket in self._buckets for member in bucket.members]
        self._bucketed = BucketedGradients(self._buckets, mesh, weakly(self._start), weigh_arriving=True)

    def begin(self, tokens: Tensor) -> None:
        """Announces the step, and this rank's tokens in it: the value that `reduce` will be given."""
        self._bucketed.begin(tokens)

    def last_backward(self) -> None:
        """Announces the step's last backward pass: buckets are sent as soon as their gradients are complete."""
        self._bucketed.last_backward()

    @torch.no_grad()
    def collect(self) -> None:
        """Adds what a backward pass left in `parameter.grad` to the sums."""
        self._bucketed.sums.collect_all()

    def collect_one(self, parameter: Tensor) -> None:
        """Does the same for one parameter whose gradient is complete."""
        self._bucketed.sums.collect(parameter)

    def collect_on_arrival(self) -> None:
        """They are, in any case."""

    @torch.no_grad()
    def reduce(self, loss: Tensor, tokens: Tensor) -> ReducedGradients:
        """The mean gradients (fp32, None where a parameter took no part on any rank), loss and token count over all
        ranks. `loss` (0-dim) is this rank's mean over its
        `tokens` (0-dim float32)."""
        means, total = self._bucketed.reduce(tokens)
        flat = add_ends_of_buckets(means, self._buckets, self._mesh)
        shards = [self._mesh.data_parallel.own_shard(each) for each in flat]  # of which each rank computes the norm
        used = self._mesh.runtime.place([torch.tensor(self._bucketed.sums.got(), dtype=torch.float32)])[0]
        loss, square, head = totals(shards, self._buckets, loss, tokens, self._mesh, used)
        return ReducedGradients(self._members_of(flat, head[1:]), loss, total, square.sqrt())

    def _members_of(self, flat: Sequence[Tensor], used: Tensor) -> list[Tensor | None]:
        """Views of each parameter's mean gradient, in the parameters' order; None where no rank has `used` it. A rank
        that has used all of them need not wait for the device to know."""
        own = self._bucketed.sums.got()
        anywhere = own if all(own) else [number > 0 for number in self._axis.read(used)]
        pairs = zip(self._buckets, flat, strict=True)
        found = [place for bucket, each in pairs for member in bucket.members for place in member.places_in(each)]
        ordered: list[Tensor | None] = [None] * len(found)
        for index, place, there in zip(self._order, found, anywhere, strict=True):
            ordered[index] = place if there else None
        return ordered

    def _start(self, number: int, weights: RankWeights) -> Callable[[], Tensor]:
        weighted = self._bucketed.sums.weighted(number, weights.factor())
        if self._reduce_dtype == weighted.dtype:
            return self._axis.start_all_reduce(weighted)
        return self._axis.start_all_reduce_in(self._reduce_dtype, weighted)

    def show(self, gradients: Sequence[Tensor | None]) -> Callable[[], None]:
        """Makes `parameter.grad` the mean gradients, those of parameters that other ranks update too."""
        return show(list(zip(self._parameters, gradients, strict=True)))

    @torch.no_grad()
    def reset(self) -> None:
        """Clears the sums for the next step."""
        self._bucketed.reset()

    def close(self) -> None:
        """Takes no gradients from now on."""
        self._bucketed.close()


class DataParallelGradients:
    """The gradients of `parameters` over one step of `accumulation` micro-batches. See `GradientReducer`."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        mesh: Mesh,
        *,
        accumulation: int,
        bucket_elements: int | None = None,
    ) -> None:
        self._parameters = list(parameters)
        self._bucket_elements = bucket_elements or LAZY_BUCKET_ELEMENTS
        self._mesh = mesh
        self._replications = [replication_of(parameter, mesh.tensor_parallel.size) for parameter in self._parameters]
        runtime = mesh.runtime
        in_fp32 = all(parameter.dtype == torch.float32 for parameter in self._parameters)
        self._sums: list[Tensor] | None = None
        self._hooks: GradientHooks | None = None
        self._index = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        if not in_fp32 or (runtime.lazy and accumulation > 1):
            zeros = [torch.zeros(parameter.shape, dtype=torch.float32) for parameter in self._parameters]
            self._sums = list(runtime.place(zeros))

    @torch.no_grad()
    def collect(self) -> None:
        """Adds what a backward pass left in `parameter.grad` to the sums."""
        if self._sums is not None:
            for parameter in self._parameters:
                self.collect_one(parameter)

    @torch.no_grad()
    def collect_one(self, parameter: Tensor) -> None:
        """Does the same for one parameter whose gradient is complete."""
        if self._sums is not None and parameter.grad is not None:
            self._sums[self._index[id(parameter)]].add_(parameter.grad)
            parameter.grad = None

    def collect_on_arrival(self) -> None:
        """From now on adds each gradient to the sums as soon as autograd has made it."""
        self._hooks = GradientHooks(self, self._parameters, DataParallelGradients._made)

    def _made(self, index: int) -> None:
        self.collect_one(self._parameters[index])

    def begin(self, tokens: Tensor) -> None:
        """Does nothing: tokens are sent with the gradients."""

    def last_backward(self) -> None:
        """Does nothing: complete gradients are sent in a few large buckets, after the last backward pass."""

    @torch.no_grad()
    def reduce(self, loss: Tensor, tokens: Tensor) -> ReducedGradients:
        """The mean gradients (fp32, None where a parameter took no part on a single rank), loss and token count over
        all ranks. `loss` (0-dim) is this rank's mean over its `tokens` (0-dim float32)."""
        found = self._sums if self._sums is not None else [parameter.grad for parameter in self._parameters]
        gradients = add_partial(found, self._replications, self._mesh)
        if self._mesh.data_parallel.size > 1:
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
        buckets = list(_buckets(weighted, self._bucket_elements))
        flat = [torch.cat([tensor.reshape(-1) for tensor in bucket]) for bucket in buckets]
        flat[0][2:] *= tokens  # loss and tokens at the bucket's head are weighted already
        for bucket in flat[1:]:
            bucket *= tokens
        reduced = self._mesh.data_parallel.all_reduce(flat[::-1])[::-1]  # the last layers' gradients come first
        total = reduced[0][1]
        divisor = total.clamp(min=1)
        sums = [each for bucket, values in zip(buckets, reduced, strict=True) for each in _split(values, bucket)]
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

    @torch.no_grad()
    def reset(self) -> None:
        """Clears the sums for the next step."""
        for parameter in self._parameters:
            parameter.grad = None
        for total in self._sums or ():
            total.zero_()

    def show(self, gradients: Sequence[Tensor | None]) -> Callable[[], None]:
        """Makes `parameter.grad` the mean gradients."""
        return show(list(zip(self._parameters, gradients, strict=True)))

    def close(self) -> None:
        """Takes no gradients from now on but in `collect`."""
        if self._hooks is not None:
            self._hooks.close()


def _buckets(tensors: Sequence[Tensor], limit: int) -> Iterator[list[Tensor]]:
    """Splits the sequence into runs of at most `limit` elements (more where one tensor has more)."""
    bucket: list[Tensor] = []
    elements = 0
    for tensor in tensors:
        if bucket and elements + tensor.numel() > limit:
            yield bucket
            bucket, elements = [], 0
        bucket.append(tensor)
        elements += tensor.numel()
    yield bucket


def _split(flat: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    sections = flat.split([tensor.numel() for tensor in like])
    for section, tensor in zip(sections, like, strict=True):
        yield section.view(tensor.shape)
