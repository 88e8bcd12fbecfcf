"""Columns that a model's forward does not take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from stepmark import Trainer, TrainingArguments
from stepmark.errors import DataError

SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 30}


class Sentences(torch.utils.data.Dataset[dict[str, Any]]):
    """Samples as a tokenizer's map leaves them, the text included."""

    def __init__(self, **columns: Any) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.arange(5) + index
        return {"input_ids": ids, "labels": index % 2, **self.columns}


class Batched(Sentences):
    """As data sets of the datasets library are read."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


def train(folder: Path, model: nn.Module, dataset: Any, **options: Any) -> list[float]:
    fields = {"max_steps": 2, "per_device_train_batch_size": 3, "logging_steps": 1, "save_strategy": "no", **options}
    args = TrainingArguments(str(folder), device="cpu", disable_tqdm=True, **fields)
    trainer = Trainer(model, args, train_dataset=dataset, eval_dataset=dataset)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.callback_handler.train_dataloader.dataset is dataset  # which a callback may change
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


def bert() -> nn.Module:
    torch.manual_seed(0)
    return BertForSequenceClassification(BertConfig(**SMALL))  # type: ignore[no-untyped-call]


class OwnLoss(Trainer):
    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


@pytest.mark.parametrize("reader", ["compute_loss", "data_collator", None])
def test_a_loss_or_a_collator_that_may_want_a_column_is_warned_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, reader: str | None
) -> None:
    args = TrainingArguments(str(tmp_path), device="cpu", max_steps=1, save_strategy="no", disable_tqdm=True)
    data = Sentences(**{f"weight_{reader}": 2.0})
    kind = OwnLoss if reader == "compute_loss" else Trainer
    collator = torch.utils.data.default_collate if reader == "data_collator" else None
    trainer = kind(bert(), args, collator, train_dataset=data, eval_dataset=data)
    trainer.train()
    trainer.evaluate()
    warnings = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    warnings = [each for each in warnings if "weight_" in each]
    assert len(warnings) == (0 if reader is None else 1)
    assert all(f"weight_{reader}; set remove_unused_columns: false" in each for each in warnings)


@pytest.mark.parametrize("kind", [Sentences, Batched])
def test_columns_that_forward_does_not_take_are_left_out(tmp_path: Path, kind: type[Sentences]) -> None:
    with_text = train(tmp_path / "a", bert(), kind(text="some words", idx=3))
    assert with_text == train(tmp_path / "b", bert(), Sentences())


def test_they_are_kept_where_the_arguments_say_so(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="idx"):
        train(tmp_path, Exact(), Sentences(idx=3), remove_unused_columns=False)


class Exact(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 2)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.embedding(input_ids).mean(1)
        return nn.functional.cross_entropy(logits, labels), logits


class Weighted(Exact):
    """A forward of the user's own that takes any further column."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor, **columns: torch.Tensor) -> Any:
        loss, logits = super().forward(input_ids, labels)
        return loss * columns["weight"].mean(), logits


def test_a_forward_that_takes_any_column_gets_all(tmp_path: Path) -> None:
    plain = train(tmp_path / "a", Weighted(), Sentences(weight=1.0), learning_rate=0.0, seed=1)
    twice = train(tmp_path / "b", Weighted(), Sentences(weight=2.0), learning_rate=0.0, seed=1)
    assert len(plain) == len(twice) == 2


class Passing(BertForSequenceClassification):
    """A subclass that passes on whatever it is given."""

    def forward(self, *args: Any, **options: Any) -> Any:
        return super().forward(*args, **options)


def test_a_subclass_whose_forward_names_no_argument_gets_all(tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert train(tmp_path / "a", Passing(BertConfig(**SMALL)), Sentences()) == train(
        tmp_path / "b", bert(), Sentences()
    )


def test_a_dataset_of_which_no_column_is_left_is_an_error(tmp_path: Path) -> None:
    class Other(Sentences):
        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"text": "words", "source": "web"}

    with pytest.raises(DataError, match=r"columns \(text, source\) are not among .*BertForSequenceClassification"):
        train(tmp_path, bert(), Other())
