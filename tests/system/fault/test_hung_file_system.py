"""The main thread hangs in a file system, with the log's lock: what guards the run acts all the same, and in time."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from stepmark.trainer.run_folder import run_log
from tests.support import programs
from tests.support.ranks import Ranks
from tests.support.uninterruptible import wait_uninterruptibly

HANGS_AT = 2  # the step


def train_until_it_hangs(settings: dict[str, Any], signalled: bool, interruptible: bool = True) -> Any:
    """From a step on, rank 0's log and status hang in the kernel: in opening a pipe that nobody reads, or as on a hard
    mount, where the kernel keeps signals from the main thread."""
    pipe = Path(settings["output_dir"]).parent / f"pipe-{os.environ.get('RANK', '0')}"
    os.mkfifo(pipe)
    append, replace = run_log.append_line, run_log.replace_json
    hung = threading.Event()

    def hang_or_append(path: Path, values: Any, **named: Any) -> None:
        if path.name == "metrics.jsonl" and values.get("step", 0) >= HANGS_AT:
            hung.set()
            if signalled:
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        if hung.is_set():
            os.open(pipe, os.O_WRONLY) if interruptible else wait_uninterruptibly(40)
        append(path, values, **named)

    def hang_or_replace(path: Path, content: Any, **named: Any) -> None:
        if hung.is_set():
            os.open(pipe, os.O_WRONLY)
        replace(path, content, **named)

    run_log.append_line, run_log.replace_json = hang_or_append, hang_or_replace
    return programs.train(settings)


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder / "out"),
        "samples": 25,
        "per_device_train_batch_size": 2,
        "max_steps": 6,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 100,
        **more,
    }


@pytest.mark.parametrize("interruptible", [True, False])
def test_a_signal_ends_the_run_within_its_grace(ranks: Ranks, tmp_path: Path, interruptible: bool) -> None:
    ended = ranks.run(train_until_it_hangs, options(tmp_path, signal_grace=3), True, interruptible, timeout=30)
    assert ended.codes == [75], ended.logs
    assert "SIGTERM: " in ended.logs[0]
    assert "the last checkpoint stands" in ended.logs[0]


def test_a_rank_that_is_stopped_is_named(ranks: Ranks, tmp_path: Path) -> None:
    stopped = {"event": "on_step_end", "step": HANGS_AT, "ranks": [1], "numbers": [int(signal.SIGSTOP)]}
    settings = options(tmp_path, save_timeout=2.0, signal_at=stopped)
    ended = ranks.run(train_until_it_hangs, settings, False, nproc=2, timeout=60)
    assert ended.codes == [1, None], ended.logs
    assert "error: rank 0: stuck: rank 1 on" in ended.logs[0]
    assert "no heartbeat for 2 s (save_timeout: 2)" in ended.logs[0]
