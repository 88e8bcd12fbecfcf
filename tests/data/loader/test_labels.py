"""Which labels of a batch are targets."""

from __future__ import annotations

import pytest
import torch

from stepmark.data.loader.labels import LabelRule

LABELS = torch.tensor([[5, 6, -100], [-100, 7, 8]])
QUESTIONS = LabelRule(("start_positions", "end_positions"))


@pytest.mark.parametrize(("shift", "expected"), [(True, 3), (False, 4)])
def test_targets_are_counted_as_the_loss_uses_them(shift: bool, expected: int) -> None:
    assert LabelRule(causal_shift=shift).count({"labels": LABELS}) == expected


def test_one_label_a_row_is_never_shifted() -> None:
    labels = torch.tensor([1, -100, 2])
    for shift in (True, False):
        assert LabelRule(causal_shift=shift).count({"labels": labels}) == 2


def test_labels_of_more_dimensions() -> None:
    assert LabelRule(causal_shift=True).count({"labels": torch.zeros(2, 3, 4, dtype=torch.long)}) == 18


def test_labels_that_the_collator_has_shifted() -> None:
    inputs = {"labels": LABELS, "shift_labels": torch.tensor([[6, -100, -100], [7, 8, 9]])}
    assert LabelRule(causal_shift=True).count(inputs) == 4


def test_another_ignored_label() -> None:
    labels = torch.tensor([[[0, 255], [1, 1]]])
    assert LabelRule(causal_shift=False, ignored=255).count({"labels": labels}) == 3
    assert LabelRule(ignored=255).without({"labels": labels}, 0)["labels"].eq(255).all()


@pytest.mark.parametrize("labels", [torch.rand(2, 3), torch.ones(2, dtype=torch.bool), [{"boxes": 1}], torch.tensor(1)])
def test_samples_are_counted_where_labels_cannot_be(labels: object) -> None:
    assert LabelRule().count({"labels": labels}) is None
    assert LabelRule().count([1]) is None


def test_samples_are_counted_where_the_loss_is_a_mean_over_them() -> None:
    assert LabelRule(by_sample=True).count({"labels": LABELS}) is None


def test_answers_outside_the_sequence_are_ignored() -> None:
    inputs = {"input_ids": torch.ones(3, 4), "start_positions": torch.tensor([0, 3, 4])}
    assert QUESTIONS.count(inputs) == 2
    assert QUESTIONS.count({"start_positions": torch.tensor([0, 3, 4])}) == 3


def test_filler_rows_have_no_targets() -> None:
    ids = torch.arange(8).reshape(2, 4)
    inputs = {
        "input_ids": ids,
        "labels": ids,
        "start_positions": torch.tensor([1, 2]),
        "end_positions": torch.tensor([1, 3]),
    }
    rule = LabelRule(("labels", "start_positions", "end_positions"))
    masked = rule.without(inputs, 1)
    assert masked["labels"].tolist() == [[0, 1, 2, 3], [-100] * 4]
    assert (masked["start_positions"].tolist(), masked["end_positions"].tolist()) == ([1, 4], [1, 4])
    assert ids[1].tolist() == [4, 5, 6, 7]
    assert rule.present(masked).keys() == {"labels", "start_positions", "end_positions"}
