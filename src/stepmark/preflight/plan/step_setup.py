"""The settings that determine the memory of a rank over a training step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stepmark.config.recipe import ModelArguments
from stepmark.config.training_fields import TrainingFields
from stepmark.data.loader.batch import MicroBatch
from stepmark.parallel.pipeline.schedules import GPIPE, INTERLEAVED
from stepmark.preflight.plan.simulated_mesh import PlannedDevice
from stepmark.runtime.mesh import DATA, PIPELINE, TENSOR
from stepmark.training.micro_batches import autocast_dtype


@dataclass(frozen=True)
class StepSetup:
    """The settings that determine a rank's memory.

    Attributes:
        config: The model's configuration, of transformers.
        args: The training fields of the recipe; mesh, micro-batch and the like are those of the plan.
        ranks: All ranks.
        length: Tokens in a sequence.
        device: What is planned for.
        trust_remote_code: Whether to execute Python code that comes with the model.
        adapter: The model's fields of the recipe, where they ask for an adapter; None: the model is trained itself.
        stage: The rank's coordinate on the pipeline's axis.
        micro_batches: How many of the step's micro-batches are traced; None: as many as it takes until they repeat.
    """

    config: Any
    args: TrainingFields
    ranks: int
    length: int
    device: PlannedDevice
    trust_remote_code: bool = False
    adapter: ModelArguments | None = None
    stage: int = 0
    micro_batches: int | None = None

    @property
    def axes(self) -> dict[str, int]:
        """Axis name to size."""
        tensor, stages = self.args.tensor_parallel_size, self.args.pipeline_parallel_size
        inner = {DATA: self.ranks // (tensor * stages), TENSOR: tensor}
        return inner if stages == 1 else {PIPELINE: stages, **inner}

    @property
    def staged(self) -> bool:
        """Whether the model is cut into pipeline stages."""
        return self.args.pipeline_parallel_size > 1

    @property
    def autocast(self) -> torch.dtype | None:
        """The type of matrix products; None: that of the parameters."""
        return autocast_dtype(bf16=self.args.bf16, fp16=self.args.fp16)

    def traced_micro_batches(self) -> list[MicroBatch]:
        """The first micro-batches of a step, up to the point where allocations repeat."""
        args, rows = self.args, self.args.per_device_train_batch_size
        count = self.micro_batches or min(args.gradient_accumulation_steps, _until_they_repeat(args))
        return [self.micro_batch(rows) for _ in range(count)]

    def micro_batch(self, rows: int) -> MicroBatch:
        return MicroBatch(self.batch(rows), rows, rows * (self.length - 1))

    def batch(self, rows: int) -> dict[str, Tensor]:
        """The model's inputs."""
        tokens = torch.zeros(rows, self.length, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens.clone()}


def _until_they_repeat(args: TrainingFields) -> int:
    """Without a pipeline, the second micro-batch already finds gradients, and the others are like it. In a pipeline one
    has to begin where gradients are there and the first stage is full."""
    ranks = args.pipeline_parallel_size
    if args.pipeline_schedule == GPIPE:
        return args.gradient_accumulation_steps
    return 3 * ranks if args.pipeline_schedule == INTERLEAVED else ranks + 1
