"""What callbacks may change, and call, at every event of a step: on each kind of sharding as on one rank, or refused by
name. docs/hooks.md says the same as a table."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.support.hook_programs import ACTIONS, CALLS, EVENTS, FORMS, THEN
from tests.support.ranks import Ranks

PROGRAMS = "tests.support.hook_programs"
TOLERANCE = {"float32": 2e-4, "bfloat16": 1e-2}  # of an update of 0.05 to each element, by which the outcomes differ

ADDED = "^optimizer: a parameter was added to its groups"  # refused everywhere
IN_FLIGHT = "on_substep_end: parameters were changed, frozen or unfrozen"
REFUSED = {("pp", "on_substep_end", each): IN_FLIGHT for each in ("new data", "data in place", "frozen", "thawed")}
OF_PART = "clip_grad_norm_: would clip by the norm of this rank's part"
REFUSED |= {(form, event, "clipped"): OF_PART for form in ("tp", "pp") for event in EVENTS[1:4]}


def possible(cell: dict[str, Any]) -> bool:
    given_optimizer = cell["action"] == "thawed"
    refused = (cell["form"], cell["event"], cell["action"]) in REFUSED
    # Between micro-batches a rank clips what it has added up itself, which is no sum that one rank has there.
    own_sum = cell["event"] == "on_substep_end" and cell["action"] == "clipped" and cell["form"] in ("dp", "zero_1")
    given_optimizer &= "zero_1" in cell["form"]
    return cell["form"] != "one rank" and not (refused or given_optimizer or own_sum)


SAMPLE = ("zero_1", "full_shard", "tp", "pp", "masters, zero_1")
CHANGES = (  # every event and every action
    ("on_step_begin", "data in place"),
    ("on_substep_end", "no gradient"),
    ("on_substep_end", "gradient in place"),
    ("on_pre_optimizer_step", "new gradient"),
    ("on_pre_optimizer_step", "no gradients"),
    ("on_pre_optimizer_step", "gradients of zeros"),
    ("on_pre_optimizer_step", "frozen"),
    ("on_pre_optimizer_step", "clipped"),
    ("on_optimizer_step", "new data"),
    ("on_optimizer_step", "added to the model"),
    ("on_step_end", "thawed"),
    ("on_step_end", "added to the optimizer"),
    ("on_evaluate", "data in place"),
    ("on_save", "new data"),
)
ALL = {
    form: [pair for pair in product(EVENTS, ACTIONS) if possible({"form": form, "event": pair[0], "action": pair[1]})]
    for form in FORMS
    if form != "one rank"
}


def alone(ranks: Ranks, folder: Path, cells: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    (found,) = ranks.run(f"{PROGRAMS}:cells", str(folder), "one rank", cells, timeout=1200).check()
    return dict(zip(cells, found, strict=True))


@pytest.fixture(scope="module")
def expected(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    return alone(ranks, tmp_path_factory.mktemp("one"), list(CHANGES))


def check(
    ranks: Ranks, folder: Path, form: str, cells: list[tuple[str, str]], expected: dict[tuple[str, str], Any]
) -> None:
    """Each cell, an event and an action, as on one rank."""
    nproc, options = FORMS[form]
    found = ranks.run(f"{PROGRAMS}:cells", str(folder), form, cells, nproc=nproc, timeout=1200).check()[0]
    tolerance = TOLERANCE[options.get("dtype", "float32")]
    wrong = []
    for cell, other in zip(cells, found, strict=True):
        one = expected[cell]
        if cell[1].endswith("the optimizer"):
            difference = "" if all(re.match(ADDED, str(each)) for each in (one, other)) else f"not refused: {other}"
        else:
            difference = differs(one, other, tolerance)
        if difference:
            wrong.append(f"{form}, {', '.join(cell)}: {difference}")
    assert not wrong, "\n".join(wrong)


def differs(one: Any, other: Any, tolerance: float) -> str:
    """How the outcome differs from that of one rank; nothing where it does not."""
    if isinstance(one, str) or isinstance(other, str):
        return f"refused: {one!r:.200} and {other!r:.200}"
    if len(one["losses"]) != len(other["losses"]):
        return f"{len(other['losses'])} losses for {len(one['losses'])}"
    far = max(abs(a - b) / max(abs(a), 1.0) for a, b in zip(one["losses"], other["losses"], strict=True))
    if far > 10 * tolerance:
        return f"losses differ by {far:.1e}"
    for key in [key for key in ("weights", "written") if key in one]:
        if one[key].keys() != other[key].keys():
            return f"{key}: other tensors: {sorted(one[key].keys() ^ other[key].keys())}"
        for name, numbers in one[key].items():
            far = max(abs(a - b) for a, b in zip(numbers, other[key][name], strict=True))
            if far > tolerance:
                return f"{key}: {name} differs by {far:.1e}"
    return ""


@pytest.mark.parametrize("form", SAMPLE)
def test_a_sample_of_changes(ranks: Ranks, tmp_path: Path, form: str, expected: dict[tuple[str, str], Any]) -> None:
    check(ranks, tmp_path, form, [cell for cell in CHANGES if cell in ALL[form]], expected)


@pytest.mark.parametrize(("form", "event", "action"), sorted(REFUSED))
def test_what_would_be_of_a_part_of_the_step_or_the_model_is_refused(
    ranks: Ranks, tmp_path: Path, form: str, event: str, action: str
) -> None:
    found = ranks.run(f"{PROGRAMS}:cell", str(tmp_path), form, event, action, nproc=FORMS[form][0])
    assert 0 not in found.codes
    assert any(REFUSED[form, event, action] in each for each in found.logs)


def test_a_parameter_may_be_added_while_a_stage_has_passes_to_come(ranks: Ranks, tmp_path: Path) -> None:
    """It is none that they use."""
    cells = [("on_substep_end", "added to the model")]
    check(ranks, tmp_path / "pp", "pp", cells, alone(ranks, tmp_path / "one", cells))


@pytest.mark.prove
@pytest.mark.parametrize("form", ALL)
def test_every_change(ranks: Ranks, tmp_path: Path, form: str) -> None:
    check(ranks, tmp_path / "form", form, ALL[form], alone(ranks, tmp_path / "one", ALL[form]))


CALLED = [
    ("full_shard", list(zip(CALLS, (*THEN, "save"), strict=True))),
    *(pytest.param(form, list(product(CALLS, THEN)), marks=pytest.mark.prove) for form in ALL),
]


@pytest.mark.parametrize(("form", "cells"), CALLED)
def test_calls_of_the_model_between_steps(
    ranks: Ranks, tmp_path: Path, form: str, cells: list[tuple[str, str]]
) -> None:
    cells = [cell for cell in cells if form != "pp" or cell[0] == "evaluate"]
    nproc, options = FORMS[form]
    one = ranks.run(f"{PROGRAMS}:calls", str(tmp_path / "one"), "one rank", cells, timeout=600).check()[0]
    other = ranks.run(f"{PROGRAMS}:calls", str(tmp_path / "form"), form, cells, nproc=nproc, timeout=600).check()[0]
    tolerance = TOLERANCE[options.get("dtype", "float32")]
    wrong = {cell: differs(*pair, tolerance) for cell, pair in zip(cells, zip(one, other, strict=True), strict=True)}
    assert not any(wrong.values()), wrong
