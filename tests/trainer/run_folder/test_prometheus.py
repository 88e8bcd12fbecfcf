"""The file for Prometheus, by the rules of its text format (version 0.0.4)."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path

import numpy as np
import pytest

from stepmark.cli.main import run
from stepmark.trainer.interruption.run_end import record_supervised_end
from stepmark.trainer.run_folder.run_log import RunLog
from tests.support.recipes import write_recipe

LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\"n])*)"')
SAMPLE = re.compile(rf"([a-zA-Z_:][a-zA-Z0-9_:]*)\{{({LABEL.pattern}(?:,{LABEL.pattern})*)\}} (\S+)")
Samples = dict[str, float]
ROOT = Path(__file__).parents[3]


def parsed(path: Path) -> tuple[Samples, dict[str, str], dict[str, str]]:
    """Values by name, or name and state; types by name; the labels. Raises AssertionError at what is not in order."""
    content = path.read_text()
    assert content.endswith("\n")
    samples: Samples = {}
    types: dict[str, str] = {}
    labels: dict[str, str] = {}
    name = ""
    for line in content.splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in types
            assert kind in ("counter", "gauge")
            types[name] = kind
            continue
        match = SAMPLE.fullmatch(line)
        assert match is not None, line
        assert match[1] == name  # all samples of a name follow its type
        found = dict(LABEL.findall(match[2]))
        key = f"{name} {found.pop('state')}" if "state" in found else name
        assert key not in samples
        assert labels in ({}, found)
        samples[key], labels = float(match[match.lastindex or 0]), found
    return samples, types, labels


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLog:
    monkeypatch.setenv("SLURM_JOB_ID", '7 "a"\\')
    log = RunLog(tmp_path, writes=True)
    log.export(str(tmp_path / "run.prom"))
    return log


def test_whatever_a_run_logs_the_file_is_valid(log: RunLog, tmp_path: Path) -> None:
    odd = {"eval_größe": 1.0, "eval_grüße": 2.0, "state": 3.0, "a-b": np.float64(0.5), "saves_total": 9.0, "x_total": 1}
    log.metrics({**odd, "loss": math.nan, "grad_norm": math.inf, "low": -math.inf, "text": "no", "flag": True, "n": 7})
    log.status("running", 3)
    samples, types, labels = parsed(tmp_path / "run.prom")
    assert labels["job"] == r"7 \"a\"\\"
    assert math.isnan(samples["stepmark_loss"])
    assert (samples["stepmark_grad_norm"], samples["stepmark_low"]) == (math.inf, -math.inf)
    assert samples["stepmark_a_b"] == 0.5
    assert (samples["stepmark_saves_total"], types["stepmark_saves_total"]) == (0.0, "counter")
    assert types["stepmark_x_total"] == "gauge"
    assert (samples["stepmark_state running"], samples["stepmark_state done"]) == (1.0, 0.0)
    assert "stepmark_text" not in samples
    assert "stepmark_flag" not in samples


def test_what_has_happened_is_counted_over_all_processes(log: RunLog, tmp_path: Path) -> None:
    for step, seconds in ((2, 1.5), (4, 2.5)):
        log.event("started", step - 2)
        log.event("saved", step, durable_seconds=seconds)
    log.event("save_failed", 6)
    log.event("trouble", 5, kind="repeated")
    log.metrics({"step": 5, "loss": 1.0, "target_tokens": 640})
    for each in (log, RunLog(tmp_path, writes=True)):
        if each is not log:
            each.export(str(tmp_path / "run.prom"))
        each.status("running", 5)
        samples, types, _ = parsed(tmp_path / "run.prom")
        counted = {name.removeprefix("stepmark_"): samples[name] for name in types if types[name] == "counter"}
        assert counted == {
            "saves_total": 2,
            "save_failures_total": 1,
            "troubles_total": 1,
            "save_seconds_total": 4.0,
            "tokens_total": 640,
            "restarts_total": 1,
        }
        assert samples["stepmark_last_save_seconds"] == 2.5
        assert samples["stepmark_newest_checkpoint_step"] == 4
        assert abs(samples["stepmark_unsaved_since"] - time.time()) < 60
        assert samples["stepmark_loss"] == 1.0


def test_a_launcher_that_records_a_failure_keeps_the_numbers(log: RunLog, tmp_path: Path) -> None:
    log.metrics({"step": 5, "loss": 1.0})
    log.status("running", 5)
    reason, file = "rank 0: was killed by SIGKILL", str(tmp_path / "run.prom")
    record_supervised_end(tmp_path, "failed", reason, began=time.time(), prometheus_file=file)
    samples, _, _ = parsed(tmp_path / "run.prom")
    assert (samples["stepmark_state failed"], samples["stepmark_loss"]) == (1.0, 1.0)


def test_a_run_writes_what_alerts_need(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = {"logging_steps": 1, "save_steps": 1, "prometheus_file": str(tmp_path / "run.prom")}
    assert run(["train", str(write_recipe(tmp_path, **fields))]) == 0
    samples, _, labels = parsed(tmp_path / "run.prom")
    saved = [line for line in (tmp_path / "out" / "events.jsonl").read_text().splitlines() if '"saved"' in line]
    assert samples["stepmark_saves_total"] == len(saved) == 2
    assert samples["stepmark_newest_checkpoint_step"] == 2
    assert samples["stepmark_last_save_seconds"] == pytest.approx(json.loads(saved[-1])["durable_seconds"])
    assert samples["stepmark_tokens_total"] > 0
    assert labels.keys() == {"run", "job", "host"}
    for path in ("docs/operations.md", "docs/metrics.md"):
        named = set(re.findall(r"stepmark_\w+", (ROOT / path).read_text()))
        written = {name.partition(" ")[0] for name in samples}
        assert {name for name in named if name.endswith(("_total", "_since", "_step", "_seconds", "_state"))} <= written
    capsys.readouterr()
