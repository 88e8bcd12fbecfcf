"""Samples of varying lengths are padded to the stated ones, and padding is never a target."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DataCollatorForLanguageModeling, DataCollatorWithPadding

from stepmark.data.loader.collate import PadTo
from stepmark.data.loader.labels import LabelRule
from stepmark.data.loader.loader import DataLoader
from stepmark.data.tokenize.tokenizer import byte_tokenizer
from stepmark.errors import DataError, UsageError


def sample(length: int, **others: Any) -> dict[str, Any]:
    ids = list(range(1, length + 1))
    return {"input_ids": ids, "labels": ids, **others}


def only_batch(samples: list[Any], **arguments: Any) -> Any:
    step = next(iter(DataLoader(samples, len(samples), shuffle=False, **arguments)))
    return step[0].inputs


def as_lists(batch: dict[str, Tensor]) -> dict[str, Any]:
    return {name: value.tolist() for name, value in batch.items()}


def one_tensor(rows: list[Any], width: int) -> dict[str, Tensor]:
    return {"input_ids": torch.ones(len(rows), width, dtype=torch.long)}


def test_padded_to_the_one_length() -> None:
    batch = only_batch([sample(2), sample(3)], pad_to=4, pad_token_id=9)
    assert as_lists(batch) == {
        "input_ids": [[1, 2, 9, 9], [1, 2, 3, 9]],
        "labels": [[1, 2, -100, -100], [1, 2, 3, -100]],
        "attention_mask": [[1, 1, 0, 0], [1, 1, 1, 0]],
    }


@pytest.mark.parametrize(("longest", "width"), [(1, 4), (4, 4), (5, 8), (16, 16)])
def test_the_smallest_stated_length_that_fits(longest: int, width: int) -> None:
    batch = only_batch([sample(1), sample(longest)], pad_to=[16, 4, 8])
    assert {value.shape for value in batch.values()} == {(2, width)}


def test_padded_to_the_longest_of_the_batch_where_shapes_are_free() -> None:
    assert as_lists(only_batch([sample(1), sample(2)], collate_fn=PadTo())) == {
        "input_ids": [[1, 0], [1, 2]],
        "labels": [[1, -100], [1, 2]],
        "attention_mask": [[1, 0], [1, 1]],
    }
    assert "attention_mask" not in only_batch([sample(2), sample(2)], collate_fn=PadTo())


def test_padded_on_the_left() -> None:
    left = {"input_ids": [[0, 0, 1], [0, 1, 2]], "labels": [[-100, -100, 1], [-100, 1, 2]]}
    mask = [[0, 0, 1], [0, 1, 1]]
    assert as_lists(only_batch([sample(1), sample(2)], collate_fn=PadTo(3, side="left"))) == {
        **left,
        "attention_mask": mask,
    }
    tokenizer = byte_tokenizer()
    tokenizer.padding_side = "left"
    collate_fn = PadTo(3, DataCollatorWithPadding(tokenizer))
    rows = [{"input_ids": ids} for ids in ([1], [1, 2])]
    assert only_batch(rows, collate_fn=collate_fn, processing_class=tokenizer)["attention_mask"].tolist() == mask


@pytest.mark.parametrize("lengths", [None, 6])
def test_labels_that_are_not_of_the_tokens(lengths: int | None) -> None:
    """Two tasks keep their two labels; the answer alone is named, unless it is a decoder's own sequence."""
    two = [{"input_ids": [1] * length, "labels": [1, 2]} for length in (3, 4)]
    assert only_batch(two, collate_fn=PadTo(lengths))["labels"].tolist() == [[1, 2]] * 2
    answers = [{"input_ids": [1, 2, 3], "labels": [2]}, {"input_ids": [1, 2, 3, 4], "labels": [3, 4]}]
    with pytest.raises(DataError, match="sample 1: labels of shape"):
        only_batch(answers, collate_fn=PadTo(lengths))
    decoded = only_batch(answers, collate_fn=PadTo(lengths), labels=LabelRule(own_sequence=True))
    assert (decoded["labels"] != -100).sum(1).tolist() == [1, 2]
    collate_fn, rule = PadTo(lengths, side="left"), LabelRule(own_sequence=True)
    assert only_batch(answers, collate_fn=collate_fn, labels=rule)["labels"][:, 0].tolist() == [2, 3]


def test_every_padded_batch_has_a_mask() -> None:
    assert only_batch([sample(4)], pad_to=4)["attention_mask"].tolist() == [[1, 1, 1, 1]]


def test_other_features_of_a_token_are_padded_and_those_of_a_sample_are_not() -> None:
    rows = [
        sample(length, token_type_ids=[1] * length, boxes=[[length, 0]] * length, weights=[0.5, 0.5, 0.5], label=3)
        for length in (1, 2)
    ]
    for row in rows:
        del row["labels"]
    batch = only_batch(rows, pad_to=3)
    assert batch["token_type_ids"].tolist() == [[1, 0, 0], [1, 1, 0]]
    assert batch["boxes"].shape == (2, 3, 2)
    assert batch["weights"].tolist() == [[0.5] * 3] * 2
    assert batch["labels"].tolist() == [3, 3]


def test_multi_label_targets_are_not_a_sequence() -> None:
    rows = [{"input_ids": [1] * length, "labels": [0.0, 1.0]} for length in (1, 3)]
    assert only_batch(rows, pad_to=4)["labels"].tolist() == [[0.0, 1.0]] * 2
    collated = only_batch(
        rows,
        pad_to=4,
        collate_fn=lambda _: {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": torch.ones(2, 2)},
    )
    assert collated["labels"].shape == (2, 2)


def test_texts_and_none_are_left_out() -> None:
    assert set(only_batch([sample(2, text="a", nothing=None)])) == {"input_ids", "labels"}


def test_of_two_columns_of_labels_the_one_named_labels_counts() -> None:
    samples = [{"x": [1.0], "label": row, "label_ids": [row], "labels": row + 5} for row in range(2)]
    assert as_lists(only_batch(samples)) == {"x": [[1.0], [1.0]], "labels": [5, 6]}
    batch = only_batch([{"x": [1.0], "label_ids": [row], "label": row} for row in range(2)])
    assert as_lists(batch)["labels"] == [0, 1]


def test_samples_that_are_not_mappings_are_stacked() -> None:
    first, second = only_batch([(torch.ones(3), 1), (torch.zeros(3), 2)])
    assert first.shape == (2, 3)
    assert second.tolist() == [1, 2]


def test_a_sample_that_is_too_long_is_named() -> None:
    samples = [sample(2), sample(9), sample(3)]
    with pytest.raises(DataError, match=r"^sample 1 has length 9, longer than pad_to allows \(4, 8\)"):
        only_batch(samples, pad_to=[4, 8])
    for width, culprit in ((9, "sample 1"), (10, "one of the samples 0, 1, 2")):
        collate_fn = partial(one_tensor, width=width)
        with pytest.raises(DataError, match=f"^{culprit} has length {width}"):
            only_batch(samples, pad_to=8, collate_fn=collate_fn)


def test_transformers_collators_are_padded_too() -> None:
    tokenizer = byte_tokenizer()
    pad = tokenizer.pad_token_id
    rows = [{"input_ids": [1, 2], "attention_mask": [1, 1]}, {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1]}]
    padded = only_batch(rows, pad_to=4, pad_token_id=pad, collate_fn=DataCollatorWithPadding(tokenizer))
    assert type(padded) is dict
    assert as_lists(padded) == {
        "input_ids": [[1, 2, pad, pad], [1, 2, 3, pad]],
        "attention_mask": [[1, 1, 0, 0], [1, 1, 1, 0]],
    }
    causal = only_batch(
        rows, pad_to=4, pad_token_id=pad, collate_fn=DataCollatorForLanguageModeling(tokenizer, mlm=False)
    )
    assert causal["labels"].tolist() == [[1, 2, -100, -100], [1, 2, 3, -100]]


def test_a_collators_output_gets_its_mask() -> None:
    batch = only_batch([1, 2], pad_to=3, collate_fn=lambda _: {"input_ids": torch.ones(2, 2, dtype=torch.long)})
    assert batch["attention_mask"].tolist() == [[1, 1, 0]] * 2


def test_fixed_shapes_need_stated_lengths() -> None:
    for collate_fn in (None, PadTo()):
        with pytest.raises(UsageError, match=r"input_ids|lengths from 1 to 2.*pad_to for a DataLoader"):
            only_batch([sample(1), sample(2)], fixed_shape=True, collate_fn=collate_fn)
    for collate_fn in (None, lambda rows: {"input_ids": torch.tensor([rows[0]["input_ids"]])}):
        loader = DataLoader([sample(1), sample(2)], 1, shuffle=False, fixed_shape=True, collate_fn=collate_fn)
        with pytest.raises(UsageError, match=r"input_ids has shape \(1, 2\) where it had \(1, 1\).*for a DataLoader"):
            list(loader)


@pytest.mark.parametrize("pad_to", [0, -1, [], [4, 0]])
def test_invalid_lengths(pad_to: Any) -> None:
    with pytest.raises(UsageError, match="pad_to must be a positive length"):
        DataLoader([sample(1)], 1, pad_to=pad_to)


@pytest.mark.parametrize("padding", [PadTo(4, side="top"), PadTo(4, PadTo(8))])  # type: ignore[arg-type]
def test_invalid_padding(padding: PadTo) -> None:
    with pytest.raises(UsageError, match="PadTo.*side"):
        DataLoader([sample(1)], 1, collate_fn=padding)


VARYING = [sample(length) for length in (1, 7, 2, 2, 3, 1, 5)]


class TestRanksAgree:
    """With fixed shapes all ranks of a micro-step take the same length: their graphs must not differ."""

    def shapes(self, samples: list[Any], **arguments: Any) -> list[list[torch.Size]]:
        ranks = [
            DataLoader(
                samples, 2, rank=rank, world_size=2, pad_to=[2, 4, 8], fixed_shape=True, shuffle=False, **arguments
            )
            for rank in range(2)
        ]
        return [[micro.inputs["input_ids"].shape for step in rank for micro in step] for rank in ranks]

    def test_on_the_length_of_the_longest(self) -> None:
        assert self.shapes(VARYING) == [[(2, 8), (2, 8)]] * 2
        assert self.shapes(VARYING[2:6]) == [[(2, 4)]] * 2

    def test_also_where_one_has_no_samples(self) -> None:
        assert self.shapes(VARYING[:5], accumulation=2) == [[(2, 8), (2, 4)]] * 2

    def test_a_sample_that_is_too_long(self) -> None:
        with pytest.raises(DataError, match="sample 1 has length 9"):
            self.shapes([sample(1), sample(9)])

    def test_a_collator_that_lengthens(self) -> None:
        with pytest.raises(DataError, match="has length 5, longer than pad_to allows"):
            self.shapes([sample(2)] * 4, collate_fn=lambda rows: {"input_ids": torch.ones(2, 5, dtype=torch.long)})

    def test_samples_whose_length_cannot_be_known(self) -> None:
        with pytest.raises(UsageError, match="give one length"):
            self.shapes([{"text": "a"}] * 4, collate_fn=lambda rows: {"input_ids": torch.ones(2, 1)})
