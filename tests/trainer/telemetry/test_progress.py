"""What a run prints where nobody watches a terminal: a banner, a line for each log, and how to go on."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from stepmark import Trainer, TrainingArguments
from stepmark.cli.main import run
from stepmark.trainer.run_folder.run_log import RunLog, read_metrics
from stepmark.trainer.telemetry.progress import ProgressDisplay, duration, log_line
from tests.support.recipes import write_recipe

LOG = re.compile(r"\d\d:\d\d:\d\d  step (\d)/4  loss \d\.\d{4}  lr \d\.\d\de[-+]\d\d  [\d,]+ tokens/s  \d+ s left")


@pytest.fixture
def printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def printed(**fields: Any) -> list[str]:
        options = {"max_steps": 4, "logging_steps": 2, "save_steps": 2, **fields}
        assert run(["train", str(write_recipe(tmp_path, **options))]) == 0
        return capsys.readouterr().err.splitlines()

    return printed


@pytest.mark.parametrize("disable_tqdm", [None, True])
def test_a_run_that_is_not_on_a_terminal_can_be_followed(
    printed: Any, tmp_path: Path, disable_tqdm: bool | None
) -> None:
    """disable_tqdm silences the bar alone."""
    lines = printed(disable_tqdm=disable_tqdm)
    assert [match[1] for line in lines if (match := LOG.fullmatch(line))] == ["2", "4"]
    shown = {line.split(" ", 1)[0]: line.split(" ", 1)[1].strip() for line in lines}
    assert re.fullmatch(r"GPT2LMHeadModel, [\d,]+ parameters", shown["model"])
    assert re.match(r"[\d,]+ tokens, \d+ steps per epoch", shown["data"])
    assert shown["steps"].startswith("4 of ")
    assert "1 rank on cpu" in shown["devices"]
    assert shown["output"] == str(tmp_path / "out")
    assert lines[-1].startswith(f"done: step 4; the model is in {tmp_path / 'out'}; next: stepmark report")
    assert not [line for line in lines if line.startswith("note")]


class Line(torch.nn.Module):
    """Fits several numbers to each sample: it has no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}


@pytest.mark.parametrize("logging", [1, 500])
def test_a_line_between_logs_has_the_unit_of_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, logging: int
) -> None:
    monkeypatch.setattr("stepmark.trainer.telemetry.progress.LINE_SECONDS", 0.0)
    rows = [{"x": torch.full((3,), i / 8), "labels": torch.tensor([i / 8, 1.0])} for i in range(8)]
    Trainer(
        Line(), TrainingArguments(str(tmp_path), max_steps=2, logging_steps=logging, device="cpu"), train_dataset=rows
    ).train()
    lines = [line for line in capsys.readouterr().err.splitlines() if "  loss " in line]
    assert len(lines) >= 2
    assert all(re.search(r"  [\d,]+ samples/s  ", line) for line in lines), lines


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_speed_of_a_model_without_tokens_is_in_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], accumulation: int
) -> None:
    rows = [{"x": torch.full((3,), i / 8), "labels": torch.tensor([i / 8, 1.0])} for i in range(8)]
    fields = {"max_steps": 4, "logging_steps": 2, "device": "cpu", "gradient_accumulation_steps": accumulation}
    Trainer(Line(), TrainingArguments(str(tmp_path), **fields), train_dataset=rows).train()
    lines = [line for line in capsys.readouterr().err.splitlines() if "  loss " in line]
    assert [bool(re.search(r"  [\d,]+ samples/s  ", line)) for line in lines] == [True, True], lines
    assert run(["inspect", str(tmp_path)]) == 0
    assert re.search(r"^speed +[\d,]+ samples/s$", capsys.readouterr().out, re.MULTILINE)
    assert run(["report", str(tmp_path)]) == 0
    page = (tmp_path / "report.html").read_text()
    assert [f"{unit} {of}<" in page for unit in ("Samples", "Tokens") for of in ("per second", "seen")] == [
        *(True, True),
        *(False, False),
    ]


def test_lines_can_be_json(printed: Any, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in printed(log_format="json", eval_strategy="steps", eval_steps=4)]
    assert all(isinstance(line["time"], float) for line in lines)
    logs = [line for line in lines if "loss" in line]
    assert [(line["step"], line["total_steps"]) for line in logs] == [(2, 4), (4, 4)]
    kept = [{**line, "time": 0} for line in read_metrics(tmp_path / "out") if "loss" in line]
    assert [{name: line[name] for name in each} for line, each in zip(logs, kept, strict=True)] == [
        {**each, "time": line["time"]} for line, each in zip(logs, kept, strict=True)
    ]
    assert logs[0]["eta_seconds"] > 0
    assert [line["step"] for line in lines if "eval_loss" in line] == [4]
    assert lines[-1]["message"].startswith("done: step 4")


def test_the_last_line_says_which_model_is_saved(printed: Any, tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "save_steps": 1, "metric_for_best_model": "loss", "greater_is_better": True}
    lines = printed(eval_strategy="steps", eval_steps=1, learning_rate=1e-2, **best)
    assert lines[-1].startswith(f"done: step 4; the best model, of step 1, is in {tmp_path / 'out'}; next")


def test_a_run_that_is_too_short_to_log_or_evaluate_says_so(printed: Any) -> None:
    lines = printed(logging_steps=500, eval_strategy="steps", eval_steps=50)
    notes = [line for line in lines if line.startswith("note")]
    assert len(notes) == 2
    assert "4 steps, and logging_steps is 500; lower it" in notes[0]
    assert "4 steps, and eval_steps is 50; lower it" in notes[1]


def test_status_and_prometheus_file_tell_how_far_the_run_is(
    printed: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os
    import socket

    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    printed(
        prometheus_file=str(tmp_path / "run.prom"), load_best_model_at_end=True, eval_strategy="steps", eval_steps=2
    )
    status = json.loads((tmp_path / "out" / "status.json").read_text())
    assert (status["state"], status["step"], status["total_steps"], status["eta_seconds"]) == ("done", 4, 4, None)
    assert (status["process"], status["host"]) == (os.getpid(), socket.gethostname())
    assert status["newest_checkpoint"] == "checkpoint-4"
    assert isinstance(status["best_metric"], float)
    text = (tmp_path / "run.prom").read_text()
    label = f'run="{tmp_path / "out"}",job="",host="{socket.gethostname()}"'
    assert f"stepmark_step{{{label}}} 4\n" in text
    assert f'stepmark_state{{{label},state="done"}} 1.0\n' in text
    assert re.search(rf"stepmark_loss{{{re.escape(label)}}} \d", text)


def test_a_run_is_summarized(printed: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed()
    assert run(["inspect", str(tmp_path / "out")]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert (rows["state"], rows["step"], rows["saved"]) == ("done", "4 of 4", "checkpoint-2, checkpoint-4")
    assert run(["inspect", str(tmp_path / "out"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["state"], summary["step"], summary["checkpoints"]) == ("done", 4, [2, 4])


def test_what_is_unknown_is_left_out_of_a_line() -> None:
    line = log_line(1, 9, {"loss": math.nan, "tokens_per_second": None}, None, "text")
    assert line.endswith("step 1/9  loss nan")
    assert json.loads(log_line(1, 9, {"loss": math.nan}, None, "json"))["loss"] == "nan"
    assert ProgressDisplay(shows=True, total=9, done=3).seconds_left(3) is None
    assert [duration(seconds) for seconds in (59.4, 200, 7500)] == ["59 s", "3:20 min", "2:05 h"]


def test_a_huge_number_is_short_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = RunLog(tmp_path, writes=True)
    log.metrics({"step": 2, "epoch": 1.0, "loss": 3.4e38, "learning_rate": 1e-3})
    log.metrics({"step": 2, "epoch": 1.0, "eval_loss": 623.6, "eval_perplexity": 3.1e270})
    log.event("started", 0, total_steps=4, metric_for_best_model="eval_perplexity", greater_is_better=True)
    log.status("done", 2)
    assert run(["inspect", str(tmp_path)]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["best"].endswith("perplexity 3.1e+270 at step 2")
    assert len(rows["loss"]) < 12
    assert len(log_line(2, 4, {"loss": 3.4e38}, None, "text")) < 40
    assert run(["report", str(tmp_path)]) == 0
    assert "0" * 30 not in (tmp_path / "report.html").read_text().partition("<script")[0]
    capsys.readouterr()
