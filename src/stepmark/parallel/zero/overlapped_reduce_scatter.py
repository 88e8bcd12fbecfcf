"""Reduce-scatters gradients while the backward pass that computes them is still running.

All ranks send the buckets in the same order: in the first pass from the last bucket to the first, afterwards in the
order in which the buckets were complete in the first pass, averaged over the ranks, so that no bucket waits long for
another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from stepmark.errors import UsageError
from stepmark.parallel.zero.sharded_buckets import Bucket
from stepmark.runtime.collectives import GroupCollectives


class OverlappedReduceScatter:
    """Overlaps communication with one backward pass at a time, from `begin` to `finish`.

    `collect` adds the gradient of one parameter to its bucket. `send` starts the reduce-scatter of one bucket and
    returns a function that waits for this rank's shard.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        axis: GroupCollectives,
        collect: Callable[[Tensor], None],
        send: Callable[[int], Callable[[], Tensor]],
    ) -> None:
        self._buckets = list(buckets)
        self._axis = axis
        self._collect = collect
        self._send = send
        self._number = {id(m.parameter): number for number, b in enumerate(self._buckets) for m in b.members}
        self._order = [number for number in reversed(range(len(self._buckets))) if self._is_independent(number)]
        self._learned = False
        self._hooks: list[RemovableHandle] = []
        self._missing: list[int] = []
        self._completed: list[int] = []
        self._sent: dict[int, Callable[[], Tensor]] = {}

    @property
    def running(self) -> bool:
        return bool(self._hooks)

    def _is_independent(self, number: int) -> bool:
        """Whether a bucket can be sent without a reduction over tensor parallel neighbours first."""
        replication = self._buckets[number].replication
        return not replication.partial or replication.count == 1

    def begin(self) -> None:
        self._missing = [len(bucket.members) for bucket in self._buckets]
        self._completed, self._sent = [], {}
        parameters = [member.parameter for bucket in self._buckets for member in bucket.members]
        self._hooks = [parameter.register_post_accumulate_grad_hook(self._arrived) for parameter in parameters]

    def _arrived(self, parameter: Tensor) -> None:
        number = self._number[id(parameter)]
        if number in self._sent:
            raise UsageError(
                "a backward pass ran after the one that last_backward() announced as the step's last, and its "
                "gradients would be lost; call last_backward() before the last one"
            )
        self._collect(parameter)
        self._missing[number] -= 1
        if not self._missing[number]:
            self._completed.append(number)
        for waiting in self._order[len(self._sent) :]:
            if self._missing[waiting] > 0:
                break
            self._sent[waiting] = self._send(waiting)

    def finish(self) -> list[Tensor]:
        """This rank's shards, one per bucket; sends the remaining buckets, such as those of parameters without a
        gradient."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for number in [*self._order, *range(len(self._buckets))]:
            if number not in self._sent:
                self._sent[number] = self._send(number)
        shards = [self._sent[number]() for number in range(len(self._buckets))]
        self._sent = {}  # what they have received, as much as all gradients, is not held until the next step
        if not self._learned:
            self._learn()
        return shards

    def _learn(self) -> None:
        """Sets the order of all further passes: by when each bucket was complete, averaged over the ranks."""
        places = [float(len(self._buckets))] * len(self._buckets)
        for place, number in enumerate(self._completed):
            places[number] = float(place)
        sums = self._axis.sum_numbers(places, self._buckets[0].members[0].parameter.device)
        self._order.sort(key=lambda number: (sums[number], -number))
        self._learned = True
