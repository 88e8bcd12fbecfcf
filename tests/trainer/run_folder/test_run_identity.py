"""What a run that resumes another must have in common with it."""

from __future__ import annotations

from typing import Any

import pytest
from datasets import Dataset
from torch import nn

from stepmark.data.tokenize.tokenizer import byte_tokenizer
from stepmark.errors import CheckpointMismatch
from stepmark.trainer.run_folder.run_identity import check_same_run, identity, tokenizer_digest

SAVED: dict[str, Any] = {
    "model": {
        "class": "GPT2LMHeadModel",
        "model_type": "gpt2",
        "n_embd": 16,
        "gone": 1,
        "pad_token_id": None,
        "text_config": {"model_type": "text", "layers": 2, "eos_token_id": 3},
        "id2label": {"0": "yes"},
    },
    "seed": 1,
}


def changed(**values: Any) -> dict[str, Any]:
    return {**SAVED, "model": {**SAVED["model"], **values}}


def test_what_another_version_or_the_tokenizer_sets_may_differ() -> None:
    now = changed(added=2, pad_token_id=7, text_config={"model_type": "text", "layers": 2, "eos_token_id": 4})
    del now["model"]["gone"]
    check_same_run(SAVED, now, "here")


@pytest.mark.parametrize(
    ("now", "named"),
    [
        (changed(n_embd=32), "model, n_embd was 16 and is now 32"),
        (changed(text_config={"model_type": "text", "layers": 3}), "model, text_config, layers was 2 and is now 3"),
        (changed(id2label={"0": "yes", "1": "no"}), "model, id2label, 1 was null and is now"),
        (changed(**{"class": "Other"}), "model, class was"),
        ({**SAVED, "seed": 2}, "seed was 1 and is now 2"),
    ],
)
def test_another_model_is_another_run(now: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointMismatch, match=f"^here belongs to another run: its {named}"):
        check_same_run(SAVED, now, "here")


def test_every_parameter_of_a_plain_model_counts() -> None:
    saved = identity(nn.Linear(2, 3), None, None, 1, 1)
    with pytest.raises(CheckpointMismatch, match="its model, bias was \\[3\\] and is now null"):
        check_same_run(saved, identity(nn.Linear(2, 3, bias=False), None, None, 1, 1), "here")


def test_how_a_tokenizer_was_called_last_is_no_part_of_a_run() -> None:
    """`datasets` calls it only where it has not kept the result of an earlier process."""
    used = byte_tokenizer()
    before = tokenizer_digest(used)
    used("a text", truncation=True, max_length=4)
    assert tokenizer_digest(used) == before
    assert used.backend_tokenizer.truncation is not None, "it is left alone"
    used.add_tokens(["another"])
    assert tokenizer_digest(used) != before


def test_rows_in_another_order_are_other_data() -> None:
    columns = {"x": list(range(40)), "text": [str(each) for each in range(40)]}
    data, moved = (Dataset.from_dict({**columns, "file": [f"/{at}/a/{n}.png" for n in range(40)]}) for at in ("b", "c"))

    def described(dataset: Dataset) -> dict[str, Any]:
        return {"data": identity(nn.Linear(1, 1), None, dataset, 0, 0)["data"]}

    saved = described(data.shuffle(seed=1))
    check_same_run(
        saved, described(data.shuffle(seed=1).with_transform(lambda rows: {"n": [0] * len(rows["x"])})), "here"
    )
    check_same_run({"data": {"samples": 40}}, saved, "here")  # of an earlier version
    check_same_run(saved, described(moved.shuffle(seed=1)), "here")
    with pytest.raises(CheckpointMismatch, match="other rows, or another order, as of a shuffle without a seed"):
        check_same_run(saved, described(data.shuffle(seed=2)), "here")
    with pytest.raises(CheckpointMismatch, match="samples was 40 and is now 39"):
        check_same_run(saved, described(data.select(range(39))), "here")
