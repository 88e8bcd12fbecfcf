"""On a lazy device saving and restoring change no value, replace no tensor, and compile no graph."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import Ranks

TRAIN = "tests.system.distributed.checkpoint_programs:train"


@pytest.mark.xla
@pytest.mark.parametrize("nproc", [1, 2])
def test_saving_and_restoring_compile_nothing(ranks: Ranks, tmp_path: Path, nproc: int) -> None:
    plain = ranks.run(TRAIN, str(tmp_path / "a"), 6, False, False, nproc=nproc).check()
    saving = ranks.run(TRAIN, str(tmp_path / "b"), 6, True, False, nproc=nproc).check()
    assert saving == plain
    ranks.run(TRAIN, str(tmp_path / "c"), 3, True, False, nproc=nproc).check()
    resumed = ranks.run(TRAIN, str(tmp_path / "c"), 6, True, True, nproc=nproc).check()
    for whole, rest in zip(plain, resumed, strict=True):
        assert rest["losses"] == whole["losses"][3:]
        assert rest["values"] == whole["values"]
        assert rest["compilations"] <= whole["compilations"]


@pytest.mark.xla
def test_memory_on_the_way_to_the_device_is_not_lent_too_early(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run("tests.system.distributed.checkpoint_programs:fill_large", str(tmp_path)).check() == [[]]
