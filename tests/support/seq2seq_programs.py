"""A small encoder-decoder whose evaluations generate, in one rank of any device."""

from __future__ import annotations

from typing import Any

import torch
from transformers import T5Config, T5ForConditionalGeneration

from stepmark import Seq2SeqTrainer, Seq2SeqTrainingArguments

LENGTH = 9


def small_t5(vocabulary: int = 61) -> T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=vocabulary,
        d_model=16,
        d_ff=16,
        d_kv=8,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config)


class Sentences(torch.utils.data.Dataset[dict[str, Any]]):
    """Token ids with an attention mask, and targets of which some are not counted."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(3, 61, (7,), generator=generator)
        mask = torch.ones(7, dtype=torch.int64)
        mask[5 + index % 3 :] = 0
        return {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask > 0, ids, -100)}


def generated(device: str, folder: str, length: dict[str, int] | None = None, **options: Any) -> dict[str, Any]:
    """The tokens that `compute_metrics` gets, the evaluation's loss, and on a lazy device the compilations of a second
    evaluation. `length`: what the model's generation configuration says of it; default None: the arguments say it."""
    seen: list[Any] = []
    args = Seq2SeqTrainingArguments(
        output_dir=folder, device=device, disable_tqdm=True, per_device_eval_batch_size=2,
        predict_with_generate=True, generation_max_length=LENGTH if length is None else None, **options,
    )  # fmt: skip
    model = small_t5()
    model.generation_config.update(**length or {})
    trainer = Seq2SeqTrainer(
        model, args, eval_dataset=Sentences(), compute_metrics=lambda found: seen.append(found) or {}
    )
    loss = trainer.evaluate()["eval_loss"]
    before = trainer.context.runtime.counters()
    trainer.evaluate()
    after = trainer.context.runtime.counters()
    return {
        "tokens": seen[0].predictions.tolist(),
        "labels": seen[0].label_ids.tolist(),
        "loss": loss,
        "compiled": None if before is None or after is None else after.compilations - before.compilations,
    }
