"""Programs for the ranks of a pipeline: how long they wait, and what they keep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from stepmark.parallel.pipeline.transfers import Activation, Transfers
from stepmark.runtime.collectives import GroupCollectives
from stepmark.runtime.context import start
from tests.support.models import build, training

BEST_OF = 3


def idle_share(options: dict[str, Any], forward: float, backward: float) -> float:
    """Of a step of sleeping layers, the smallest of a few: the share of its time in which this rank waits for others.
    Each layer sleeps `forward` seconds in its forward pass and `backward` in its backward pass. `options`: see
    `models.training`."""
    context = start("cpu")
    model = build(**options["model"])
    for layer in model.model.layers:
        layer.register_forward_hook(lambda module, args, output: _Sleep.apply(output, forward, backward))
    step, batches = training(context, options, model)
    waits = _Waits()
    waits.count(Activation, "arrived")
    waits.count(Transfers, "settle")
    waits.count(GroupCollectives, "all_reduce")  # of the norm, for which those wait that end first
    found = []
    for number, batch in zip(range(BEST_OF + 1), batches, strict=False):  # the first agrees on forms and warms up
        context.host.barrier()
        began, waits.seconds = time.perf_counter(), 0.0
        step(number, batch)
        ended = time.perf_counter()
        context.host.barrier()  # for the last of the ranks
        over = time.perf_counter()
        found.append((waits.seconds + over - ended) / (over - began))
    return min(found[1:])


class _Waits:
    """Adds up the seconds in calls of methods."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def count(self, kind: type, name: str) -> None:
        """Counts those of a method from now on."""
        method = getattr(kind, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - began

        setattr(kind, name, counted)


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: Tensor, forward: float, backward: float) -> Tensor:  # type: ignore[override]
        context.seconds = backward
        time.sleep(forward)
        return values.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        time.sleep(context.seconds)
        return gradient, None, None


def kept_bytes(options: dict[str, Any], accumulations: list[int]) -> list[int]:
    """The most bytes that autograd keeps at a time on this rank, parameters aside, in a step of each of these numbers
    of micro-batches of one sample."""
    context = start("cpu")
    found = []
    for accumulation in accumulations:
        given = {**options, "accumulation": accumulation, "batch": accumulation}
        step, batches = training(context, given, build(**given["model"]))
        kept = _Kept(step.model.parameters())
        with torch.autograd.graph.saved_tensors_hooks(kept.pack, lambda holder: holder.tensor):
            step(0, next(batches))
        found.append(kept.peak)
    return found


def forward_passes(options: dict[str, Any]) -> list[int]:
    """How often a step calls the attention of the rank's first layer, and the head, or what stands in for it."""
    context = start("cpu")
    step, batches = training(context, options, build(**options["model"]))
    calls = [0, 0]
    model: Any = step.model
    layer = next(each for each in model.model.layers if any(True for _ in each.parameters()))
    for index, module in enumerate((layer.self_attn, model.lm_head)):  # hooks of layers are outside the checkpoint
        module.register_forward_pre_hook(lambda *_, index=index: calls.__setitem__(index, calls[index] + 1))
    step(0, next(batches))
    return calls


class _Kept:
    """Counts the bytes of the storages that autograd holds, each once."""

    def __init__(self, parameters: Any) -> None:
        self._own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._held: dict[int, int] = {}
        self._now = self.peak = 0

    def pack(self, tensor: Tensor) -> _Holder:
        storage = tensor.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if isinstance(tensor, nn.Parameter) or key in self._own:
            return _Holder(tensor, lambda: None)
        self._held[key] = self._held.get(key, 0) + 1
        if self._held[key] == 1:
            self._now += size
            self.peak = max(self.peak, self._now)
        return _Holder(tensor, lambda: self._release(key, size))

    def _release(self, key: int, size: int) -> None:
        self._held[key] -= 1
        if not self._held[key]:
            self._now -= size


class _Holder:
    def __init__(self, tensor: Tensor, release: Callable[[], None]) -> None:
        self.tensor = tensor
        self._release = release

    def __del__(self) -> None:
        self._release()
