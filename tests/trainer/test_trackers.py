"""W&B, MLflow, TensorBoard and trackio keep one run over kills and resumptions: the libraries themselves, offline."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from stepmark import Trainer, TrainingArguments
from stepmark.filesystem.json_files import read_lines
from stepmark.report.page import write_report
from tests.support.programs import Blocks, tiny_model
from tests.support.ranks import Ranks

HERE = "tests.trainer.test_trackers"


class LogsOwn(TrainerCallback):
    """Logs a value of its own in every step, from within it."""

    trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.trainer.log({"mine": state.global_step / 2})


class Kills(TrainerCallback):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if state.global_step == self.step and "loss" in logs:
            if "wandb" in sys.modules:  # what these have not written is lost
                sys.modules["wandb"].finish()
            time.sleep(3.0 if "trackio" in args.report_to else 0.0)
            os.kill(os.getpid(), signal.SIGKILL)


def train(folder: str, tracker: str, kill_at: int | None, **fields: Any) -> None:
    settings: dict[str, Any] = {"max_steps": 9, "save_steps": 4, "logging_steps": 1, "async_save": False}
    settings |= {"disable_tqdm": True, "device": "cpu", "learning_rate": 1e-3, "report_to": [tracker]}
    arguments = TrainingArguments(folder, **{**settings, **fields})
    own = LogsOwn()
    trainer = Trainer(tiny_model(), arguments, train_dataset=Blocks(64), callbacks=[own, Kills(kill_at)])
    own.trainer = trainer
    trainer.train(resume_from_checkpoint=True)


def attempt(folder: str, tracker: str, kill_at: int | None, batch: int) -> None:
    train(folder, tracker, kill_at, per_device_train_batch_size=batch)
    if tracker == "wandb":  # as at the end of a process
        sys.modules["wandb"].finish()


Read = Callable[[Path], dict[str, dict[str, list[int]]]]


def tensorboard_runs(root: Path) -> dict[str, dict[str, list[int]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = {}
    for folder in {path.parent for path in root.rglob("events.out.*")}:
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        names = {"loss": "train/loss", "mine": "train/mine"}
        found[str(folder)] = {name: [each.step for each in events.Scalars(tag)] for name, tag in names.items()}
    return found


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records of W&B's file, in LevelDB's format: after a header of 7 bytes, blocks of 32 KiB of chunks, each with
    a checksum, its length and its kind: 1 whole, 2 first, 3 middle, 4 last. A killed process leaves the last undone."""
    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


def wandb_runs(root: Path) -> dict[str, dict[str, list[int]]]:
    from wandb.proto.wandb_internal_pb2 import Record

    found: dict[str, dict[str, list[int]]] = {}
    for path in sorted(root.rglob("*.wandb")):
        steps = found.setdefault(path.stem.removeprefix("run-"), {"loss": [], "mine": []})
        for data in wandb_records(path):
            record = Record()
            record.ParseFromString(data)
            items = {(each.key or "/".join(each.nested_key)): each.value_json for each in record.history.item}
            for name, known in steps.items():
                if f"train/{name}" in items:
                    known.append(int(items["train/global_step"]))
    return found


def mlflow_runs(root: Path) -> dict[str, dict[str, list[int]]]:
    from mlflow import MlflowClient

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = MlflowClient(f"file://{root}/mlruns")
    runs = [each.info.run_id for each in client.search_runs(["0"])]
    return {
        run: {name: [each.step for each in client.get_metric_history(run, name)] for name in ("loss", "mine")}
        for run in runs
    }


def trackio_runs(root: Path) -> dict[str, dict[str, list[int]]]:
    import sqlite3

    found: dict[str, dict[str, list[int]]] = {}
    for path in (root / "trackio").glob("*.db"):
        with sqlite3.connect(path) as store:
            for name, text in store.execute("select run_name, metrics from metrics order by rowid"):
                steps, metrics = found.setdefault(name, {"loss": [], "mine": []}), json.loads(text)
                for key in steps:
                    if f"train/{key}" in metrics:
                        steps[key].append(int(metrics["train/global_step"]))
    return found


@pytest.mark.parametrize(
    ("tracker", "read"),
    [("tensorboard", tensorboard_runs), ("wandb", wandb_runs), ("mlflow", mlflow_runs), ("trackio", trackio_runs)],
)
def test_a_tracker_has_one_run_and_every_step_once(tmp_path: Path, ranks: Ranks, tracker: str, read: Read) -> None:
    """A process is killed in step 7, whose log it has sent; the next goes on after step 4, with other batches."""
    pytest.importorskip(tracker)
    environment = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"file://{tmp_path}/mlruns",
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "MLFLOW_ENABLE_ASYNC_LOGGING": "false",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    killed = ranks.run(f"{HERE}:attempt", one, tracker, 7, 2, environment=environment)
    assert killed.codes == [-signal.SIGKILL], killed.logs
    ranks.run(f"{HERE}:attempt", one, tracker, None, 4, environment=environment).check()
    (run,) = read(tmp_path).values()
    for steps in run.values():
        assert sorted(steps) == list(range(1, 10))
    ranks.run(f"{HERE}:attempt", other, tracker, None, 2, environment=environment).check()
    assert len(read(tmp_path)) == 2


def test_own_values_are_saved_and_drawn(tmp_path: Path, ranks: Ranks) -> None:
    folder = tmp_path / "one"
    assert ranks.run(f"{HERE}:attempt", str(folder), "none", 7, 2).codes == [-signal.SIGKILL]
    ranks.run(f"{HERE}:attempt", str(folder), "none", None, 2).check()
    state = json.loads((folder / "checkpoint-9" / "trainer_state.json").read_text())
    own = [(line["step"], line["mine"]) for line in state["log_history"] if "mine" in line]
    assert own == [(step, step / 2) for step in range(1, 10)]
    lines = [line["step"] for line in read_lines(folder / "metrics.jsonl") if "mine" in line]
    assert lines == [*range(1, 8), *range(5, 10)]
    write_report(folder, [], tmp_path / "report.html", tmp_path / "csv")
    drawn = (tmp_path / "csv" / "mine.csv").read_text().splitlines()
    assert len(drawn) == 1 + 9
