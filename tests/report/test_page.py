"""The page itself: trouble at the top, colors, and how it looks on a telephone."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from stepmark.report.history import read_history
from stepmark.report.page import all_figures, write_report
from stepmark.report.templates import color
from stepmark.report.text import NOTHING
from tests.report.test_history import log, write
from tests.support.browser import act, dump_dom


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    return folder


def test_a_failed_run_shows_its_reason_under_trouble(run: Path) -> None:
    write(run / "metrics.jsonl", [log(1)])
    (run / "status.json").write_text(json.dumps({"state": "failed", "step": 1, "reason": "rank 1: out of memory"}))
    text = write_report(run).read_text()
    assert '<li data-kind="failed">the run failed: rank 1: out of memory</li>' in text
    assert "No sign of trouble" not in text


def test_runs_have_different_colors(tmp_path: Path) -> None:
    folders = [tmp_path / f"run-{index}" for index in range(15)]
    for folder in folders:
        folder.mkdir()
        write(folder / "metrics.jsonl", [log(1), log(2)])
    text = write_report(folders[0], folders[1:]).read_text()
    assert len(set(re.findall(r'class="dot" style="background: ([^"]+)"', text))) == 15
    data = json.loads(re.findall(r'id="data">(.*?)</script>', text, flags=re.DOTALL)[0])
    assert data["colors"] == [color(index) for index in range(15)]


def test_a_speed_has_one_value_on_the_page(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        write(folder / "metrics.jsonl", [log(step, tokens_per_second=2000.0 + 100 * step) for step in (3, 1, 2)])
    text = write_report(folders[0], folders[1:]).read_text()
    assert '<div class="value">2,200</div>' in text
    assert text.count('data-label="Tokens per second" data-value="2200.0">2,200</td>') == 2


def test_runs_with_other_metrics_are_not_compared_by_them(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, metric in zip(folders, ("eval_accuracy", None), strict=True):
        folder.mkdir()
        write(folder / "metrics.jsonl", [log(1), {"step": 1, "eval_loss": 3.5, "eval_accuracy": 0.25, "time": 1.0}])
        started = {"event": "started", "step": 0, "metric_for_best_model": metric, "greater_is_better": bool(metric)}
        write(folder / "events.jsonl", [started])
    text = write_report(folders[0], folders[1:]).read_text()
    assert ">accuracy 0.2500 at step 1</td>" in text
    assert ">loss 3.500 at step 1</td>" in text
    assert re.findall(r'<details class="of-run" id="(run-\d)"><summary>(\w+)', text) == [("run-0", "a"), ("run-1", "b")]
    assert (
        'class="of-run"' not in write_report(folders[1]).read_text().partition("</style>")[2].partition("<script>")[0]
    )
    assert ">3.500 at step 1</td>" in write_report(folders[1], [folders[1]]).read_text()


def test_a_run_of_a_script_has_no_command_that_needs_a_recipe(run: Path) -> None:
    write(run / "metrics.jsonl", [log(1)])
    (run / "status.json").write_text(json.dumps({"state": "interrupted", "step": 1}))
    assert 'class="commands"' not in write_report(run).read_text()
    (run / "checkpoint-1").mkdir()
    (run / "checkpoint-1" / "tokenizer.json").write_text("{}")
    assert f"<code>stepmark evaluate {run} --data FILE</code>" in write_report(run).read_text()
    (run / "used_recipe.yaml").write_text("learning_rate: 0.01\n")
    text = write_report(run).read_text()
    assert f"<code>stepmark evaluate {run}</code>" in text
    assert "--resume_from_checkpoint true" in text


def test_one_run_shows_its_configuration_size_and_time_left(run: Path) -> None:
    write(run / "metrics.jsonl", [log(1, target_tokens=2_500_000)])
    started = {"event": "started", "step": 0, "parameters": 124_000_000, "trained_parameters": 900_000, "ranks": 1}
    write(run / "events.jsonl", [started])
    (run / "used_recipe.yaml").write_text("learning_rate: 0.01\ndataset_name: <python>\n")
    status = {"state": "running", "step": 1, "time": 1e9, "eta_seconds": 7200}
    (run / "status.json").write_text(json.dumps(status))
    text = write_report(run).read_text()
    tiles = re.findall(r'class="name">(.*?)</div><div class="value">(.*?)</div><div class="note">(.*?)</div>', text)
    assert ("Parameters", "124 M", "900 k of them trained") in tiles
    assert ("Tokens seen", "2.5 M", "targets of the loss") in tiles
    assert ("Time left", "2.0 h") in [tile[:2] for tile in tiles]
    assert "Configuration: 2 fields of its recipe" in text
    assert "<code>&lt;python&gt;</code>" in text
    assert "stepmark train" not in text.partition("<footer>")[0]  # it runs: there is nothing to resume
    assert f"stepmark evaluate {run} --watch" in text


def test_what_is_the_same_in_all_runs_is_not_listed(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, rate, ranks in zip(folders, (0.01, 5e-05), (1, 2), strict=True):
        folder.mkdir()
        write(folder / "metrics.jsonl", [log(1)])
        write(folder / "events.jsonl", [{"event": "started", "step": 0, "ranks": ranks, "software": {"torch": "2.9"}}])
        given = "" if rate == 5e-05 else f"learning_rate: {rate}\n"  # the default is not in the file
        (folder / "used_recipe.yaml").write_text(f"output_dir: {folder}\nseed: 3\n{given}")
    assert rows_of(write_report(folders[0], folders[1:])) == [["ranks", "1", "2"], ["learning_rate", "0.01", "5e-05"]]


def rows_of(page: Path) -> list[list[str]]:
    """The table of differences."""
    rows = re.search(r'id="differences">.*?<tbody>(.*?)</tbody>', page.read_text())
    assert rows is not None
    return [re.sub(r"<.*?>", " ", row).split() for row in rows[1].split("</tr>") if row]


def test_a_run_of_a_script_shows_its_arguments_and_no_default_that_it_did_not_have(tmp_path: Path) -> None:
    """The recipe sets fields of the model, which a script has in its own code."""
    folders = [tmp_path / name for name in ("recipe", "script", "failed")]
    for folder in folders:
        folder.mkdir()
    write(folders[0] / "events.jsonl", [{"event": "started", "step": 0}])
    (folders[0] / "used_recipe.yaml").write_text("learning_rate: 0.01\nlogging_steps: 5\nmodel_type: gpt2\n")
    write(folders[1] / "events.jsonl", [{"event": "started", "step": 0, "arguments": {"learning_rate": 0.5}}])
    (folders[2] / "status.json").write_text('{"state": "failed", "step": 0, "reason": "no data"}')
    assert rows_of(write_report(folders[0], folders[1:])) == [
        ["learning_rate", "0.01", "0.5", NOTHING],
        ["logging_steps", "5", "500", NOTHING],
        ["model_type", "gpt2", NOTHING, NOTHING],
    ]
    text = write_report(folders[1]).read_text()
    assert "Configuration: 1 field of its arguments" in text
    write(folders[1] / "events.jsonl", [{"event": "started", "step": 0}])  # of an earlier version
    assert [row[2] for row in rows_of(write_report(folders[0], folders[1:]))] == [NOTHING, NOTHING, NOTHING]


def test_a_run_of_a_sweep_that_failed_before_it_began_makes_no_differences(tmp_path: Path) -> None:
    folders = [tmp_path / f"{index}" for index in range(3)]
    for folder, rate in zip(folders, (0.01, 0.02, None), strict=True):
        folder.mkdir()
        (folder / "status.json").write_text('{"state": "failed", "step": 0, "reason": "no data"}')
        if rate is not None:
            (folder / "used_recipe.yaml").write_text(f"max_steps: 7\nlearning_rate: {rate}\n")
    assert rows_of(write_report(folders[0], folders[1:])) == [["learning_rate", "0.01", "0.02", NOTHING]]


def test_a_run_of_another_tool_is_left_out_of_a_report_of_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "metrics.jsonl", [log(1)])
    other = tmp_path / "theirs" / "checkpoint-5"
    other.mkdir(parents=True)
    (other / "model.safetensors").write_bytes(b"\0" * 8)
    page = write_report(tmp_path)
    assert capsys.readouterr().err == f"left out {other.parent}: its checkpoints are another tool's\n"
    assert "2 runs" in page.read_text()
    assert "corrupted" not in page.read_text().partition("</style>")[2].partition("<script>")[0]


def test_a_curve_of_one_point_is_drawn(run: Path) -> None:
    write(run / "metrics.jsonl", [log(5)])
    seen = act(
        write_report(run),
        """
    const canvas = document.querySelector("#figure-loss canvas");
    const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
    results.blue = 0;
    for (let i = 0; i < data.length; i += 4) results.blue += data[i] < 40 && data[i + 1] < 40 && data[i + 2] > 230;
    """,
    )
    assert 8 < seen["blue"] < 100


NARROW = """<iframe id="page" width="390" height="4000" srcdoc="{page}"></iframe><ul id="cut"></ul><script>
window.onload = () => setTimeout(() => {{
  const inner = document.getElementById("page").contentDocument;
  const add = (text) => {{
    document.getElementById("cut").append(Object.assign(document.createElement("li"), {{ textContent: text }}));
  }};
  const charts = inner.defaultView.eval("charts"), FONT = inner.defaultView.eval("FONT");
  add(`${{charts.length}} charts`);
  for (const each of inner.querySelectorAll("main *")) {{
    if (each.matches(".sr") || each.closest(".layer")) continue;
    const overflows = each.matches(".table, td, .value") && each.scrollWidth > each.clientWidth + 1;
    if (overflows || each.getBoundingClientRect().right > 390) add(`cut off: ${{each.textContent}}`);
  }}
  const pen = document.createElement("canvas").getContext("2d");
  pen.font = FONT;
  for (const {{ plot }} of charts)
    for (const label of plot.axes[1]._values)
      if (pen.measureText(label).width > plot.over.offsetLeft - 4) add(`cut off: ${{label}}`);
}}, 1500);
</script>"""


def runs_that_differ(folder: Path, *, settings: int = 8) -> list[Path]:
    """Three runs, the last two in one group, which differ in many fields with long values."""
    runs = [folder / f"a-run-with-quite-a-long-name-{index}" for index in range(3)]
    for index, run in enumerate(runs):
        run.mkdir()
        losses = [4.0, 2.0, 2.0 + 0.0123456]
        write(run / "metrics.jsonl", [log(step, loss=losses[index]) for step in range(1, 10)])
        write(run / "events.jsonl", [{"event": "started", "step": 0, "parameters": 123_456_789}])
        given = [f"field_{number}: a_value_of_some_length_{index > 0}" for number in range(settings)]
        (run / "used_recipe.yaml").write_text("\n".join(given))
    return runs


@pytest.mark.parametrize("width", [390, 768, 1280])
def test_no_column_of_a_table_is_cut(tmp_path: Path, width: int) -> None:
    runs = runs_that_differ(tmp_path)
    script = """
    results.tables = [...document.querySelectorAll(".table")].map((each) => [each.scrollWidth, each.clientWidth]);
    results.heads = document.querySelector("#runs thead").getClientRects().length;
    """
    found = act(write_report(runs[0], runs[1:]), script, (width, 900))
    assert found["tables"]
    assert all(needed <= there for needed, there in found["tables"]), found
    few = act(write_report(runs[0], [runs[1]]), script.replace("#runs", "#differences"), (width, 900))
    assert few["heads"] == (width > 500), "a table that fits has its heads"


def test_a_deviation_has_the_digits_of_its_value_and_a_percentage_says_of_what(tmp_path: Path) -> None:
    runs = runs_that_differ(tmp_path, settings=1)
    script = """
    const group = document.getElementById("group");
    group.value = "field_0";
    group.oninput();
    await soon(0.5);
    results.text = charts[0].readout.innerText;
    """
    text = act(write_report(runs[0], runs[1:]), script)["text"]
    assert "2.0062 ± 0.0062 of 2 \u221250%" in text
    assert "% compared with a_value_of_some_length_False" in text


def test_memory_is_drawn_once(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", [log(step, host_memory=2e9) for step in (1, 2)])
    drawn = [figure.name for figure in all_figures([read_history(tmp_path)])]
    assert "memory" in drawn
    (tmp_path / "system").mkdir()
    write(tmp_path / "system" / "rank-0.jsonl", [{"step": step, "time": step, "memory": 2e9} for step in (1, 2)])
    drawn = [figure.name for figure in all_figures([read_history(tmp_path)])]
    assert "rank_memory" in drawn
    assert "memory" not in drawn


def test_nothing_is_cut_off_on_a_phone(run: Path, tmp_path: Path) -> None:
    lines = [log(step, learning_rate=0.00125 - step * 1e-6, tokens_per_second=12_345_678.0) for step in range(1, 40)]
    write(run / "metrics.jsonl", [*lines, {"step": 1_234_567, "eval_loss": 2.5}])
    saved = {"event": "saved", "step": 100_000, "stall_seconds": 1.2, "durable_seconds": 3.4, "bytes": 5, "time": 1e9}
    write(run / "events.jsonl", [saved])
    wrapper = tmp_path / "narrow.html"
    page = write_report(run, [run]).read_text()
    wrapper.write_text(NARROW.format(page=html.escape(page, quote=True)))
    found = re.findall(r"<li>(.*?)</li>", dump_dom(wrapper).rpartition('id="cut"')[2])
    assert re.match(r"[1-9]\d* charts", found[0])
    assert found[1:] == []
