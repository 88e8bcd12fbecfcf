"""Without a collator a Trainer makes the batches that transformers' Trainer makes: the same losses and predictions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import DataCollatorWithPadding, default_data_collator

from stepmark import Conversations, Trainer, TrainingArguments
from stepmark.data.tokenize.tokenizer import byte_tokenizer
from stepmark.errors import DataError
from tests.support.seq2seq_programs import small_t5

LENGTHS = (3, 7, 5, 4)
IDS = [np.random.RandomState(length).randint(3, 200, length).tolist() for length in LENGTHS]
SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
NO_DROPOUT = {f"{name}_dropout": 0.0 for name in ("hidden", "attention", "final", "feat_proj")}
t5 = partial(small_t5, vocabulary=300)


class LastToken(nn.Module):
    """Classes read from the last place of a sequence, as many labels as `tasks`, with an image where there is one."""

    def __init__(self, tasks: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 8)
        self.head = nn.Linear(8, 3 * tasks)
        self.tasks = tasks

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, pixel_values: Any = None, labels: Any = None
    ) -> dict[str, Tensor]:
        hidden = self.embedding(input_ids)[:, -1]
        if attention_mask is not None:
            hidden = hidden * attention_mask.sum(1, keepdim=True)
        if pixel_values is not None:
            hidden = hidden + pixel_values.float().mean((1, 2, 3))[:, None]
        logits = self.head(hidden).view(-1, self.tasks, 3)
        return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def llama(kind: Any) -> Callable[[], nn.Module]:
    pad = byte_tokenizer().pad_token_id
    return lambda: kind(transformers.LlamaConfig(vocab_size=300, num_key_value_heads=2, pad_token_id=pad, **SIZES))


def audio_classifier() -> nn.Module:
    convolutions: dict[str, Any] = {"conv_dim": (8, 8), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
    config = transformers.Wav2Vec2Config(
        **SIZES, **NO_DROPOUT, **convolutions, num_feat_extract_layers=2, num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, layerdrop=0.0, mask_time_prob=0.0, classifier_proj_size=8,
        feat_extract_norm="layer",
    )  # fmt: skip
    return transformers.Wav2Vec2ForSequenceClassification(config)


def left() -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.padding_side = "left"
    return tokenizer


def rows(**columns: Callable[[int], Any]) -> list[dict[str, Any]]:
    return [{name: make(index) for name, make in columns.items()} for index in range(len(LENGTHS))]


def ids(index: int) -> list[int]:
    return IDS[index]


def audio(index: int) -> Any:
    return np.random.RandomState(index).randn(200 + 20 * index)


def image(index: int) -> Any:
    return np.random.RandomState(index).rand(3, 4, 4)


EXTRACTOR = transformers.Wav2Vec2FeatureExtractor
CASES: dict[str, tuple[Callable[[], nn.Module], Any, list[dict[str, Any]]]] = {
    "left": (LastToken, left(), rows(input_ids=ids, label=lambda index: index % 3)),
    "right": (LastToken, byte_tokenizer(), rows(input_ids=ids, labels=lambda index: index % 3)),
    "llama left": (llama(transformers.LlamaForSequenceClassification), left(), rows(input_ids=ids, labels=lambda _: 1)),
    "two tasks": (lambda: LastToken(2), byte_tokenizer(), rows(input_ids=ids, label_ids=lambda index: [1, index % 3])),
    "image": (LastToken, left(), rows(input_ids=ids, pixel_values=image, labels=lambda index: index % 3)),
    "T5": (t5, byte_tokenizer(), rows(input_ids=ids, labels=lambda _: IDS[1][:5])),
    "T5 without a tokenizer": (t5, None, rows(input_ids=lambda _: IDS[1], labels=lambda _: IDS[1][:5])),
    "audio": (audio_classifier, EXTRACTOR(return_attention_mask=True), rows(input_values=audio, label=lambda _: 1)),
    "audio, no mask": (
        audio_classifier, EXTRACTOR(return_attention_mask=False), rows(input_values=audio, label=lambda _: 0),
    ),
}  # fmt: skip


def trainer_of(folder: Path, model: nn.Module, processing_class: Any, **options: Any) -> Trainer:
    args = TrainingArguments(output_dir=str(folder), device="cpu", disable_tqdm=True, per_device_eval_batch_size=4)
    return Trainer(model, args, processing_class=processing_class, **options)


@pytest.mark.parametrize("name", CASES)
def test_batches_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    make, processing_class, samples = CASES[name]
    torch.manual_seed(0)
    model = make().eval()
    collator = default_data_collator if processing_class is None else DataCollatorWithPadding(processing_class)
    trainer = trainer_of(tmp_path, model, processing_class)
    found = trainer.predict(samples)  # type: ignore[arg-type]
    with torch.no_grad():
        expected = model(**collator(samples))
    logits = found.predictions[0] if isinstance(found.predictions, tuple) else found.predictions
    np.testing.assert_allclose(logits, expected["logits"], rtol=1e-5, atol=1e-6)
    assert found.metrics["test_loss"] == pytest.approx(float(expected["loss"]), rel=1e-5)
    assert type(trainer.data_collator) is type(collator)  # which programs call


CAUSAL = llama(transformers.LlamaForCausalLM)
UNPADDED = byte_tokenizer()
UNPADDED.pad_token = None
REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, list[dict[str, Any]], str]] = {
    "labels": (CAUSAL, byte_tokenizer(), rows(input_ids=ids, labels=ids), "sample 1: labels .*TokenClassification"),
    "answers": (
        CAUSAL, byte_tokenizer(), rows(input_ids=ids, labels=lambda index: IDS[index][2:]), "sample 1: labels",
    ),
    "T5": (t5, byte_tokenizer(), rows(input_ids=ids, label_ids=ids), "sample 1: labels .*Seq2Seq"),
    "no tokenizer": (LastToken, None, rows(input_ids=ids, label=lambda _: 1), "sample 1: input_ids .*processing_class"),
    "no pad token": (LastToken, UNPADDED, rows(input_ids=ids, label=lambda _: 1), "sample 1: input_ids .*pad_token"),
    "no extractor": (audio_classifier, None, rows(input_values=audio, label=lambda _: 1), "sample 1: input_values"),
    "images": (
        LastToken, left(), rows(input_ids=ids, pixel_values=lambda index: image(0)[:, : 2 + index], label=lambda _: 1),
        "sample 1: pixel_values",
    ),
    "text": (
        LastToken, None, rows(input_ids=lambda _: [1], pixel_values=lambda _: ["a.png"]), "sample 0: pixel_values",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_padded_is_named(name: str, tmp_path: Path) -> None:
    make, processing_class, samples, culprit = REFUSED[name]
    with pytest.raises(DataError, match=culprit):
        trainer_of(tmp_path, make(), processing_class).predict(samples)  # type: ignore[arg-type]


def test_samples_of_one_length_need_no_pad_token(tmp_path: Path) -> None:
    samples = rows(input_ids=lambda _: IDS[1], label=lambda index: index % 3)
    found = trainer_of(tmp_path, LastToken(), UNPADDED).predict(samples)  # type: ignore[arg-type]
    assert found.predictions.shape == (4, 1, 3)


def test_conversations_are_padded_as_they_need(tmp_path: Path) -> None:
    """On the right, whatever the tokenizer says, with labels; a shuffled epoch and an evaluation."""
    tokenizer = left()
    tokenizer.chat_template = "{% for each in messages %}{{ each.role }} {{ each.content }}{% endfor %}"
    turns = [[{"role": "user", "content": "a" * index}, {"role": "assistant", "content": "b"}] for index in (1, 5, 3)]
    data = Conversations([{"messages": each} for each in turns], tokenizer)
    trainer = trainer_of(tmp_path, CAUSAL(), tokenizer, eval_dataset=data)
    (batch,) = trainer.get_eval_dataloader()
    assert batch["attention_mask"][:, 0].tolist() == [1, 1, 1]
    assert (batch["labels"] == -100).sum(1).tolist() == [4, 0, 2]
    assert trainer.evaluate()["eval_loss"] > 0
