"""Why a run failed, for someone who has only its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepmark.report.history import read_history
from stepmark.report.page import write_report
from tests.support import commands
from tests.support.interference import install
from tests.support.ranks import Ranks
from tests.support.recipes import write_recipe
from tests.support.run_folders import read_status


def test_the_rank_that_failed_leaves_its_traceback_and_line(ranks: Ranks, tmp_path: Path) -> None:
    recipe, site = write_recipe(tmp_path, logging_steps=1), install(tmp_path / "site", 1, "raise")
    done = commands.run(ranks, tmp_path, "train", str(recipe), "--nproc", "2", site=site)
    folder = tmp_path / "out"
    assert done.returncode == 1
    trace = (folder / "failures" / "rank-1.txt").read_text()
    assert trace.startswith("== ")
    assert "Traceback (most recent call last)" in trace
    where = "sitecustomize.py, line "
    for told in (done.stderr, read_status(folder)["reason"], trace, write_report(folder).read_text()):
        assert "ValueError: the second step is bad (" in told
        assert where in told
        assert ", in misbehave)" in told


@pytest.mark.parametrize("nproc", [(), ("--nproc", "2")])
def test_a_run_that_fails_before_it_trains_says_so_in_its_folder(
    ranks: Ranks, tmp_path: Path, nproc: tuple[str, ...]
) -> None:
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xff")
    recipe = write_recipe(tmp_path, train_file=str(tmp_path / "bad.txt"))
    done = commands.run(ranks, tmp_path, "train", str(recipe), *nproc)
    folder = tmp_path / "out"
    assert done.returncode == 1
    status = read_status(folder)
    assert (status["state"], status["step"]) == ("failed", 0)
    assert "bad.txt" in status["reason"]
    history = read_history(folder)
    assert history.state == "failed"
    assert "bad.txt" in history.status["reason"]
    assert "DataError" in (folder / "failures" / "rank-0.txt").read_text()
    assert "bad.txt" in write_report(folder).read_text()
    (tmp_path / "bad.txt").write_text("")
    assert commands.run(ranks, tmp_path, "train", str(recipe), *nproc).returncode == 1
    assert read_status(folder)["reason"] != status["reason"], "the last failure counts"


def test_a_run_that_crashes_before_it_trains_has_failed(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": "one"}))
    recipe = write_recipe(tmp_path, config_name=str(tmp_path / "config"), config_overrides=None)
    done = commands.run(ranks, tmp_path, "train", str(recipe))
    assert done.returncode == 1, done.stderr
    assert read_status(tmp_path / "out")["state"] == "failed"
    assert read_status(tmp_path / "out")["reason"] in done.stderr
    assert "n_layer" in (tmp_path / "out" / "failures" / "rank-0.txt").read_text()


EXITING = """
import sys
if {at_import}:
    sys.exit(0)
def measure(prediction):
    sys.exit(0)
"""


@pytest.mark.parametrize(
    ("at_import", "nproc"),
    [(False, ()), (True, ()), (False, ("--nproc", "2", "--max_restarts", "1")), (True, ("--nproc", "1"))],
)
def test_code_of_the_users_that_exits_with_0_has_not_trained_the_model(
    ranks: Ranks, tmp_path: Path, at_import: bool, nproc: tuple[str, ...]
) -> None:
    (tmp_path / "exiting.py").write_text(EXITING.format(at_import=at_import))
    recipe = write_recipe(tmp_path, eval_strategy="steps", eval_steps=1, metrics="exiting:measure")
    done = commands.run(ranks, tmp_path, "train", str(recipe), *nproc)
    assert done.returncode == 1, done.stderr
    assert "SystemExit: 0 (exiting.py, line " in done.stderr
    assert "SystemExit: 0 (exiting.py, line " in read_status(tmp_path / "out")["reason"]
    assert read_status(tmp_path / "out")["state"] == "failed"


def test_a_wrong_call_leaves_nothing(ranks: Ranks, tmp_path: Path) -> None:
    done = commands.run(ranks, tmp_path, "train", str(write_recipe(tmp_path, lr_scheduler_type="none such")))
    assert done.returncode == 2
    assert not (tmp_path / "out" / "failures").exists()
