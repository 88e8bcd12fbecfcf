"""`stepmark sweep`: a run for each combination of values, refused early, resumed, interrupted as one run."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stepmark.cli.main import build_parser
from stepmark.cli.main import run as main
from stepmark.cli.sweep import plan_runs
from stepmark.cli.sweep import run as sweep_run
from stepmark.config.recipe import read_recipe
from stepmark.errors import UsageError
from stepmark.recipe.used_recipe import write_used_recipe
from stepmark.trainer.run_folder.run_log import EVENTS, METRICS, read_lines
from stepmark.trainer.run_folder.status import RunStatus
from tests.support import commands
from tests.support.ranks import Ranks
from tests.support.recipes import write_recipe


def sweep(recipe: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "stepmark", "sweep", str(recipe), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=recipe.parent)


def test_a_run_for_each_combination(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    flags = ["--learning_rate", "1e-4", "3e-4", "--max_steps", "5", "--seeds", "2", "--optim", "sgd", "adamw_torch"]
    runs = plan_runs(build_parser().parse_args(["sweep", str(recipe), *flags]))
    assert [one.name for one in runs[:3]] == [
        "learning_rate=1e-4,optim=sgd,seed=0",
        "learning_rate=1e-4,optim=sgd,seed=1",
        "learning_rate=1e-4,optim=adamw_torch,seed=0",
    ]
    assert len(runs) == 8
    for one in runs:
        training = one.recipe.training
        assert one.folder == tmp_path / "out" / one.name
        assert (training.max_steps, training.resume_from_checkpoint) == (5, True)
        assert f"learning_rate={training.learning_rate:.0e}".replace("e-0", "e-") in one.name
        assert f"seed={training.seed}" in one.name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learning_rate", "1e-4", "fast"], "learning_rate: should be a number, and is 'fast'"),
        (["--learning_rate", "1e-4", "-1"], "learning_rate: "),
        (["--learning_rat", "1e-4", "1e-3"], "learning_rat: is not a field; did you mean learning_rate?"),
        (["--learning_rate", "1e-4"], "sweep: nothing varies"),
        (["--learning_rate", "1e-4", "1e-4"], "learning_rate: two runs would have the folder learning_rate=1e-4"),
        (["--seeds", "0"], "--seeds: is a number of seeds, at least 1"),
        (["--seeds", "2", "--seed", "1"], "--seeds: is a number of seeds"),
        (["--seeds", "2", "--output_dir", "a", "b"], "output_dir: runs cannot differ in it"),
        (["--seeds", "2", "--jobs", "0"], "--jobs and --nproc: must be at least 1"),
        (["--train_file", "text.txt", "nowhere.txt"], "train_file: "),
    ],
)
def test_bad_values_are_refused_before_a_run_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", str(write_recipe(tmp_path)), *arguments]) == 2
    assert f"error: {message}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_s_folder_is_not_the_folder_of_a_sweep(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / METRICS).touch()
    with pytest.raises(UsageError, match="output_dir: .* is a run"):
        plan_runs(build_parser().parse_args(["sweep", str(recipe), "--seeds", "2"]))


def test_a_run_with_other_settings_is_not_taken_for_this_one(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    run = ["sweep", str(recipe), "--seeds", "2", "--print"]
    (first, _) = plan_runs(build_parser().parse_args(run))
    first.folder.mkdir(parents=True)
    write_used_recipe(first.folder, first.recipe)
    assert main(run) == 0
    assert main([*run, "--max_steps", "9"]) == 0
    for name, value in {"weight_decay": "0.5", "logging_steps": "3"}.items():
        with pytest.raises(UsageError, match=rf"^{name}: the run in .*seed=0 has .* {value}; give another output_dir"):
            sweep_run(build_parser().parse_args([*run, f"--{name}", value]))


def test_commands_for_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = write_recipe(tmp_path)
    assert main(["sweep", str(recipe), "--learning_rate", "1e-4", "3e-4", "--nproc", "2", "--print"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [line[:3] for line in lines] == [["stepmark", "train", str(recipe)]] * 2
    assert not (tmp_path / "out").exists()
    parsed = build_parser().parse_args(lines[1][1:])
    assert (parsed.nproc, parsed.learning_rate, parsed.resume_from_checkpoint) == (2, "3e-4", "true")
    assert Path(parsed.output_dir).resolve() == tmp_path / "out" / "learning_rate=3e-4"


def test_side_by_side_a_failure_ends_no_other_run(ranks: Ranks, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, logging_steps=1, eval_strategy="steps", eval_steps=2, max_eval_samples=2)
    values = ("{n_layer: 1, n_embd: 16, n_head: 2}", "{n_layers: 1}")
    done = commands.run(ranks, tmp_path, "sweep", str(recipe), "--config_overrides", *values, "--jobs", "2")
    out, err = done.stdout, done.stderr
    assert done.returncode == 1, err
    assert re.search(r"config_overrides=n_layers_1: error: config_overrides: .*n_layers", err)
    good = tmp_path / "out" / "config_overrides=n_layer_1_n_embd_16_n_head_2"
    assert RunStatus.read(good).state == "done"
    assert re.search(rf"{good.name} +done +2 +[\d.]+ +eval_loss [\d.]+ at step 2", out)
    assert re.search(r"config_overrides=n_layers_1 +failed +0", out)
    assert out.endswith("next: stepmark report out\n")


def test_ctrl_c_ends_a_sweep_which_goes_on_later(ranks: Ranks, tmp_path: Path) -> None:
    steps = 4000
    recipe = write_recipe(tmp_path, max_steps=steps, logging_steps=1, save_steps=100_000)
    first, second = (tmp_path / "out" / f"seed={seed}" for seed in (0, 1))
    job = sweep(recipe, "--seeds", "2")
    deadline = time.monotonic() + 200
    while not any("loss" in line for line in read_lines(first / METRICS)):
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(signal.SIGINT)
    _, err = job.communicate(timeout=100)
    assert job.returncode == 75, err
    assert "interrupted by SIGINT; the same command goes on" in err
    assert RunStatus.read(first).state == "interrupted"
    step = RunStatus.read(first).step
    assert 0 < step < steps
    assert (first / f"checkpoint-{step}").is_dir()
    assert not second.exists()

    again = ("sweep", str(recipe), "--seeds", "2", "--max_steps", str(step + 2))  # the same sweep, with less to do
    commands.run(ranks, tmp_path, *again).check_returncode()
    assert [line["step"] for line in read_lines(first / EVENTS) if line["event"] == "resumed"] == [step]
    assert [RunStatus.read(folder).state for folder in (first, second)] == ["done", "done"]
    written = [(folder / METRICS).read_bytes() for folder in (first, second)]
    done = commands.run(ranks, tmp_path, *again)
    assert (done.returncode, "[" in done.stderr) == (0, False), done.stderr
    assert [(folder / METRICS).read_bytes() for folder in (first, second)] == written
    assert re.search(r"seed=0 +done", done.stdout)
    assert read_recipe(str(second / "used_recipe.yaml"), {}).training.seed == 1
