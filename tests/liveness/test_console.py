"""What is printed while a run trains: shaped, and kept in the run's folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from stepmark.cli.main import run
from stepmark.liveness import console
from stepmark.liveness.console import CONSOLE, MOST_KEPT
from stepmark.liveness.process_exit import print_stacks, say
from tests.support import commands
from tests.support.ranks import Ranks
from tests.support.recipes import write_recipe

LEVELS = {"debug", "info", "warning", "error", "critical"}


def objects(text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.splitlines() if "[c10d]" not in line]  # which torch writes itself, under load
    found = [json.loads(line) for line in lines]
    assert all({"time", "level", "rank"} <= each.keys() and each["level"] in LEVELS for each in found)
    return found


def kept(folder: Path, name: str = "rank-0") -> list[str]:
    return (folder / CONSOLE / f"{name}.txt").read_text().splitlines()


LINES = """
import logging, sys, traceback, warnings
from stepmark.liveness import console

console.install("json")
print("begins", file=sys.stderr)
logging.getLogger("theirs").warning("a %s", "warning")
logging.basicConfig(format="%(name)s: %(message)s")
logging.getLogger("theirs").critical("two\\nlines")
warnings.warn("old")
print("error: it failed", file=sys.stderr)
try:
    raise KeyError("caught")
except KeyError:
    traceback.print_exc()
print('{"message": "theirs"}', file=sys.stderr)
print("half a line, ", end="", file=sys.stderr)
print("and the rest", file=sys.stderr)
raise ValueError("absent")
"""


def test_every_line_is_an_object_with_its_level() -> None:
    environment = {**os.environ, "RANK": "3"}
    done = subprocess.run([sys.executable, "-c", LINES], capture_output=True, text=True, env=environment, timeout=60)
    found = objects(done.stderr)
    assert {each["rank"] for each in found} == {3}
    levels = {each["message"].strip(): each["level"] for each in found}
    for message, level in {
        "begins": "info",
        "a warning": "warning",
        "theirs: two": "critical",
        "lines": "critical",
        "error: it failed": "error",
        "KeyError: 'caught'": "error",
        '{"message": "theirs"}': "info",
        "half a line, and the rest": "info",
        "ValueError: absent": "error",
    }.items():
        assert levels.pop(message) == level
    assert levels.pop(next(message for message in levels if message.endswith("UserWarning: old"))) == "warning"
    assert set(levels.values()) <= {"error"}  # the lines of tracebacks


def test_lines_are_kept_as_they_stand_in_the_end(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    console.install("text")
    print("before the folder is known", file=sys.stderr)
    console.keep_console(tmp_path)
    for shown in range(3):
        print(f"\r\x1b[2K{shown} of 3", end="", file=sys.stderr)
    print("\r\x1b[31mdone\x1b[0m", file=sys.stderr)
    other = threading.Thread(target=lambda: print("of a thread", file=sys.stderr))
    print("of the main ", end="", file=sys.stderr)
    other.start()
    other.join()
    print("thread", file=sys.stderr)
    title, *lines = kept(tmp_path)
    assert title.startswith("== ")
    assert f"process {os.getpid()}" in title
    assert lines == ["before the folder is known", "done", "of a thread", "of the main thread"]
    assert "\x1b[31mdone" in capsys.readouterr().err


def test_what_is_kept_is_bounded(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    console.install("text")
    print("x\n" * 5000, file=sys.stderr)
    console.keep_console(tmp_path)
    for number in range(400):
        print(f"{number} " + "y" * 20_000, file=sys.stderr)
    sizes = [path.stat().st_size for path in (tmp_path / CONSOLE).iterdir()]
    assert len(sizes) == 2
    assert sum(sizes) < 2.1 * MOST_KEPT
    assert kept(tmp_path)[-1][:5] == "399 y"


def test_a_folder_that_is_gone_or_full_ends_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    console.install("text")
    console.keep_console(tmp_path / "run")
    (tmp_path / "run" / CONSOLE / "rank-0.txt").unlink()
    (tmp_path / "run" / CONSOLE).rmdir()
    print("still printed", file=sys.stderr)
    assert not list((tmp_path / "run").iterdir())
    (tmp_path / "file").touch()
    console.keep_console(tmp_path / "file")
    print("too", file=sys.stderr)
    assert capsys.readouterr().err == "still printed\ntoo\n"


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_what_goes_past_the_stream_is_shaped_and_kept(
    log_format: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    console.install(log_format)
    console.keep_console(tmp_path)
    say("error: rank 1: gone\nsecond line")
    print_stacks("a deadline was missed")
    printed = capfd.readouterr().err
    lines = [json.loads(each)["message"] for each in kept(tmp_path)] if log_format == "json" else kept(tmp_path)
    assert lines[1:3] == ["error: rank 1: gone", "second line"]
    assert any("deadline" in line for line in lines)
    assert any("test_console.py" in line and line.startswith("  File") for line in lines)
    if log_format == "json":
        assert objects(printed)[0]["level"] == "error"
    assert printed.splitlines() == kept(tmp_path)[1:]


BAR_AND_LINE = """
import sys
from stepmark.liveness.process_exit import say

sys.stderr.write("training 3/9")
sys.stderr.flush()
say("interrupted")
"""


@pytest.mark.parametrize(
    ("terminal", "shown"), [(True, b"training 3/9\r\x1b[Kinterrupted\r\n"), (False, b"training 3/9interrupted\n")]
)
def test_a_line_on_a_terminal_stands_in_place_of_the_progress_bar(terminal: bool, shown: bytes) -> None:
    reader, writer = os.openpty() if terminal else os.pipe()
    try:
        subprocess.run([sys.executable, "-c", BAR_AND_LINE], stderr=writer, check=True, timeout=60)
        assert os.read(reader, 1000) == shown
    finally:
        os.close(reader)
        os.close(writer)


def test_a_run_keeps_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", str(write_recipe(tmp_path, logging_steps=1))]) == 0
    printed = capsys.readouterr().err.splitlines()
    assert kept(tmp_path / "out")[1:] == printed
    assert any("step 1/2" in line for line in printed)


def test_a_run_that_fails_before_training_keeps_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").touch()
    assert run(["train", str(write_recipe(tmp_path, log_format="json"))]) == 1
    printed = objects(capsys.readouterr().err)
    assert printed[-1]["level"] == "error"
    assert "text.txt" in json.loads(kept(tmp_path / "out")[-1])["message"]
    assert run(["inspect", str(tmp_path / "out")]) == 0
    assert "failures/rank-0.txt" in capsys.readouterr().out


def test_a_wrong_call_leaves_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["train", str(write_recipe(tmp_path)), "--learning_rate", "fast"]) == 2
    assert run(["train", str(write_recipe(tmp_path)), "--optim", "newton"]) == 2
    assert not (tmp_path / "out").exists()
    capsys.readouterr()


SCRIPT = """
import sys
from pathlib import Path
from transformers import TrainerCallback
from tests.trainer.test_training_loop import trainer

class Fails(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        print("user line", file=sys.stderr)
        raise KeyError("absent")

trainer(Path(sys.argv[1]), Fails(), log_format="json")[0].train()
"""


def test_a_scripts_traceback_is_kept_too(tmp_path: Path, ranks: Ranks) -> None:
    done = ranks.script(SCRIPT, str(tmp_path), timeout=240)
    assert done.returncode == 1
    lines = [json.loads(line) for line in kept(tmp_path)]
    assert [line["level"] for line in lines if line["message"] == "user line"] == ["info"]
    assert [line["level"] for line in lines if line["message"] == "KeyError: 'absent'"] == ["error"]
    assert "KeyError: 'absent'" in done.stderr


def test_ranks_and_launcher_have_a_file_each(tmp_path: Path, ranks: Ranks) -> None:
    recipe = write_recipe(tmp_path, learning_rate=1e30, max_grad_norm=0.0, max_steps=8, stop_on_nan=1, logging_steps=1)
    done = commands.run(ranks, tmp_path, "train", str(recipe), "--nproc", "2", "--log_format", "json")
    assert done.returncode == 1
    found = objects(done.stderr)
    assert found[-1]["level"] == "error"
    assert found[-1]["rank"] is None
    assert json.loads(kept(tmp_path / "out", "launcher")[-1]) == found[-1]
    assert any("step 1" in line or '"step": 1' in line for line in kept(tmp_path / "out"))
