"""The command line itself: help, version, exit codes, tracebacks, and what is imported for them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stepmark
from stepmark.cli.main import COMMANDS, run
from stepmark.config.fields import REFERENCE
from stepmark.config.recipe import all_fields
from stepmark.errors import CheckpointDamaged, UsageError
from stepmark.launch.supervisor import rank_command
from tests.support import commands
from tests.support.ranks import Ranks
from tests.support.recipes import write_recipe

HEAVY = ("torch", "torch_xla", "transformers", "datasets", "numpy", "pandas", "pyarrow", "rich", "matplotlib")


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


def test_no_heavy_import_for_help() -> None:
    calls = [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS), ["nope"]]
    code = (
        "import contextlib, sys\n"
        "from stepmark.cli.main import run\n"
        f"for arguments in {calls}:\n"
        "    with contextlib.suppress(SystemExit): run(arguments)\n"
        f"    if found := [name for name in {HEAVY} if name in sys.modules]: sys.exit(f'{{arguments}}: {{found}}')"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: stepmark ") == len(calls) - 2


def test_importing_stepmark_is_quick_and_names_are_there() -> None:
    done = python(f"import sys, stepmark; print([name for name in {HEAVY} if name in sys.modules], dir(stepmark))")
    assert done.stdout.startswith("[] ")
    for name in stepmark.__all__:
        assert getattr(stepmark, name).__name__ == stepmark._RENAMED.get(name, name)
        assert f"'{name}'" in done.stdout
    with pytest.raises(AttributeError, match="has no attribute 'nope'"):
        stepmark.nope  # noqa: B018


def test_python_m_stepmark(tmp_path: Path) -> None:
    for command in ([sys.executable, "-m", "stepmark"], [str(Path(sys.executable).parent / "stepmark")]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr) == (0, f"stepmark {stepmark.__version__}\n", "")


SCRIPT = str(Path(sys.executable).parent / "stepmark")
EVIL = "import pathlib\npathlib.Path({canary!r}).touch()\nraise SystemExit(9)\n"


def test_modules_of_the_current_folder_are_not_imported(tmp_path: Path) -> None:
    """Of a user's, or of a stranger's folder: neither by a command nor by the ranks that it starts."""
    canary, folder = tmp_path / "imported", tmp_path / "here"
    folder.mkdir()
    ours = ("xxhash", "queue", "argparse", "torch", "transformers", "numpy")
    for number, command in enumerate(([sys.executable, "-m", "stepmark"], rank_command([]), [SCRIPT])):
        for name in (*ours, "contextlib", "stepmark") if number else ours:  # Python's own -m imports these
            (folder / f"{name}.py").write_text(EVIL.format(canary=str(canary)))
        done = subprocess.run([*command, "inspect", "nowhere"], capture_output=True, text=True, cwd=folder)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert done.stderr.startswith("error: ")
        assert not canary.exists()


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1e3"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "1e3"}, "RANK"),
        ({"STEPMARK_SUPERVISOR": "abc"}, "STEPMARK_SUPERVISOR"),
        ({"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1e3"}, "SLURM_STEP_NUM_TASKS"),
    ],
)
def test_variables_that_are_no_numbers_are_one_line(
    ranks: Ranks, tmp_path: Path, variables: dict[str, str], name: str
) -> None:
    (tmp_path / "recipe.yaml").write_text("config_name: gpt2\ntokenizer_name: bytes\ndataset_name: python-stdlib\n")
    done = commands.run(ranks, tmp_path, "train", "recipe.yaml", "--output_dir", "out", "--device", "cpu", **variables)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith(f"error: the environment variable {name} must be an integer")
    assert done.stderr.count("\n") == 1


def help_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        run([*arguments, "--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_names_every_command_and_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    told = help_of(capsys)
    listed = [line.split()[0] for line in told.splitlines() if re.match(r"  \w+   ", line)]
    assert sorted(listed) == sorted(COMMANDS)
    assert f"Documentation: {REFERENCE.removesuffix('reference')}" in told
    assert max(map(len, told.splitlines())) < 112
    told = help_of(capsys, "train")
    assert "--nproc N" in told
    assert "--traceback" in told
    for name in all_fields():
        assert f"--{name} " in told
    assert "default: 5e-05" in told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the following arguments are required: COMMAND; see `stepmark --help`"),
        (["fly"], "argument COMMAND: invalid choice: 'fly'"),
        (["train", "--max_step", "3"], "max_step: is not a field; did you mean max_steps?"),  # and no abbreviations
        (["train", "--nproc"], "argument --nproc: expected one argument; see `stepmark train --help`"),
    ],
)
def test_a_wrong_call_is_2(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith(f"error: {words}")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Makes `stepmark train` raise the error that is put into the list."""
    errors: list[BaseException] = []

    def fail(parsed: Any) -> int:
        raise errors[0]

    monkeypatch.setattr(COMMANDS["train"], "run", fail)
    return errors


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UsageError("a: is wrong"), 2, "error: a: is wrong"),
        (CheckpointDamaged("x is\n damaged"), 1, "error: x is damaged"),
        (ZeroDivisionError("division by zero"), 1, "error: ZeroDivisionError: division by zero"),
        (MemoryError(), 1, "error: MemoryError"),
        (KeyboardInterrupt(), 1, "error: interrupted"),
    ],
)
def test_an_error_is_one_line(
    capsys: pytest.CaptureFixture[str], failing: list[BaseException], error: BaseException, code: int, line: str
) -> None:
    failing.append(error)
    assert run(["train"]) == code
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert told.startswith(line)


def test_a_traceback_on_request(capsys: pytest.CaptureFixture[str], failing: list[BaseException]) -> None:
    failing.append(UsageError("a: is wrong"))
    assert run(["train", "--traceback"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("Traceback (most recent call last):")
    assert told.splitlines()[-1].startswith("error: a: is wrong")


def test_the_code_of_a_command_is_the_code_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for code in (0, 75):
        monkeypatch.setattr(COMMANDS["train"], "run", lambda parsed, code=code: code)
        assert run(["train"]) == code


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_ranks_one_reports_a_wrong_call(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    slurm = {
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NODELIST": "a",
    }
    torchrun = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_PORT": "1"}
    for variables in (slurm, torchrun):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            assert run(["train", "--nope"]) == 2
        assert capsys.readouterr().err.count("error: ") == (1 if rank == 0 else 0)


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (["train", "r.yaml", "--nproc", "2"], ["train", "r.yaml"]),
        (["train", "--nproc=2", "r.yaml", "--bf16"], ["train", "r.yaml", "--bf16"]),
        (["train", "--nproc", "auto", "--min_nproc", "2", "r.yaml", "--min_nproc=2"], ["train", "r.yaml"]),
        (["train", "--run_name", "nproc", "--nproc", "2", "r.yaml"], ["train", "--run_name", "nproc", "r.yaml"]),
    ],
)
def test_ranks_get_the_same_call_without_nproc(arguments: list[str], kept: list[str]) -> None:
    assert rank_command(arguments) == [sys.executable, "-P", "-m", "stepmark", *kept]


def test_training_as_a_user_calls_it(tmp_path: Path) -> None:
    """A relative output folder is in the folder the user stands in; nothing goes to standard output."""
    recipe = write_recipe(tmp_path, output_dir="runs/a", logging_steps=1)
    done = subprocess.run(
        [sys.executable, "-m", "stepmark", "train", str(recipe), "--max_steps", "1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert "warn" not in done.stderr.lower()
    assert (tmp_path / "runs" / "a" / "checkpoint-1" / "manifest.json").exists()
    assert (tmp_path / "runs" / "a" / "model.safetensors").exists()


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["report", "RUN"]])
def test_a_reader_that_has_gone_ends_a_command_quietly(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "RUN").mkdir()
    (tmp_path / "RUN" / "metrics.jsonl").write_text("")
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "stepmark", *arguments]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, cwd=tmp_path, env=buffered, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.prove)])
def test_a_run_whose_standard_error_nobody_reads_goes_on(ranks: Ranks, tmp_path: Path, nproc: int) -> None:
    """As with `2>&1 | head -1`."""
    recipe = write_recipe(tmp_path, logging_steps=1)
    command = ["train", str(recipe), *(["--nproc", "2"] if nproc > 1 else [])]
    done = commands.run(ranks, tmp_path, *command, read=False)
    assert done.returncode == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("nproc", ["", pytest.param("--nproc 2", marks=pytest.mark.prove)])
def test_a_run_without_standard_streams_trains(tmp_path: Path, nproc: str) -> None:
    """As with `>&-`. No file gets the number of one, to which libraries print."""
    recipe = write_recipe(tmp_path, save_steps=1)
    shell = f'exec "$0" -m stepmark train "$1" {nproc} <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", shell, sys.executable, str(recipe)], timeout=240).returncode == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_broken_pipe_inside_a_command_is_an_error() -> None:
    """Only a reader of stdout that has gone is passed over."""
    script = (
        "import stepmark.cli.report as report\n"
        "def run(parsed): raise BrokenPipeError(32, 'Broken pipe')\n"
        "report.run = run\n"
        "from stepmark.__main__ import main\n"
        "main(['report', 'x'])"
    )
    done = python(script)
    assert done.returncode == 1
    assert done.stderr.startswith("error: BrokenPipeError: [Errno 32] Broken pipe")
