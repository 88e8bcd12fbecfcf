"""Reduces gradients among ranks while the backward pass that computes them is still running.

The first pass sends nothing before its end. It shows how often each gradient arrives: more than once where a layer that
is used several times is computed again by reentrant checkpoints. All ranks send the buckets in the same order, that in
which they were complete in the first pass, averaged over the ranks, so that no bucket waits long for another.

Of several optimizers whose gradients come from one backward pass, only the one that was announced first sends during
it: the order among several could differ between ranks, and with it what each of them receives.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from stepmark.errors import UsageError
from stepmark.parallel.gradients.accumulators import BucketAccumulator
from stepmark.runtime.collectives import GroupCollectives

Finish = Callable[[], Tensor]
Start = Callable[[BucketAccumulator, int], Finish]

_overlapping: weakref.WeakKeyDictionary[GroupCollectives, weakref.ref[OverlappedReduction]]
_overlapping = weakref.WeakKeyDictionary()  # by axis: what sends while a backward pass runs

IN_FLIGHT = 4  # buckets sent at a time where nothing is computed meanwhile; each may need a buffer of its size

CHANGED = (
    "gradients were changed after the step's last backward pass, which has sent them to the other ranks; change them "
    "in on_pre_optimizer_step or in hooks of the parameters (register_hook), or leave out last_backward() in a loop"
)


class OverlappedReduction:
    """Sends each bucket's sums once a step, overlapped with one backward pass from `last_backward` on, to `finish`.
    `start` starts the reduction of the bucket with a number; its result waits for what this rank gets."""

    def __init__(self, sums: BucketAccumulator, start: Start, axis: GroupCollectives, device: torch.device) -> None:
        self._sums = sums
        self._start = start
        self._axis = axis
        self._device = device
        # Those that can be sent without a reduction over tensor parallel neighbours first:
        alone = [not bucket.replication.partial or bucket.replication.count == 1 for bucket in sums.buckets]
        self._order = [number for number in reversed(range(len(alone))) if alone[number]]
        self._learned = False
        self._running = False  # whether a backward pass has begun whose gradients are sent
        self._needed = [[0] * len(bucket.members) for bucket in sums.buckets]
        self._count = [list(each) for each in self._needed]
        self._missing: list[int] = []
        self._completed: list[int] = []
        self._sent: dict[int, Finish] = {}
        self._sent_versions: dict[int, int] = {}  # of the sums when they were sent, by bucket
        me = weakref.proxy(self)  # which `sums` must not keep alive
        sums.arrived = lambda number, position: me._arrived(number, position)

    def last_backward(self) -> None:
        """From now on a bucket is sent as soon as all gradients of its parameters have arrived."""
        self._count = [[0] * len(bucket.members) for bucket in self._sums.buckets]
        self._missing = [sum(each) for each in self._needed]
        self._completed, self._sent = [], {}
        self._running = True
        if self._other() is None:
            _overlapping[self._axis] = weakref.ref(self)

    def _other(self) -> OverlappedReduction | None:
        """Another one that sends on the same axis while a backward pass runs."""
        found = _overlapping.get(self._axis, lambda: None)()
        return found if found is not None and found is not self and found._running else None

    def _arrived(self, number: int, position: int) -> None:
        """A gradient of a bucket's member is there. Raises UsageError where the bucket was sent already."""
        if not self._running:
            return
        if number in self._sent:
            raise UsageError(
                "a backward pass ran after the one that last_backward() announced as the step's last, and its "
                "gradients would be lost; call last_backward() before the last one (a Trainer does so: there, a "
                "layer is used more often than in the first step, and gradient checkpointing has use_reentrant: true)"
            )
        self._count[number][position] += 1
        if self._other() is not None:
            return
        if not self._learned:
            self._completed = [each for each in self._completed if each != number] + [number]
            return
        if self._count[number][position] <= self._needed[number][position]:
            self._missing[number] -= 1
        for waiting in self._order[len(self._sent) :]:
            if self._missing[waiting] > 0:
                break
            self._send(waiting)

    @torch.no_grad()
    def _send(self, number: int) -> None:
        self._sent[number] = self._start(self._sums, number)
        self._sent_versions[number] = self._sums.flat[number]._version

    def check_unchanged(self) -> None:
        """Raises UsageError where gradients were changed after they were sent, which would have no effect."""
        if any(self._sums.flat[number]._version != version for number, version in self._sent_versions.items()):
            raise UsageError(CHANGED)

    def finish(self) -> list[Tensor]:
        """What this rank gets, one tensor per bucket; sends the rest, as of parameters without a gradient."""
        other = self._other()
        if other is not None:
            other._send_rest()
        overlapped, self._running = self._running and other is None, False
        results: dict[int, Tensor] = {}
        for number in [*self._order, *range(len(self._needed))]:
            if number not in self._sent and number not in results:
                if len(self._sent) >= IN_FLIGHT:
                    oldest = next(iter(self._sent))
                    results[oldest] = self._sent.pop(oldest)()
                self._send(number)
        for number in list(self._sent):
            results[number] = self._sent.pop(number)()
        if overlapped and not self._learned and self._needed:  # a pipeline stage may have no trained parameter
            self._learn()
        return [results[number] for number in range(len(self._needed))]

    def _send_rest(self) -> None:
        """Before others send: what was announced, if the backward pass has run."""
        if not any(map(any, self._count)):
            return
        for number in [*self._order, *range(len(self._needed))]:
            if number not in self._sent:
                self._send(number)

    def reset(self) -> None:
        """Forgets the step; waits for what was sent in one that is given up."""
        self._sent_versions.clear()
        if self._running:
            self.finish()

    def _learn(self) -> None:
        """Sets the order of all further passes, by when each bucket was complete, averaged over the ranks, and how many
        gradients complete a bucket here; a parameter without one in the first pass may have one later."""
        self._needed = [[max(1, count) for count in each] for each in self._count]
        places = [float(len(self._needed))] * len(self._needed)
        for place, number in enumerate(self._completed):
            places[number] = float(place)
        sums = self._axis.sum_numbers(places, self._device)
        self._order.sort(key=lambda number: (sums[number], -number))
        self._learned = True
