"""The report, in a browser, of a real run that was killed, whose newest checkpoint was corrupted, and that resumed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from stepmark.cli.main import run as stepmark
from stepmark.filesystem.json_files import read_lines
from stepmark.trainer.run_folder.run_log import read_metrics
from tests.support.browser import act, dump_dom
from tests.support.ranks import Ranks

PROGRAM = "tests.support.programs:train"
KILLED_AT, STEPS = 18, 30


def options(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "device": "cpu",
        "max_steps": STEPS,
        "save_strategy": "steps",
        "save_steps": 5,
        "async_save": False,  # so that it is certain which checkpoint a kill finds
        "save_total_limit": 3,
        "eval_strategy": "steps",
        "eval_steps": 5,
        "resume_from_checkpoint": True,
    }


@pytest.fixture(scope="module")
def broken_run(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks, killed in step 18; a byte of checkpoint-15 flips; the run goes on from checkpoint-10 to its end."""
    folder = tmp_path_factory.mktemp("runs") / "broken"
    killed = ranks.run(PROGRAM, {**options(folder), "kill_at": KILLED_AT}, nproc=2)
    assert -9 in killed.codes
    weights = folder / "checkpoint-15" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-100] ^= 1
    weights.write_bytes(content)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 18, "lo')
    ranks.run(PROGRAM, options(folder), nproc=2).check()
    return folder


def marks(dom: str, kind: str) -> list[tuple[str, ...]]:
    return re.findall(rf'class="mark" data-kind="{kind}" data-step="(\d+)"(?: data-until="(\d+)")?', dom)


def test_events_of_the_run(broken_run: Path) -> None:
    events = read_lines(broken_run / "events.jsonl")
    told = [(event["event"], event["step"]) for event in events if not event["event"].startswith(("save", "position"))]
    assert told == [("started", 0), ("set_aside", 15), ("started", 10), ("resumed", 10), ("done", STEPS)]
    aside = next(event for event in events if event["event"] == "set_aside")
    assert aside["checkpoint"] == "checkpoint-15"
    assert re.match(r"model\.safetensors: tensor '.*' does not match its checksum", aside["reason"])
    saved = [event for event in events if event["event"] == "saved"]
    assert [event["step"] for event in saved] == [5, 10, 15, 15, 20, 25, 30]
    for event in saved:
        assert event["bytes"] > 1000
        assert 0 < event["durable_seconds"] <= event["stall_seconds"] + 0.5  # the saves were waited for


def test_logs_measure_the_machine(broken_run: Path) -> None:
    logs = [line for line in read_metrics(broken_run) if "loss" in line]
    for line in logs:
        parts = [line[f"seconds_{part}"] for part in ("data", "step", "save", "evaluation")]
        assert all(part >= 0 for part in parts)
        assert line["samples_per_second"] > 0
        assert line["model_flops_per_second"] > 0
        assert line["host_memory_peak"] >= line["host_memory"] > 1e6
        assert "model_flops_utilization" not in line  # the peak of this CPU is unknown
    by_step = {line["step"]: line for line in logs}
    assert by_step[21]["seconds_save"] > 0
    assert by_step[21]["seconds_evaluation"] > 0
    assert by_step[22]["seconds_save"] == by_step[22]["seconds_evaluation"] == 0
    history = json.loads((broken_run / "trainer_state.json").read_text())["log_history"]
    assert not any("host_memory" in entry for entry in history)


def test_the_page_in_a_browser(broken_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert stepmark(["report", str(broken_run), "--out", str(page)]) == 0
    assert capsys.readouterr().out == f"{page}\n"
    dom = dump_dom(page)
    charts = re.findall(r'<figure id="figure-([\w]+)"', dom)
    expected = ["loss", "eval_perplexity", "grad_norm", "learning_rate", "throughput", "time"]
    assert charts[:6] == expected
    assert set(charts[6:]) <= {"memory", "processor", "rank_memory", "disk", "network"}  # of a run that took a second
    assert ("memory" in charts) != ("rank_memory" in charts)
    assert dom.count('class="uplot') == len(charts)
    assert "lost: training, trained again" in dom
    values = re.findall(r'class="readout"[^>]*>(.*?)</ul>', dom, re.DOTALL)
    assert len(values) == len(charts)
    assert "training" in values[0]
    assert not [each for each in values if "trained again" in each]  # at the run's last step, which they do not reach
    assert ("10", "") in marks(dom, "resumed")
    assert ("10", str(KILLED_AT - 1)) in marks(dom, "lost")
    assert marks(dom, "trouble") == marks(dom, "compilation") == []
    assert re.search(r'class="best" data-step="\d+"', dom)
    states = dict(re.findall(r'data-checkpoint="([\w.-]+)" data-state="(\w+)"', dom))
    assert states == {
        "checkpoint-5": "deleted",
        "checkpoint-10": "deleted",
        "checkpoint-15": "deleted",
        "damaged-checkpoint-15": "quarantined",
        "checkpoint-20": "complete",
        "checkpoint-25": "complete",
        "checkpoint-30": "complete",
    }
    assert "verified: resumed from" in dom
    assert 'li data-kind="corrupted">checkpoint-15 was corrupted and is quarantined: model.safetensors' in dom
    assert "ended without a status" in dom
    assert ">done<" in dom
    assert "NaN" not in re.sub(r"<script.*?</script>", "", dom, flags=re.DOTALL)


def test_values_under_the_pointer(broken_run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert stepmark(["report", str(broken_run), "--out", str(page)]) == 0
    script = """
    results.tips = [];
    for (const axis of ["step", "time"]) {
      document.querySelector(`[data-axis=${axis}]`).click();
      await soon();
      const { over } = charts[0].plot;
      for (const kind of ["mouseenter", "mousemove"]) mouse(over, kind, 0.999);
      await soon();
      results.tips.push(charts[0].readout.innerHTML);
      mouse(over, "mouseleave", 0.999);
    }
    """
    tips = act(page, script)["tips"]
    loss = [line for line in read_metrics(broken_run) if "loss" in line][-1]["loss"]
    for tip in tips:
        assert f"<b>step {STEPS} " in tip
        assert re.search(rf">training</span><span [^>]*>{f'{loss:.5g}'.rstrip('0')}", tip)
        assert "evaluation" in tip
    assert len(tips) == 2


def test_comparison_with_another_run(broken_run: Path, ranks: Ranks, tmp_path: Path) -> None:
    other = {**options(tmp_path / "other"), "learning_rate": 5e-3, "max_steps": 12}
    without_saves = {"save_strategy": "no", "save_on_signal": False, "resume_from_checkpoint": None}
    ranks.run(PROGRAM, {**other, **without_saves}).check()
    page = tmp_path / "both.html"
    assert stepmark(["report", str(broken_run), "--compare", other["output_dir"], "--out", str(page)]) == 0
    dom = dump_dom(page)
    assert "line: broken: training" in dom
    assert "line: other: training" in dom
    assert "points: other: evaluation" in dom


def test_a_wrong_call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert stepmark(["report", str(tmp_path / "nothing")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}/nothing does not exist; pass a run's output_dir\n"
