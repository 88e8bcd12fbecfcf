"""Steps and tokens of a run, from the recipe and, where it counts epochs, from its data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stepmark.config.recipe import Recipe
from stepmark.data.loader.order import BatchLayout
from stepmark.data.prepared_data import choose_block_size, prepare


@dataclass(frozen=True)
class RunLength:
    """How long a run is.

    Attributes:
        block_size: Tokens in a sample.
        samples_per_step: Over all ranks.
        steps: Of the complete run; None if that depends on data that was not counted.
    """

    block_size: int
    samples_per_step: int
    steps: int | None

    @property
    def tokens_per_step(self) -> int:
        return self.samples_per_step * self.block_size

    @property
    def tokens(self) -> int | None:
        """Of the complete run; a little too many where an epoch's last step is not full."""
        return None if self.steps is None else self.steps * self.tokens_per_step


def run_length(
    recipe: Recipe, tokenizer: Any | None, ranks: int, *, count_data: bool, progress: Callable[[str], None]
) -> RunLength:
    """Of a recipe on so many ranks. With `count_data`, and where `max_steps` does not say how long the run is, the data
    is tokenized as the run would, into the same cache.

    Raises DataError or UsageError for data that cannot be read.
    """
    args = recipe.training
    longest = getattr(tokenizer, "model_max_length", 2**62)
    block_size = choose_block_size(recipe.data.block_size, longest)
    replicas = ranks // (args.tensor_parallel_size * args.pipeline_parallel_size)
    layout = BatchLayout(args.per_device_train_batch_size, replicas, args.gradient_accumulation_steps)
    steps: int | None = args.max_steps if args.max_steps > 0 else None
    if steps is None and count_data and tokenizer is not None:
        samples = len(prepare(recipe.data, tokenizer, progress=progress).train)
        whole = samples // layout.global_batch if args.dataloader_drop_last else -(-samples // layout.global_batch)
        steps = math.ceil(args.num_train_epochs * whole)
    return RunLength(block_size, layout.global_batch, steps)
