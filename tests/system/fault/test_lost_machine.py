"""A machine is lost with its disk: from a copy in a bucket the run goes on elsewhere, with the same losses."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stepmark.checkpoint.places import BucketPlace
from stepmark.filesystem.json_files import read_lines
from stepmark.filesystem.objects import Bucket
from tests.support import commands
from tests.support.buckets import SECRET, make_bucket, object_store
from tests.support.interference import install, install_brake
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
        other = tmp_path / "other"
        other.mkdir()
        write_recipe(other, **{**FIELDS, "resume_from_checkpoint": there})
        stepmark(ranks, other, *train)
        shutil.rmtree(lost / "out")
        assert "out: checkpoint-1: " in stepmark(ranks, lost, "copy", there, "out")
        assert SECRET not in "".join(path.read_text(errors="replace") for path in lost.rglob("*") if path.is_file())
    assert "checkpoint-1: good" in stepmark(ranks, lost, "verify", "out")
    stepmark(ranks, lost, *train)
    assert read_losses(lost / "out") == read_losses(whole / "out")
    assert sorted(read_losses(lost / "out")) == [1, 2, 3, 4]
    assert model_digest(lost / "out") == model_digest(other / "out") == model_digest(whole / "out")
    assert read_status(lost / "out")["state"] == "done"


BRAKED = {"logging_steps": 1, "save_steps": 1, "save_total_limit": 2, "learning_rate": 1e-2, "zero_1": True}
BRAKED |= {"max_steps": 30, "resume_from_checkpoint": True}


def signal_later(folder: Path, brake: Path, number: signal.Signals, enough: Callable[[], bool]) -> None:
    """Steps are slow until `enough` is true; then rank 0 of the run in the folder gets a signal."""
    brake.touch()

    def hit() -> None:
        while not enough():
            time.sleep(0.05)
        brake.unlink()
        os.kill(read_status(folder)["process"], number)

    threading.Thread(target=hit, daemon=True).start()


@pytest.mark.parametrize("place", ["mirror_to", "output_dir"])
def test_a_run_goes_on_from_the_bucket_by_the_same_command(ranks: Ranks, tmp_path: Path, place: str) -> None:
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    for folder in (whole, lost):
        folder.mkdir()
    write_recipe(whole, **BRAKED)
    train = ("train", "recipe.yaml", "--nproc", "2")
    stepmark(ranks, whole, *train)
    brake = tmp_path / "brake"
    with object_store() as proxy:
        there = f"{make_bucket(proxy)}/run"
        write_recipe(lost, **BRAKED, **{place: there})
        out = lost / "out" if place == "mirror_to" else lost / "cache" / "runs" / there.replace("://", "/")
        bucket = BucketPlace(Bucket(there))
        signal_later(out, brake, signal.SIGKILL, lambda: len(bucket.steps()) > 1)
        stepmark(ranks, lost, *train, code=1, site=install_brake(tmp_path / "site", brake))
        shutil.rmtree(out)
        newest = bucket.steps()[0]
        assert newest < 30
        stepmark(ranks, lost, *train)
        assert [line["step"] for line in read_lines(out / "events.jsonl") if line["event"] == "resumed"] == [newest]
        assert read_losses(out) == read_losses(whole / "out")
        assert sorted(read_losses(out)) == [*range(1, 31)]
        assert model_digest(out) == model_digest(whole / "out")
        assert bucket.steps() == [30, 29]
        for name in ("model.safetensors", "metrics.jsonl", "status.json"):
            assert (
                b"".join(map(bytes, bucket.read_other(name, (out / name).stat().st_size))) == (out / name).read_bytes()
            )
        kept = [path for path in lost.rglob("*") if path.is_file() and path.name != "stderr"]
        assert SECRET not in "".join(path.read_text(errors="replace") for path in kept)
        assert not [path for path in lost.rglob("*") if path.name.startswith("s3:")]
        write_recipe(lost, **{**BRAKED, "resume_from_checkpoint": None, place: there})
        shutil.rmtree(out)
        stepmark(ranks, lost, *train, code=2)
        assert f"{there} has checkpoints of an earlier run (checkpoint-30)" in (lost / "stderr").read_text()


def test_the_only_checkpoint_is_damaged_here_and_whole_there(ranks: Ranks, tmp_path: Path) -> None:
    whole, damaged = tmp_path / "whole", tmp_path / "damaged"
    fields = {**FIELDS, "save_total_limit": 1, "lr_scheduler_type": "constant"}
    with object_store() as proxy:
        there = f"{make_bucket(proxy)}/run"
        for folder, more in ((whole, {}), (damaged, {"mirror_to": there})):
            folder.mkdir()
            write_recipe(folder, **fields, **more)
            stepmark(ranks, folder, "train", "recipe.yaml", "--max_steps", "2")
        path = damaged / "out" / "checkpoint-2" / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        for folder in (whole, damaged):
            stepmark(ranks, folder, "train", "recipe.yaml")
        assert read_losses(damaged / "out") == read_losses(whole / "out")
        assert model_digest(damaged / "out") == model_digest(whole / "out")
        assert "damaged-checkpoint-2" in {path.name for path in (damaged / "out").iterdir()}


def test_a_signal_leaves_time_for_the_upload(ranks: Ranks, tmp_path: Path) -> None:
    brake = tmp_path / "brake"
    with object_store() as proxy:
        there = f"{make_bucket(proxy)}/run"
        write_recipe(tmp_path, **{**BRAKED, "save_steps": 100}, mirror_to=there)
        out = tmp_path / "out"
        signal_later(out, brake, signal.SIGTERM, lambda: len(read_losses(out)) > 1)
        train = ("train", "recipe.yaml", "--nproc", "2")
        stepmark(ranks, tmp_path, *train, code=75, site=install_brake(tmp_path / "site", brake))
        told = re.search(r"stopped after step (\d+), checkpoint-\1 is saved and in (\S+)", read_status(out)["reason"])
        assert told is not None
        assert told[2] == there
        assert BucketPlace(Bucket(there)).steps() == [int(told[1])]


def test_a_run_that_goes_on_from_an_older_checkpoint_leaves_the_later_ones(ranks: Ranks, tmp_path: Path) -> None:
    with object_store() as proxy:
        there = f"{make_bucket(proxy)}/run"
        write_recipe(tmp_path, **{**FIELDS, "max_steps": 4, "lr_scheduler_type": "constant"}, mirror_to=there)
        stepmark(ranks, tmp_path, "train", "recipe.yaml")
        before = read_losses(tmp_path / "out")
        older = ("--resume_from_checkpoint", "out/checkpoint-2", "--max_steps", "3")
        stepmark(ranks, tmp_path, "train", "recipe.yaml", *older)
        left = sorted(path.name for path in (tmp_path / "out").glob("left-*"))
        assert left == ["left-checkpoint-3", "left-checkpoint-4"]
        assert BucketPlace(Bucket(there)).steps() == [3, 2, 1]
        shutil.rmtree(tmp_path / "out")
        stepmark(ranks, tmp_path, "train", "recipe.yaml", "--max_steps", "4")
        assert read_losses(tmp_path / "out") == before


def test_the_best_model_is_not_lost(ranks: Ranks, tmp_path: Path) -> None:
    """Of a run whose best checkpoint is its first: the one with the greatest loss."""
    fields = {**BRAKED, "save_total_limit": 1, "zero_1": False, "eval_strategy": "steps", "eval_steps": 1}
    fields |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    whole, lost, brake = tmp_path / "whole", tmp_path / "lost", tmp_path / "brake"
    for folder in (whole, lost):
        folder.mkdir()
    write_recipe(whole, **fields)
    stepmark(ranks, whole, "train", "recipe.yaml")
    with object_store() as proxy:
        there = f"{make_bucket(proxy)}/run"
        write_recipe(lost, **fields, mirror_to=there)
        place = BucketPlace(Bucket(there))
        signal_later(lost / "out", brake, signal.SIGKILL, lambda: place.steps()[:1] >= [4])
        stepmark(
            ranks, lost, "train", "recipe.yaml", code=-signal.SIGKILL, site=install_brake(tmp_path / "site", brake)
        )
        shutil.rmtree(lost / "out")
        stepmark(ranks, lost, "train", "recipe.yaml")
        assert model_digest(lost / "out") == model_digest(whole / "out")
        assert place.steps() == [30, 1]


SCRIPT = """
import sys
from pathlib import Path
from stepmark import Trainer, TrainingArguments
from tests.support.programs import Blocks, tiny_model

args = TrainingArguments(output_dir=sys.argv[1], device="cpu", max_steps=2, save_steps=1, disable_tqdm=True)
trainer = Trainer(tiny_model(), args, train_dataset=Blocks(8))
trainer.train()
trainer.save_model()
Path(args.output_dir, "notes.txt").write_text("after training")
"""


def test_what_a_script_writes_after_training_is_uploaded(ranks: Ranks, tmp_path: Path) -> None:
    with object_store() as proxy:
        there = f"{make_bucket(proxy)}/run"
        variables = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        variables["STEPMARK_CACHE"] = str(tmp_path)
        done = ranks.script(SCRIPT, there, **variables)
        assert done.returncode == 0, done.stderr
        assert Bucket(there).read("notes.txt") == b"after training"
        folder = tmp_path / "runs" / there.replace("://", "/")
        assert Bucket(there).read("model.safetensors") == (folder / "model.safetensors").read_bytes()
        assert ranks.script(SCRIPT, there, **variables).returncode == 1  # it is another run, without resuming


def test_a_signal_ends_the_run_in_time_where_the_store_hangs(ranks: Ranks, tmp_path: Path) -> None:
    brake = tmp_path / "brake"
    with object_store() as proxy:
        proxy.delay = 600.0
        there = f"{make_bucket(proxy)}/run"
        write_recipe(tmp_path, **{**BRAKED, "max_steps": 100}, mirror_to=there, signal_grace=12)
        out, began = tmp_path / "out", []

        def hangs() -> bool:
            if len(read_losses(out)) < 2:
                return False
            proxy.fault = lambda *_: "late"
            began.append(time.monotonic())
            return True

        signal_later(out, brake, signal.SIGTERM, hangs)
        train = ("train", "recipe.yaml", "--nproc", "2")
        stepmark(ranks, tmp_path, *train, code=75, site=install_brake(tmp_path / "site", brake))
        reason = read_status(out)["reason"]
        assert f"in {there} yet: there was no time" in reason
        assert re.search(r"checkpoint-\d+ is saved; checkpoint-\d+", reason)
