"""What scripts do with gradients: callbacks that look at them, several optimizers and trainings, collectives of their
own in the backward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import Ranks

PROGRAMS = "tests.support.gradient_programs"
FORMS: list[dict[str, Any]] = [{}, {"zero_1": True}, {"optim": "muon", "zero_1": True}]


@pytest.mark.parametrize(
    ("form", "dtype", "change"),
    [(FORMS[0], "bfloat16", "assign"), (FORMS[1], "float32", "clip"), (FORMS[1], "bfloat16", "nothing")],
)
def test_callbacks_see_the_mean_gradients_and_may_change_them(
    ranks: Ranks, tmp_path: Path, form: dict[str, Any], dtype: str, change: str
) -> None:
    options = {**form, "dtype": dtype}
    (one,) = ranks.run(f"{PROGRAMS}:look", str(tmp_path / "one"), 1, change, {"dtype": dtype}).check()
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    for found in ranks.run(f"{PROGRAMS}:look", str(tmp_path / "two"), 2, change, options, nproc=2).check():
        norms = [norm for _, norm in found["history"]]
        assert found["norms"] == pytest.approx(norms, rel=tolerance)
        factor = {"nothing": 1.0, "assign": 0.5}.get(change)
        if factor is not None:
            assert found["after"] == pytest.approx([factor * norm for norm in norms], rel=tolerance)
        for loss, expected in zip(found["history"], one["history"], strict=True):
            assert loss == pytest.approx(expected, rel=tolerance)


def test_callbacks_see_the_gradients_of_parameters_that_other_ranks_update(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(f"{PROGRAMS}:look", str(tmp_path), 2, "nothing", FORMS[2], nproc=2).check():
        assert found["norms"] == pytest.approx([norm for _, norm in found["history"]], rel=1e-5)


@pytest.mark.parametrize(
    ("nproc", "form", "more"),
    [
        (1, FORMS[0], {"dtype": "bfloat16"}),
        (2, FORMS[0], {"gradient_accumulation_steps": 2}),
        (2, FORMS[1], {"dtype": "bfloat16"}),
    ],
)
def test_a_model_is_trained_several_times(
    ranks: Ranks, tmp_path: Path, nproc: int, form: dict[str, Any], more: dict[str, Any]
) -> None:
    for found in ranks.run(f"{PROGRAMS}:train_twice", str(tmp_path), nproc, {**form, **more}, nproc=nproc).check():
        assert found["found"] == found["truth"]
        assert found["by_hand"][0] > found["by_hand"][1] > found["by_hand"][2]


@pytest.mark.parametrize(("announced", "shared"), [(True, True), (True, False), (False, True)])
def test_two_optimizers_of_one_backward_pass(ranks: Ranks, announced: bool, shared: bool) -> None:
    assert max(ranks.run(f"{PROGRAMS}:two_optimizers", announced, shared, nproc=2).check()) < 1e-6


def test_gradients_that_change_after_they_were_sent_are_an_error(ranks: Ranks) -> None:
    first, second, third = ranks.run(f"{PROGRAMS}:change_after_sending", "not announced", nproc=2).check()[0]
    assert first == second == third
    failed = ranks.run(f"{PROGRAMS}:change_after_sending", "announced", nproc=2)
    assert 0 not in failed.codes
    assert "gradients were changed after the step's last backward pass" in failed.logs[0]


@pytest.mark.parametrize("form", FORMS[:2], ids=["plain", "zero_1"])
def test_collectives_of_the_model_in_the_backward_pass(ranks: Ranks, tmp_path: Path, form: dict[str, Any]) -> None:
    """One rank has no gradient of some parameters, so that its buckets and the model's collectives come in another
    order there. The ranks' own losses differ from those of one rank, which sees more samples at once."""
    plain, other = ranks.run(f"{PROGRAMS}:contrast", str(tmp_path), 2, form, nproc=2).check()
    assert plain == other
    assert len(plain) == 7
