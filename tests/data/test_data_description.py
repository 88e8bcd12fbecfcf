"""What is said of training data that have changed."""

from __future__ import annotations

from typing import Any

import pytest

from stepmark.config.data_arguments import DataArguments
from stepmark.data.data_description import data_difference, describe_source


def source(*texts: tuple[str, str], **fields: Any) -> dict[str, Any]:
    return describe_source(DataArguments(train_file="a.txt", **fields), 64, 5, texts)


ONE = source(("train_file /a.txt", "1"))
MANY = source(*((f"train_file /{n}.txt", str(n)) for n in range(5)))
NONE = source()


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        (ONE, source(("train_file /a.txt", "2")), "train_file /a.txt: changed"),
        (ONE, source(("train_file /b.txt", "2")), "train_file /b.txt: added; train_file /a.txt: no longer read"),
        (ONE, source(("train_file /b.txt", "1")), None),
        (NONE, MANY, "train_file /0.txt, train_file /1.txt, train_file /2.txt and 2 more: added"),
        (ONE, source(("train_file /a.txt", "1"), max_train_samples=9), "max_train_samples was unset and is now 9"),
        (ONE, {"sources": [ONE, MANY], "weights": [1, 2]}, "the number of sources was 1 and is now 2"),
        (
            {"sources": [ONE, NONE], "weights": [1, 2]},
            {"sources": [ONE, MANY], "weights": [1, 3]},
            "the weights were 1, 2 and are now 1, 3; source 2: train_file /0.txt, train_file /1.txt, train_file /2.txt "
            "and 2 more: added",
        ),
    ],
)
def test_differences_name_fields_and_files(before: dict[str, Any], now: dict[str, Any], said: str | None) -> None:
    assert data_difference(before, now) == said
