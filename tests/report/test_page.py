"""The page itself: trouble at the top, colors, and how it looks on a telephone."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import pytest

from stepmark.report.colors import color
from stepmark.report.write import write_report
from tests.report.test_history import log, write
from tests.support.browser import dump_dom


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
    assert text.count('data-label="Tokens per second">2,200</td>') == 2


def test_a_curve_of_one_point_is_drawn(run: Path) -> None:
    write(run / "metrics.jsonl", [log(5)])
    dom = dump_dom(write_report(run))
    assert re.search(r'class="series line" data-name="training"><circle class="single"', dom)


NARROW = """<iframe id="page" width="390" height="4000" srcdoc="{page}"></iframe><ul id="cut"></ul><script>
window.onload = () => setTimeout(() => {{
  const inner = document.getElementById("page").contentDocument;
  const add = (text) => {{
    document.getElementById("cut").append(Object.assign(document.createElement("li"), {{ textContent: text }}));
  }};
  add(`${{inner.querySelectorAll("svg text").length}} labels`);
  for (const each of inner.querySelectorAll("main *")) {{
    const overflows = each.matches(".table, td, .value") && each.scrollWidth > each.clientWidth + 1;
    if (overflows || each.getBoundingClientRect().right > 390) add(`cut off: ${{each.textContent}}`);
  }}
  for (const label of inner.querySelectorAll("svg text")) {{
    const room = label.closest("svg").getBoundingClientRect();
    if (label.getBoundingClientRect().left < room.left) add(`cut off: ${{label.textContent}}`);
  }}
}}, 500);
</script>"""


def test_nothing_is_cut_off_on_a_phone(run: Path, tmp_path: Path) -> None:
    lines = [log(step, learning_rate=0.00125 - step * 1e-6, tokens_per_second=12_345_678.0) for step in range(1, 40)]
    write(run / "metrics.jsonl", [*lines, {"step": 1_234_567, "eval_loss": 2.5}])
    saved = {"event": "saved", "step": 100_000, "stall_seconds": 1.2, "durable_seconds": 3.4, "bytes": 5, "time": 1e9}
    write(run / "events.jsonl", [saved])
    wrapper = tmp_path / "narrow.html"
    page = write_report(run, [run]).read_text()
    wrapper.write_text(NARROW.format(page=html.escape(page, quote=True)))
    found = re.findall(r"<li>(.*?)</li>", dump_dom(wrapper).rpartition('id="cut"')[2])
    assert re.match(r"[1-9]\d* labels", found[0])
    assert found[1:] == []
