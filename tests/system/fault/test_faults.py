"""Whichever call of a save fails, the old state or the new one is restored, bit for bit, and the next save works.

`make fault` makes every call fail, `make fault SAMPLE=6` every sixth, and `make test` a few of them. The saves and
restores are in tests/support/scenarios.py.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.faults import KINDS
from tests.support.scenarios import RANKS, SCENARIOS, Point, prepare_all, run_points

MOST_CALLS = 400  # of one rank in one scenario; reached by none
EVERY = int(os.environ.get("STEPMARK_FAULT_SAMPLE", "1"))  # of the calls that fail; more than 1 for a sample


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # imports much of torch, here instead of in each rank
    folder = tmp_path_factory.mktemp("faults")
    prepare_all(folder / "prepared", list(SCENARIOS))
    return folder


def try_points(points: Iterator[Point], folder: Path, at_once: int = 12) -> int:
    """Runs them; how many of them came to their call."""
    tried, problems = 0, []
    for _, reached, problem in run_points(points, folder, at_once):
        tried += reached
        problems += [problem] if problem else []
    assert not problems, f"{len(problems)} of {tried}:\n" + "\n".join(problems[:10])
    return tried


def sample() -> list[Point]:
    generator = random.Random(os.environ.get("STEPMARK_FAULT_SEED", "1"))
    pairs = list(itertools.product(SCENARIOS, KINDS))
    return [
        Point(scenario, kind, generator.randrange(RANKS), generator.randrange(1, 70), alone=generator.random() < 0.1)
        for scenario, kind in generator.sample(pairs, len(pairs) // 4)
    ]


def test_a_sample_of_all_faults(prepared: Path) -> None:
    points = sample()
    assert try_points(iter(points), prepared) > len(points) // 2


@pytest.mark.prove
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_call_fails_once(
    prepared: Path, record_property: Callable[[str, object], None], scenario: str, kind: str
) -> None:
    """For each rank, until the number is beyond the last call."""
    tried = 0
    for rank in range(RANKS):
        numbers = range(1 + random.Random(f"{scenario}-{kind}-{rank}").randrange(EVERY), MOST_CALLS, EVERY)
        for batch in (numbers[first : first + 16] for first in range(0, len(numbers), 16)):
            points = (Point(scenario, kind, rank, at, alone=at % 10 == 0) for at in batch)
            reached = try_points(points, prepared)
            tried += reached
            if reached < len(batch) and (kind != "short-write" or not reached):
                break
        else:
            pytest.fail(f"rank {rank} makes more than {MOST_CALLS} calls")
    record_property("points", tried)
