"""The arguments of a Seq2SeqTrainer."""

from __future__ import annotations

from dataclasses import dataclass

from stepmark.errors import UsageError
from stepmark.trainer.training_arguments import TrainingArguments


@dataclass(repr=False)
class Seq2SeqTrainingArguments(TrainingArguments):
    """The arguments of a `Seq2SeqTrainer`.

    Args:
        predict_with_generate: `compute_metrics` and `predict` get tokens that the model generates, not logits. Default:
            false.
        generation_max_length: Their number; default: that of the model's generation configuration.
        generation_num_beams: Beams of the search; default: those of the model's generation configuration.
        generation_config: The model's generation configuration: a GenerationConfig, or its file, folder or hub name.

    Raises:
        UsageError: As `TrainingArguments`.
    """

    sortish_sampler: bool = False
    predict_with_generate: bool = False
    generation_max_length: int | None = None
    generation_num_beams: int | None = None
    generation_config: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sortish_sampler:
            raise UsageError("sortish_sampler: is not supported; override get_train_dataloader")
        for name in ("generation_max_length", "generation_num_beams"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name}: should be at least 1, and is {value}")
