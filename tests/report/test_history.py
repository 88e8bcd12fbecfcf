"""What a report reads from a run's folder, intact or corrupted."""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from stepmark.checkpoint import Checkpointer
from stepmark.checkpoint.format import integrity
from stepmark.cli.inspect import summarize
from stepmark.data.tokenize.tokenizer import byte_tokenizer
from stepmark.errors import StepmarkError, UsageError
from stepmark.filesystem import json_files
from stepmark.liveness.failure_report import FailureReport
from stepmark.report.checkpoints import SMALL, read_checkpoints
from stepmark.report.figures import axes, figures, interpolated, marks, thin, total_seconds
from stepmark.report.history import KILLED, find_runs, names, read_history, short_names
from stepmark.report.page import write_report


def write(path: Path, lines: Sequence[dict[str, Any]], half: str = "") -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + half)


def log(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, "loss": 10.0 / step, "grad_norm": 1.0, "time": 1000.0 + step, **values}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    return folder


def test_steps_that_appear_again_count_once(run: Path) -> None:
    lines = [
        *[log(step) for step in range(1, 8)],
        {"step": 5, "eval_loss": 3.0, "eval_runtime": 1.0, "time": 1005.5},
        {"step": 7, "eval_loss": 1.0, "time": 1007.5},
        {"resumed": 5, "attempt": 1, "time": 2000.0},
        *[log(step, loss=0.5, time=2000.0 + step) for step in range(6, 10)],
    ]
    write(run / "metrics.jsonl", lines, half='{"step": 10, "lo')
    history = read_history(run)
    assert [line["step"] for line in history.logs] == list(range(1, 10))
    assert [line["loss"] for line in history.logs[5:]] == [0.5] * 4
    assert [[line["step"] for line in lost] for lost in history.lost] == [[6, 7]]
    assert [(each.step, dict(each.values)) for each in history.evaluations] == [(5, {"eval_loss": 3.0})]
    assert [(one.first, one.last, one.ended) for one in history.attempts] == [(None, 7, None), (5, 9, None)]
    found = [(mark.kind, mark.step, mark.until) for mark in marks([history])]
    assert found == [("lost", 5, 7), ("resumed", 5, None)]


def test_steps_after_the_checkpoint_do_not_count_until_they_are_trained_again(run: Path) -> None:
    lines = [*[log(step) for step in range(1, 8)], {"step": 7, "eval_loss": 1.0}, {"resumed": 5, "time": 2000.0}]
    write(run / "metrics.jsonl", lines)
    history = read_history(run)
    assert [line["step"] for line in history.logs] == [1, 2, 3, 4, 5]
    assert history.evaluations == []


def test_a_snapshot_is_not_called_a_checkpoint(run: Path) -> None:
    lines = [{"resumed": 2, "attempt": 1, "time": 2000.0}, log(3), {"resumed": 2, "attempt": 2, "time": 3000.0}]
    write(run / "metrics.jsonl", [log(1), log(2), *lines])
    events = [{"event": "resumed", "step": 2, "checkpoint": "memory", "attempt": 1}]
    write(run / "events.jsonl", [*events, {**events[0], "checkpoint": "checkpoint-2", "attempt": 2}])
    told = [each.label.partition(";")[0] for each in marks([read_history(run)]) if each.kind == "resumed"]
    assert told == ["resumed from the snapshot of step 2", "resumed from checkpoint-2"]


def test_a_killed_process_is_distinguished_from_an_interrupted_one(run: Path) -> None:
    write(
        run / "metrics.jsonl",
        [log(1), log(2), {"resumed": 1, "time": 1010.0}, log(2, time=1012.0), {"resumed": 2, "time": 1020.0}],
    )
    write(
        run / "events.jsonl",
        [
            {"event": "started", "step": 0, "time": 1000.0},
            {"event": "resumed", "step": 1, "time": 1009.9},
            {"event": "interrupted", "step": 2, "reason": "SIGTERM", "time": 1013.0},
        ],
    )
    assert [one.ended for one in read_history(run).attempts] == [KILLED, "interrupted: SIGTERM", None]


def test_concurrent_evaluations_and_the_best(run: Path) -> None:
    write(run / "metrics.jsonl", [log(9), {"step": 4, "eval_loss": 2.0}, {"step": 8, "eval_loss": 1.5}])
    write(
        run / "evaluations.jsonl",
        [
            {"step": 2, "status": "done", "eval_loss": 4.0, "eval_bleu": 0.1},
            {"step": 6, "status": "skipped", "reason": "retention"},
            {"step": 6, "status": "failed", "reason": "it raised"},
            {"step": 8, "status": "done", "eval_loss": 1.25, "eval_bleu": 0.3},
        ],
    )
    history = read_history(run)
    best = history.best()
    assert best is not None
    assert (best.metric, best.step, best.value) == ("eval_loss", 8, 1.25)
    write(
        run / "events.jsonl",
        [{"event": "started", "step": 0, "metric_for_best_model": "eval_bleu", "greater_is_better": True}],
    )
    best = read_history(run).best()
    assert best is not None
    assert (best.metric, best.value) == ("eval_bleu", 0.3)
    names = [figure.name for figure in figures([history])]
    assert names == ["loss", "eval_bleu", "grad_norm"]
    assert [line["reason"] for line in history.unevaluated] == ["it raised"]


def test_the_best_of_several_sets_is_by_the_first(run: Path) -> None:
    lines = [{"step": step, f"eval_{name}_loss": step / 4} for step in (4, 8) for name in ("b", "a")]
    write(run / "metrics.jsonl", [log(9), *lines])
    best = read_history(run).best()
    assert best is not None
    assert (best.metric, best.step) == ("eval_a_loss", 4)


@pytest.mark.parametrize(
    "broken",
    [
        {},
        {"metrics.jsonl": ""},
        {"metrics.jsonl": "\0\0\0{"},
        {"metrics.jsonl": '[1]\n"x"\n{"step": "3", "loss": 1}\n{"resumed": null}\n{"step": 2, "loss": "NaN"}\n'},
        {"metrics.jsonl": '{"step": 3, "loss": null, "grad_norm": [], "time": "noon"}\n', "status.json": "{"},
        {"events.jsonl": '{"event": 3}\n{"event": "trouble"}\n{"event": "saved", "step": "x"}\n{"step": 1}\n'},
        {"events.jsonl": '{"event": "resumed"}\n{"event": "started", "ranks": "two", "device": []}\n'},
        {"status.json": "[]"},
        {"evaluations.jsonl": '{"step": 1}\n{"step": 2, "status": "failed"}\n{"eval_loss": 1}\n'},
    ],
)
def test_a_broken_folder_still_has_a_report(run: Path, broken: dict[str, str]) -> None:
    (run / "status.json").write_text('{"state": "running", "step": 3}')
    for name, content in broken.items():
        (run / name).write_text(content)
    (run / "checkpoint-7").mkdir()
    (run / "checkpoint-8").write_text("a file")
    (run / ".checkpoint-9.abc-000001").mkdir()
    (run / "damaged-checkpoint-4.1").mkdir()
    text = write_report(run).read_text()
    assert 'data-checkpoint="checkpoint-7" data-state="corrupted"' in text
    assert 'data-checkpoint="damaged-checkpoint-4.1" data-state="quarantined"' in text
    assert 'data-checkpoint=".checkpoint-9.abc-000001" data-state="unfinished"' in text


def test_states_of_saves(run: Path) -> None:
    saved = {"stall_seconds": 0.25, "durable_seconds": 2.0, "bytes": 4000}
    write(
        run / "events.jsonl",
        [
            {"event": "save_begun", "step": 5, "stall_seconds": 0.25},
            {"event": "saved", "step": 5, **saved},
            {"event": "resumed", "step": 5, "checkpoint": "checkpoint-5"},
            {"event": "save_begun", "step": 10, "stall_seconds": 0.5},
            {"event": "save_begun", "step": 15, "stall_seconds": 0.5},
            {"event": "save_failed", "step": 15, "stall_seconds": 0.5},
        ],
    )
    found = read_checkpoints(read_history(run))
    assert [(one.step, one.state, one.stall) for one in found] == [
        (5, "deleted", 0.25),
        (10, "unfinished", 0.5),
        (15, "failed", 0.5),
    ]
    assert (found[0].size, found[0].durable, found[0].restored) == (4000, 2.0, 1)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        read_history(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="is not a run's output_dir"):
        read_history(tmp_path)


def test_a_page_that_cannot_be_written(run: Path) -> None:
    write(run / "metrics.jsonl", [log(1)])
    with pytest.raises(StepmarkError, match="cannot write .*--out"):
        write_report(run, out=run / "metrics.jsonl" / "page.html")


def test_a_long_curve_keeps_its_peaks_and_gaps() -> None:
    values: list[float | None] = [math.sin(i / 50) for i in range(100_000)]
    values[54_321], values[77_777], values[88_888] = 50.0, -50.0, None
    kept, _ = thin(values, 1500)
    assert len(kept) < 1600
    assert {0, 54_321, 77_777, 88_888, 99_999} <= set(kept)
    assert thin(values[:1500], 1500) == (list(range(1500)), None)


def test_the_mean_of_a_long_curve_is_that_of_all_values() -> None:
    values: list[float | None] = [10.0 if i % 10 == 0 else 1.0 for i in range(10_000)]
    _, found = thin(values, 500)
    assert found is not None
    assert {round(mean, 6) for mean in found if mean is not None} == {1.9}


def test_time_includes_steps_that_were_trained_again(run: Path) -> None:
    spent = {"seconds_step": 2.0, "seconds_data": 0.5, "seconds_save": 0.0, "seconds_evaluation": 0.25}
    lines = [log(step, **spent) for step in (1, 2, 3)]
    write(run / "metrics.jsonl", [*lines, {"resumed": 1, "time": 2000.0}, *lines[1:]])
    assert total_seconds(read_history(run)) == {"step": 6.0, "data": 1.5, "save": 0.0, "evaluation": 1.25, "again": 5.0}


def test_what_came_after_the_last_log_counts(run: Path) -> None:
    """The last evaluation and the last save, and the tokens of the last steps."""
    spent = {"seconds_step": 2.0, "seconds_data": 0.5, "seconds_save": 0.0, "seconds_evaluation": 0.0}
    last = {"seconds_step": 1.0, "seconds_data": 0.25, "seconds_save": 4.0, "seconds_evaluation": 8.0}
    closing = {"step": 3, "train_loss": 2.0, "train_runtime": 9.0, "time": 1010.0, "target_tokens": 30, **last}
    write(run / "metrics.jsonl", [log(2, target_tokens=20, **spent), closing])
    history = read_history(run)
    assert total_seconds(history) == {"step": 3.0, "data": 0.75, "save": 4.0, "evaluation": 8.0}
    assert history.target_tokens == 30
    (time,) = [figure for figure in figures([history]) if figure.name == "time"]
    assert {series.name: sum(y or 0 for y in series.y) for series in time.series}["evaluation"] == 8.0
    write(run / "metrics.jsonl", [log(2, **spent), closing, {"resumed": 2, "time": 2000.0}, log(3, **spent)])
    assert total_seconds(read_history(run)) == {"step": 4.0, "data": 1.0, "save": 4.0, "evaluation": 8.0, "again": 1.25}


def test_text_of_the_run_cannot_break_the_page(run: Path) -> None:
    nasty = "</script><script>alert(1)</script><!-- &"
    write(run / "metrics.jsonl", [log(1)])
    write(run / "events.jsonl", [{"event": "trouble", "step": 1, "kind": nasty, "message": nasty}])
    (run / "status.json").write_text(json.dumps({"state": nasty, "reason": nasty}))
    text = write_report(run).read_text()
    assert "alert(1)</script>" not in text.replace("&lt;/script&gt;", "")
    assert "<script>alert" not in text
    assert text.count("</script>") == 2


def test_the_page_asks_for_nothing_from_elsewhere(run: Path) -> None:
    write(run / "metrics.jsonl", [log(1), log(2)])
    text = write_report(run).read_text()
    for word in ("http:", "https:", "src=", "@import", "url(", "fetch("):
        assert word not in text.replace("https://github.com/leeoniya/uPlot", "")


def test_the_last_step_of_a_run_that_has_ended_need_not_be_logged(run: Path) -> None:
    write(run / "metrics.jsonl", [log(10), log(20)])
    for state, step in (("running", 20), ("done", 26), ("interrupted", 26), ("failed", 26)):
        (run / "status.json").write_text(json.dumps({"state": state, "step": 26, "time": 1.0}))
        assert read_history(run).last_step == step
        assert summarize(read_history(run))["step"] == step


def test_the_runs_in_a_folder(tmp_path: Path) -> None:
    """Not what lies in a run, hidden folders, or links that lead back; numbers are in order."""
    for name in ("b/rate=1e-2,seed=0", "b/rate=1e-3,seed=0", "b/rate=1e-3,seed=10", "b/rate=1e-3,seed=9", "a", ".c"):
        (tmp_path / name).mkdir(parents=True)
        write(tmp_path / name / "metrics.jsonl", [log(1)])
    (tmp_path / "a" / "earlier-run-1").mkdir()
    write(tmp_path / "a" / "earlier-run-1" / "metrics.jsonl", [log(1)])
    (tmp_path / "b" / "back").symlink_to(tmp_path)
    found = find_runs(tmp_path)
    assert [str(each.relative_to(tmp_path)) for each in found] == [
        "a",
        "b/rate=1e-3,seed=0",
        "b/rate=1e-3,seed=9",
        "b/rate=1e-3,seed=10",
        "b/rate=1e-2,seed=0",
    ]
    assert find_runs(tmp_path / "a") == [tmp_path / "a"]
    assert short_names([read_history(each) for each in found[1:]]) == ["1e-3,0", "1e-3,9", "1e-3,10", "1e-2,0"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match="nor runs"):
        find_runs(tmp_path / "empty")


def test_names_that_are_the_same_in_two_folders(tmp_path: Path) -> None:
    for name in ("x/model-small-first", "x/model-small-second", "y/model-small-first"):
        (tmp_path / name).mkdir(parents=True)
        write(tmp_path / name / "metrics.jsonl", [log(1)])
    histories = [read_history(each) for each in find_runs(tmp_path)]
    assert names(histories) == ["x/model-small-first", "x/model-small-second", "y/model-small-first"]
    assert short_names(histories[:2]) == ["first", "second"]
    assert short_names(histories[:1]) == ["model-small-first"]


def test_tokens_epochs_and_flops_of_steps(run: Path) -> None:
    """Of steps that were trained again too, and between logs."""
    made = {"tokens_per_second": 50.0, "model_flops_per_second": 1000.0}
    lines = [log(step, target_tokens=step * 30, epoch=step / 10, **made) for step in (2, 4, 6)]
    write(run / "metrics.jsonl", [*lines, {"resumed": 2, "time": 2000.0}, lines[1]])
    found = axes(read_history(run))
    assert found == {
        "tokens": ([0, 2, 4, 6], [0, 60, 120, 180]),
        "epoch": ([0, 2, 4, 6], [0, 0.2, 0.4, 0.6]),
        "flops": ([0, 2, 4, 6], [0, 1200, 2400, 3600]),
    }
    assert [interpolated(found["tokens"], step) for step in (1, 6, 7)] == [30, 180, 210]
    assert interpolated(None, 3) is None
    write(run / "metrics.jsonl", [log(step, target_tokens=step) for step in range(1, 5001)])
    found = axes(read_history(run))
    assert set(found) == {"tokens"}
    assert len(found["tokens"][0]) <= 202
    assert found["tokens"][1][-1] == 5000
    write_report(run, tables=run / "tables")
    rows = list(csv.DictReader((run / "tables" / "loss.csv").read_text().splitlines()))
    assert (rows[16]["step"], rows[16]["tokens"], rows[16]["epoch"]) == ("17", "17.0", "")


def test_models_of_bytes_have_bits_per_byte(run: Path) -> None:
    write(run / "metrics.jsonl", [log(1, loss=math.log(8)), {"step": 1, "eval_loss": math.log(4), "time": 1.0}])
    assert [figure.name for figure in figures([read_history(run)])] == ["loss", "grad_norm"]
    byte_tokenizer().save_pretrained(run / "checkpoint-1")
    (found,) = [figure for figure in figures([read_history(run)]) if figure.name == "bits"]
    assert [(each.name, each.y) for each in found.series] == [
        ("training", [pytest.approx(3.0)]),
        ("evaluation", [pytest.approx(2.0)]),
    ]


def test_what_a_failed_run_has_left(run: Path) -> None:
    """The whole traceback of its last failure, and the end of what it printed."""
    write(run / "metrics.jsonl", [log(1)])
    FailureReport(0, "earlier", "Traceback of the earlier one\n", 1, False, 1.0).keep(run)
    try:
        raise ValueError("<the cause>")
    except ValueError as error:
        FailureReport.of(error, 0).keep(run)
    (run / "console").mkdir()
    (run / "console" / "rank-0.txt").write_text("".join(f"line {line}\n" for line in range(100)))
    (run / "status.json").write_text(json.dumps({"state": "failed", "step": 1, "reason": "it broke", "time": 1.0}))
    text = write_report(run).read_text()
    assert "<details open><summary>Traceback: failures/rank-0.txt</summary><pre>" in text
    assert "raise ValueError(&#34;&lt;the cause&gt;&#34;)" in text
    assert "Traceback of the earlier one" not in text
    assert "line 99</pre>" in text
    assert "line 60\n" in text
    assert "line 59\n" not in text
    (run / "status.json").write_text(json.dumps({"state": "done", "step": 1, "time": time.time() + 1e3}))
    text = write_report(run).read_text()
    assert "Traceback: " not in text
    assert "<details><summary>Console: console/rank-0.txt" in text


def test_a_run_without_a_finite_value_has_its_figures(run: Path) -> None:
    write(run / "metrics.jsonl", [log(step, loss="NaN") for step in (1, 2)])
    (loss, *_) = figures([read_history(run)])
    assert (loss.name, loss.series[0].y) == ("loss", [None, None])
    assert "training: no finite value" in write_report(run).read_text()


@pytest.mark.parametrize("again", [0, 30, 2000])
def test_a_summary_reads_the_end_and_says_the_same(run: Path, monkeypatch: pytest.MonkeyPatch, again: int) -> None:
    """`again`: steps that were trained before the last resumption and appear again."""
    lines = [log(step, tokens_per_second=float(step)) for step in range(1, 3001)]
    lines[1500:1500] = [{"step": 1500, "eval_loss": 0.5, "time": 2500.5}, {"resumed": 1500, "time": 2501.0}]
    if again:
        lines += [{"step": 3000, "eval_loss": 0.1, "time": 1.0}, {"resumed": 3000 - again, "time": 4001.0}]
        lines += [log(step, tokens_per_second=1.0) for step in range(3001 - again, 3004 - again)]
    write(run / "metrics.jsonl", lines)
    saves = [{"event": kind, "step": step, "time": 1.0} for step in range(3000) for kind in ("save_begun", "saved")]
    write(run / "events.jsonl", [{"event": "started", "step": 0, "total_steps": 5000, "time": 1.0}, *saves])
    (run / "status.json").write_text(json.dumps({"state": "done", "step": 3003 - again, "time": 5000.0}))
    expected = summarize(read_history(run))
    parsed: list[bytes] = []
    parse = json_files.parse_json
    monkeypatch.setattr(json_files, "parse_json", lambda line: parsed.append(line) or parse(line))  # type: ignore[func-returns-value]
    assert summarize(read_history(run, recent=True)) == expected
    assert again or sum(text.count(b"step") for text in parsed) < len(lines)


def test_large_files_of_a_checkpoint_are_checked_by_their_size(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(run) as checkpointer:
        state = {"weights": torch.ones(2)}
        checkpointer.save(1, {"state": state}, files=lambda to: (to / "long").write_bytes(bytes(SMALL + 1)), block=True)
    read: list[str] = []
    checksum = integrity.file_checksum
    monkeypatch.setattr(integrity, "file_checksum", lambda path: (read.append(path.name), checksum(path))[1])
    (found,) = read_checkpoints(read_history(run))
    assert (found.state, read) == ("complete", ["state.json"])
    (run / "checkpoint-1" / "long").write_bytes(b"")
    (found,) = read_checkpoints(read_history(run))
    assert found.state == "corrupted"
