"""Forward passes through the stages of a pipeline: evaluations, and probes of the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from stepmark.data.loader.batch import MicroBatch
from stepmark.parallel.full_sharding import has_full_sharding
from stepmark.parallel.pipeline.staged_model import StagedModel, staged
from stepmark.parallel.pipeline.transfers import Activation, Transfers, shapes_of
from stepmark.runtime.mesh import Mesh
from stepmark.training.micro_batches import autocast
from stepmark.training.weighted_loss import MicroBatchLoss, check_mapping


class EvaluationPaused(Exception):
    """The run stops in the middle of an evaluation, on all ranks before the same batch."""


Result = TypeVar("Result")


@dataclass(frozen=True)
class StageCalls:
    """Calls of stages without a loss: with the batch without its labels."""

    stages: StagedModel
    loss: MicroBatchLoss

    def __call__(self, stage: int, received: Callable[[], Tensor] | None, batch: MicroBatch) -> Tensor:
        """See `StagedModel.hidden_states`."""
        inputs = self.inputs(batch)
        with self.loss.recording(inputs):
            return self.stages.hidden_states(stage, received, lambda: self.stages.model(**inputs))

    def inputs(self, batch: MicroBatch) -> dict[str, Any]:
        check_mapping(batch.inputs)
        left_out = {"labels", "shift_labels", *self.loss.labels.names}
        return {**{name: each for name, each in batch.inputs.items() if name not in left_out}, "use_cache": False}


class PipelinedForward:
    """Forward passes alone, for evaluations: every batch goes through all stages, several at a time."""

    def __init__(
        self, model: nn.Module, loss: MicroBatchLoss, mesh: Mesh, autocast_dtype: torch.dtype | None = None
    ) -> None:
        """`autocast_dtype`: bfloat16 for autocast; None: the parameters' own type."""
        stages = staged(model)
        assert stages is not None
        self._stages = stages
        self._ranks = mesh.pipeline.size
        self._runtime = mesh.runtime
        self._autocast = autocast_dtype
        self._call = StageCalls(stages, loss)
        self._transfers = Transfers(mesh, draws=False)

    def __call__(
        self, batches: Iterable[MicroBatch], compute: Callable[[MicroBatch], Result]
    ) -> Iterator[tuple[MicroBatch, Result | None]]:
        """Runs the batches, in order, which are the same on all ranks of a pipeline. Yields each with what `compute`,
        which calls the complete model, has returned on the last stage; on other ranks with None."""
        source = iter(batches)
        try:
            while group := list(islice(source, self._group)):
                yield from self._run(group, compute)
        except EvaluationPaused:
            self._transfers.settle()  # what this rank has sent still arrives: others stop later, at the same batch
            raise
        self._transfers.settle()

    @property
    def _group(self) -> int:
        """Batches that go through one of a rank's stages before the next stage has its turn. Two accelerators would
        wait for each other, since both send and their transfers are in one queue; so would ranks whose transfers are
        graphs, which both sides run."""
        both_ways = self._ranks == 2 and not self._runtime.host_memory
        graphs = getattr(self._runtime, "in_graph_collectives", False)
        return 1 if len(self._stages.own) == 1 or both_ways or graphs else self._ranks

    def _run(
        self, batches: list[MicroBatch], compute: Callable[[MicroBatch], Result]
    ) -> Iterator[tuple[MicroBatch, Result | None]]:
        results: list[Result | None] = [None] * len(batches)
        sharded = has_full_sharding(self._stages.model)
        for stage in self._stages.own:
            for index, batch in enumerate(batches):
                with torch.no_grad(), autocast(self._runtime, self._autocast, sharded=sharded):
                    results[index] = self._pass(stage, batch, compute)
                self._transfers.settle(keep=2 * self._ranks)
        yield from zip(batches, results, strict=True)

    def _pass(self, stage: int, batch: MicroBatch, compute: Callable[[MicroBatch], Result]) -> Result | None:
        shapes = shapes_of(self._call.inputs(batch))
        received = None
        if stage:
            (activation,), _ = self._transfers.begin((stage - 1) % self._ranks, [], [(stage - 1, shapes)], [], [])
            received = activation.arrived
        if stage == self._stages.last:
            assert received is not None
            return self._stages.final(received, lambda: compute(batch))
        hidden = self._call(stage, received, batch)
        self._transfers.begin((stage + 1) % self._ranks, [(stage, shapes, Activation(hidden))], [], [], [])
        return None
