"""ZeRO-1: every data parallel rank keeps the optimizer state of one shard of the parameters, and updates that shard.

Rajbhandari et al. 2020, stage 1. The parameters of a group are concatenated in buckets, each sharded evenly over the
ranks. The optimizer works on this rank's shard of each bucket, a flat tensor, so it can be any elementwise optimizer.
Per bucket and step there is one reduce-scatter of gradients and one all-gather of parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stepmark.errors import UsageError
from stepmark.parallel.buckets import Bucket, Member, for_each_axis, make_buckets, shard_on_host
from stepmark.parallel.gradients.accumulators import BucketAccumulator, ParameterAccumulator
from stepmark.parallel.gradients.exchange import ReduceScatter
from stepmark.parallel.gradients.reduced import Used
from stepmark.parallel.gradients.reducer import GradientReducer
from stepmark.parallel.optimizer.named import Groups, OptimizerSharding, OptimizerTensor
from stepmark.parallel.optimizer.pending_gathers import PendingGathers
from stepmark.parallel.optimizer.replicated import WrittenParameters, follow
from stepmark.runtime.collectives import eager
from stepmark.runtime.mesh import Mesh
from stepmark.sharding.layout import Layout


class _Piece(NamedTuple):
    """What the optimizer holds of a bucket's shard: a part of it, with elements of some members."""

    held: OptimizerTensor
    bucket: int
    part: slice
    members: Sequence[Member]


class FlatShards(OptimizerSharding):
    """This rank's shard of each bucket: parameter by parameter, so that one without a gradient is left out as torch
    does, and on a lazy device, where the cuts are data, as one tensor. Where parameters are not fp32, the shards are
    fp32 master weights, which are saved. The complete state is never materialized.
    """

    divided_by: str | None = "zero_1"

    def __init__(self, groups: Groups, mesh: Mesh, *, bucket_elements: int | None = None) -> None:
        self._runtime = mesh.runtime
        self.buckets = make_buckets([group["params"] for group in groups], mesh, bucket_elements)
        own = [[bucket for bucket in self.buckets if bucket.group == number] for number in range(len(groups))]
        super().__init__([{"params": [(m.name, m.parameter) for b in same for m in b.members]} for same in own])
        self.separate = not self._runtime.lazy
        if self.separate:
            _check_memory(self.names, self.parameters)
        self._flat = [self._lay_out(bucket) for bucket in self.buckets]
        self._shards = [self._shard(number, bucket) for number, bucket in enumerate(self.buckets)]
        self._pieces = [piece for number in range(len(self.buckets)) for piece in self._hold(number)]
        self.held = [piece.held for piece in self._pieces]
        self._masks: dict[tuple[int, tuple[bool, ...]], Tensor] = {}
        members = [[member.parameter for member in bucket.members] for bucket in self.buckets]
        self._written = [WrittenParameters(parameters, self._runtime) for parameters in members]
        self.gathers = PendingGathers(members)
        self.place = {
            "mesh": mesh.shape,
            "rank": mesh.context.world.rank,
            "buckets": [[member.name for member in bucket.members] for bucket in self.buckets],
            "shard_sizes": [bucket.shard_size for bucket in self.buckets],
        }

    @torch.no_grad()
    def _lay_out(self, bucket: Bucket) -> Tensor | None:
        """On an eager device, makes the parameters views of one flat tensor, so that shards are sent and received
        without a copy. Every Parameter stays the same object. One whose elements have another order in the bucket keeps
        its own memory."""
        if self._runtime.lazy:
            return None
        flat = torch.zeros(bucket.padded, dtype=bucket.dtype, device=self._runtime.device)
        for member in bucket.members:
            member.write(member.parameter, flat)
            if member.in_order:
                member.parameter.data = member.places_in(flat)[0]
        return flat

    def _shard(self, number: int, bucket: Bucket) -> Tensor:
        """The rank's shard: fp32, `bucket.shard_size` elements."""
        flat, begin = self._flat[number], bucket.begin
        if flat is not None and bucket.dtype == torch.float32:
            return flat[begin : begin + bucket.shard_size]
        return self._runtime.place(shard_on_host(bucket, self._runtime))

    def _hold(self, number: int) -> Iterator[_Piece]:
        bucket, shard = self.buckets[number], self._shards[number]
        master = bucket.dtype != torch.float32
        here = {id(member): layout for member, layout in bucket.local_layouts()}
        if not self.separate:
            members = tuple((m.name, here.get(id(m), Layout(tuple(m.parameter.shape), ()))) for m in bucket.members)
            # No other tensor keeps the memory that an update gives up.
            self._shards[number] = whole = nn.Parameter(shard)
            held = OptimizerTensor(whole, bucket.group, members, master, key=number)
            yield _Piece(held, number, slice(None), bucket.members)
        for member in bucket.members if self.separate else ():
            begin, end = (min(max(at - bucket.begin, 0), bucket.shard_size) for at in (member.begin, member.end))
            if layout := here.get(id(member)):
                parts = (part._replace(at=max(part.at - begin, 0)) for part in layout.parts if isinstance(part.at, int))
                layout = layout._replace(parts=tuple(parts))
                held = OptimizerTensor(
                    nn.Parameter(shard[begin:end]), bucket.group, ((member.name, layout),), master, member.name
                )
                yield _Piece(held, number, slice(begin, end), [member])

    def gradients(
        self, mesh: Mesh, *, accumulation: int, reduce_dtype: torch.dtype | None, on_arrival: bool
    ) -> GradientReducer:
        sums: BucketAccumulator | ParameterAccumulator
        if mesh.runtime.lazy:
            options: dict[str, Any] = {"accumulation": accumulation, "on_arrival": on_arrival, "watched": True}
            sums = ParameterAccumulator(self.parameters, mesh.runtime, **options)
        else:
            sums = BucketAccumulator(self.buckets, mesh.runtime, mesh.ranks, sent=lambda dtype: reduce_dtype or dtype)
        sums.reset()
        return GradientReducer(sums, ReduceScatter(self.buckets, mesh, reduce_dtype=reduce_dtype), mesh)

    def assigned(self, gradients: Sequence[Tensor | None], used: Used | None) -> list[Tensor | None]:
        """`gradients`: fp32, of each bucket's shard; `used`: of each bucket's members."""
        there = dict(zip(self.names, used or [True] * len(self.names), strict=True))
        self.masked = []
        return [self._assigned(piece, gradients[piece.bucket], there) for piece in self._pieces]

    def _assigned(self, piece: _Piece, gradient: Tensor | None, used: Mapping[str, bool | Tensor]) -> Tensor | None:
        found = [used[member.name] for member in piece.members]
        if gradient is None or not any(isinstance(each, Tensor) or each for each in found):
            return None
        if not self.separate and not all(found):  # known on the host, since it has made the graph
            self.masked.append((piece.held, self._mask(piece.bucket, tuple(map(bool, found)))))
        elif isinstance(found[0], Tensor):
            self.masked.append((piece.held, found[0]))
        return gradient[piece.part]

    def _mask(self, number: int, used: tuple[bool, ...]) -> Tensor:
        """Which elements of this rank's shard belong to parameters that were used."""
        if (number, used) not in self._masks:
            bucket = self.buckets[number]
            flat = torch.zeros(bucket.padded, dtype=torch.bool)
            for member, there in zip(bucket.members, used, strict=True):
                flat[member.begin : member.end] = there
            self._masks[number, used] = self._runtime.place(flat[bucket.begin : bucket.begin + bucket.shard_size])
        return self._masks[number, used]

    def follow(self) -> None:
        """Shards that have memory of their own get the values of parameters that the script has written."""
        for shard, bucket, flat, written in zip(self._shards, self.buckets, self._flat, self._written, strict=True):
            if flat is not None:
                _attach(bucket, flat)
                if flat.dtype != shard.dtype:
                    follow(shard, bucket.axis.own_shard(flat))
            elif written.found():
                (own,) = self._runtime.to_host([shard])
                self._runtime.write(shard, follow(own, shard_on_host(bucket, self._runtime).to(bucket.dtype)))

    def publish(self) -> None:
        """All-gathers the shards. On an eager device in place, in the flat tensors of which the parameters are views:
        all of them are on their way at once, the first layer's first."""
        if self._runtime.lazy:
            pairs = zip(self.buckets, self.held, strict=True)
            sent = [held.tensor.detach().to(bucket.dtype) for bucket, held in pairs]
            gathered = for_each_axis("all_gather", self.buckets, sent)
            for bucket, flat, written in zip(self.buckets, gathered, self._written, strict=True):
                for member in bucket.members:
                    member.read_from(flat)
                written.forget()
            return
        complete = [flat for flat in self._flat if flat is not None]
        axes = [bucket.axis for bucket in self.buckets]
        for axis, flat, shard in zip(axes, complete, self._shards, strict=True):
            if flat.dtype != shard.dtype:
                axis.own_shard(flat).copy_(shard)
        started = [eager(axis).start_gather_in_place(flat) for axis, flat in zip(axes, complete, strict=True)]
        self.gathers.start({number: partial(self._arrived, number, wait) for number, wait in enumerate(started)})

    def _arrived(self, number: int, wait: Callable[[], Tensor]) -> None:
        flat = wait()
        for member in self.buckets[number].members:
            if not member.in_order:
                member.read_from(flat)


def _check_memory(names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
    """Raises UsageError where two parameters have the same memory, which the buckets would part."""
    seen: dict[Any, str] = {}
    for name, parameter in zip(names, parameters, strict=True):
        if parameter.numel():
            first = seen.setdefault((parameter.untyped_storage()._cdata, parameter.storage_offset()), name)
            if first != name:
                raise UsageError(
                    f"zero_1: {first} and {name} are two parameters in the same memory, which it would part; tie them "
                    "as one parameter (head.weight = table.weight)"
                )


def _attach(bucket: Bucket, flat: Tensor) -> None:
    """Makes the parameters views of the bucket's flat tensor again where the script has given one other memory, such as
    by `parameter.data = …`."""
    memory = flat.untyped_storage()._cdata
    for member in bucket.members:
        tensor, begin = member.parameter, flat.storage_offset() + member.begin
        here = tensor.untyped_storage()._cdata == memory and tensor.storage_offset() == begin
        if not member.in_order:
            member.write(tensor, flat)  # it always has memory of its own
        elif not here or not tensor.is_contiguous():
            (place,) = member.places_in(flat)
            place.copy_(tensor.detach().clone())  # it may be another view of the same memory
            tensor.data = place
