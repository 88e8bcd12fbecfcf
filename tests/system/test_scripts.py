"""Scripts that exist run with nothing but the import replaced: losses, what they leave on disk, killed and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.programs import LENGTH
from tests.support.ranks import Ranks
from tests.support.saved_models import EQUAL, difference, tensors_in

pytest.importorskip("datasets")
pytestmark = pytest.mark.filterwarnings("ignore")

from tests.support.script_programs import KINDS, run  # noqa: E402

PROGRAM = "tests.support.script_programs:run"
THEIRS = {"training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"}  # which hold pickles of their own


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.is_file()} - THEIRS


def results(folder: Path) -> dict[str, Any]:
    """What the program's files say, but for what depends on the time."""
    found: dict[str, Any] = {path.name: path.read_text() for path in folder.glob("*.txt")}
    path = folder / "all_results.json"
    numbers = json.loads(path.read_text()) if path.exists() else {}
    timed = ("_runtime", "_per_second", "total_flos")
    return found | {name: value for name, value in numbers.items() if not name.endswith(timed)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_script_leaves_what_it_leaves_with_transformers(tmp_path: Path, kind: str) -> None:
    options = {"train_sampling_strategy": "sequential", "per_device_eval_batch_size": 2}
    theirs = run(kind, str(tmp_path / "theirs"), {**options, "plain": True})
    ours = run(kind, str(tmp_path / "ours"), options)
    assert len(ours) == 8
    dropout = kind in ("clm", "glue", "qa")  # whose masks are drawn in another way
    factor = (LENGTH - 1) / LENGTH if kind == "llava" else 1  # theirs counts labels of GPT-2 that are no target
    for one, other in zip(ours, theirs, strict=True):
        assert one["learning_rate"] == pytest.approx(other["learning_rate"], rel=1e-9)
        assert dropout or factor * one["loss"] == pytest.approx(other["loss"], rel=1e-4)
    assert left(tmp_path / "ours") >= left(tmp_path / "theirs")
    assert results(tmp_path / "ours").keys() >= results(tmp_path / "theirs").keys()
    mine, its = (tensors_in(tmp_path / each) for each in ("ours", "theirs"))
    assert mine.keys() == its.keys()
    for step in (3, 6, 8):
        assert left(tmp_path / "ours" / f"checkpoint-{step}") >= left(tmp_path / "theirs" / f"checkpoint-{step}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_script_ends_with_the_same_folder(tmp_path: Path, ranks: Ranks, kind: str) -> None:
    assert ranks.run(PROGRAM, kind, str(tmp_path / "killed"), {"kill_at": 5}, nproc=1).codes == [-9]
    resumed = run(kind, str(tmp_path / "killed"), {})
    complete = run(kind, str(tmp_path / "complete"), {})
    assert resumed == complete
    assert results(tmp_path / "killed") == results(tmp_path / "complete")
    assert left(tmp_path / "killed") == left(tmp_path / "complete")
    if kind == "llava":
        one, other = (torch.load(tmp_path / each / "mm_projector.bin") for each in ("killed", "complete"))
        assert all(other[name].equal(tensor) for name, tensor in one.items())
        return
    assert difference(tmp_path / "complete", tmp_path / "killed") == EQUAL
    if kind in ("clm", "fastchat"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "killed")
        assert sum(each.numel() for each in model.parameters()) > 0
