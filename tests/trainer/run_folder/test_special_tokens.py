"""The tokenizer's special tokens in the model's configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    default_data_collator,
)

from stepmark import PadTo, Trainer, TrainingArguments
from stepmark.trainer.run_model import align_special_tokens
from tests.support.programs import LENGTH, Blocks, tiny_model

SMALL: dict[str, Any] = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 300, "n_positions": 64}


def tokenizer(**special: str) -> PreTrainedTokenizerFast:
    words = {word: index + 10 for index, word in enumerate(["<end>", "<pad>", "<begin>"])}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), **special)


def test_a_trained_model_has_the_tokens_of_its_tokenizer(tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(bos_token_id=1, eos_token_id=2, **SMALL))
    model.generation_config.eos_token_id = [2, 5]
    args = TrainingArguments(str(tmp_path), device="cpu", max_steps=1, save_strategy="no", disable_tqdm=True)
    tokens = tokenizer(eos_token="<end>", pad_token="<pad>")
    trainer = Trainer(model, args, train_dataset=Blocks(4), processing_class=tokens)
    assert model.config.eos_token_id == 2
    trainer.train(save_model=True)
    assert (model.config.eos_token_id, model.config.pad_token_id, model.config.bos_token_id) == (10, 11, 1)
    assert model.generation_config.eos_token_id == [10, 2, 5]
    assert json.loads((tmp_path / "config.json").read_text())["pad_token_id"] == 11


def test_a_classifier_can_be_trained_with_padded_batches() -> None:
    """It looks for the last token that is no padding, and refuses several samples without a padding token."""
    model = GPT2ForSequenceClassification(GPT2Config(**SMALL))
    align_special_tokens(model, tokenizer(pad_token="<pad>"))
    assert model.config.pad_token_id == 11


@pytest.mark.parametrize("processing_class", [None, object(), tokenizer()])
def test_without_tokens_nothing_changes(processing_class: Any) -> None:
    model = GPT2LMHeadModel(GPT2Config(**SMALL))
    before = model.config.to_dict()
    align_special_tokens(model, processing_class)
    assert model.config.to_dict() == before


@dataclass
class Collator:
    """What a script wrote, with what it reads the samples by."""

    tokenizer: Any = None
    processor: Any = None

    def __call__(self, samples: list[Any]) -> Any:
        return default_data_collator(samples)


@pytest.mark.parametrize("kind", ["tokenizer", "processor", "transformers", "padded"])
def test_the_tokenizer_of_a_collator_is_saved_with_the_model(tmp_path: Path, kind: str) -> None:
    own = tokenizer(pad_token="<pad>")
    own.add_tokens(["<new>"])
    collator: Any = {
        "tokenizer": Collator(tokenizer=own),
        "processor": Collator(processor=own),
        "transformers": DataCollatorForLanguageModeling(own, mlm=False),
        "padded": PadTo(LENGTH, Collator(own)),
    }[kind]
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=1, save_steps=1, device="cpu", disable_tqdm=True,
        per_device_train_batch_size=1,
    )  # fmt: skip
    trainer = Trainer(tiny_model(), args, train_dataset=Blocks(2, ragged=False), data_collator=collator)
    trainer.train()
    trainer.save_model()
    for folder in (tmp_path, tmp_path / "checkpoint-1"):
        assert "<new>" in PreTrainedTokenizerFast.from_pretrained(folder).get_vocab()


def test_the_processing_class_goes_before_the_tokenizer_of_a_collator(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), device="cpu")
    other = tokenizer(pad_token="<pad>")
    other.add_tokens(["<new>"])
    trainer = Trainer(tiny_model(), args, data_collator=Collator(other), processing_class=tokenizer())
    trainer.save_model()
    assert "<new>" not in PreTrainedTokenizerFast.from_pretrained(tmp_path).get_vocab()
