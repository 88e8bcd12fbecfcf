"""A machine is lost with its disk: from a copy in a bucket the run goes on elsewhere, with the same losses."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from tests.support import commands
from tests.support.buckets import SECRET, make_bucket, object_store
from tests.support.interference import install
from tests.support.ranks import Ranks
from tests.support.recipes import write_recipe
from tests.support.run_folders import model_digest, read_losses, read_status

FIELDS = {"logging_steps": 1, "save_steps": 1, "async_save": False, "learning_rate": 1e-2, "zero_1": True}
FIELDS |= {"max_steps": 4, "resume_from_checkpoint": True}


def stepmark(ranks: Ranks, folder: Path, *arguments: str, code: int = 0, site: str | None = None) -> str:
    """What it prints."""
    variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    done = commands.run(ranks, folder, *arguments, site=site, **variables)
    assert done.returncode == code, done.stderr
    assert SECRET not in done.stdout + done.stderr
    return done.stdout


def test_a_run_whose_machine_is_gone(ranks: Ranks, tmp_path: Path) -> None:
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    for folder in (whole, lost):
        folder.mkdir()
        write_recipe(folder, **FIELDS)
    train = ("train", "recipe.yaml", "--nproc", "2")
    stepmark(ranks, whole, *train)
    stepmark(ranks, lost, *train, code=1, site=install(tmp_path / "site", 0, "kill", "batch"))
    with object_store() as proxy:
        there = f"{make_bucket(proxy)}/run"
        told = stepmark(ranks, lost, "copy", "out", there)
        assert re.findall(r"(checkpoint-\d+|beside checkpoints): \d+ files?, [\d.,]+ MB copied", told) == [
            "checkpoint-1",
            "beside checkpoints",
        ]
        shutil.rmtree(lost / "out")
        assert "out: checkpoint-1: " in stepmark(ranks, lost, "copy", there, "out")
        assert SECRET not in "".join(path.read_text(errors="replace") for path in lost.rglob("*") if path.is_file())
    assert "checkpoint-1: good" in stepmark(ranks, lost, "verify", "out")
    stepmark(ranks, lost, *train)
    assert read_losses(lost / "out") == read_losses(whole / "out")
    assert sorted(read_losses(lost / "out")) == [1, 2, 3, 4]
    assert model_digest(lost / "out") == model_digest(whole / "out")
    assert read_status(lost / "out")["state"] == "done"
