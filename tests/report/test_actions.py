"""What a reader does with the page, in a browser: zooming, comparing, sorting, saving, printing, without a mouse."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from stepmark.cli.main import run as main
from stepmark.config.yaml_file import format_yaml
from stepmark.report.page import write_report
from stepmark.report.text import NOTHING
from tests.report.test_history import log, write
from tests.support.browser import DARK, act, dump_dom

STEPS = 300


def make_run(folder: Path, rate: float, steps: int = STEPS) -> Path:
    """A run as `stepmark train` leaves it, whose loss falls faster with a higher rate."""
    folder.mkdir()
    began = 1.7e9
    logs = [
        log(
            step,
            loss=4 * math.exp(-rate * step) + 1 + 0.2 * math.sin(step * 7.3),
            learning_rate=rate * (1 - step / steps),
            time=began + step,
            target_tokens=1000 * step,
        )
        for step in range(1, steps + 1)
    ]
    write(folder / "metrics.jsonl", [*logs, {"step": steps, "eval_loss": 1 + rate, "time": began + steps}])
    started = {"event": "started", "step": 0, "time": began, "total_steps": steps, "ranks": 2, "parameters": 1_234_567}
    sample = {"event": "sample", "step": steps, "prompt": "<i>def ", "text": "<main>(self):", "time": began + steps}
    write(folder / "events.jsonl", [{**started, "trained_parameters": 1_234_567}, sample])
    recipe = {"output_dir": str(folder), "learning_rate": rate, "max_steps": steps, "config_name": "gpt2"}
    (folder / "used_recipe.yaml").write_text(format_yaml(recipe))
    (folder / "status.json").write_text(json.dumps({"state": "interrupted", "step": steps, "time": began + steps}))
    for rank in range(2):
        (folder / "system").mkdir(exist_ok=True)
        lines = [
            {"step": step, "time": began + step, "processor": 1.0 + rank, "memory": 2e9, "disk_written": 3e6}
            for step in range(10, steps, 10)
        ]
        write(folder / "system" / f"rank-{rank}.jsonl", lines)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [make_run(folder / name, rate) for name, rate in (("slow", 0.01), ("fast", 0.02), ("fastest", 0.04))]


@pytest.fixture(scope="module")
def compared(runs: list[Path]) -> Path:
    """The page of three runs."""
    return write_report(runs[0], runs[1:], runs[0].parent / "three.html")


def test_zooming_comparing_and_reading_without_a_mouse(compared: Path) -> None:
    seen = act(
        compared,
        """
    const [loss] = charts, other = charts.find((chart) => chart.figure.name === "grad_norm"), { over } = loss.plot;
    const shown = (chart) => [chart.plot.scales.x.min, chart.plot.scales.x.max];
    results.full = shown(loss);
    for (const kind of ["mouseenter", "mousemove", "mousedown"]) mouse(over, kind, 0.25);
    mouse(over, "mousemove", 0.5);
    mouse(over, "mouseup", 0.5);
    await soon();
    results.zoomed = [shown(loss), shown(other)];
    results.kept = JSON.parse(sessionStorage.getItem(NAME)).zooms.step;
    document.getElementById("reset").click();
    await soon();
    results.reset = shown(loss);
    document.getElementById("zoom-in").click();
    await soon();
    results.nearer = shown(other);
    over.dispatchEvent(new MouseEvent("dblclick", { bubbles: true }));
    await soon();
    results.again = shown(other);
    mouse(over, "mousemove", 0.5);
    await soon();
    results.tip = loss.readout.innerText;
    const press = (key) => loss.plot.root.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
    loss.plot.root.focus();
    results.focused = document.activeElement === loss.plot.root;
    press("Home");
    results.first = loss.readout.querySelector("b").innerText;
    press("ArrowRight");
    results.second = loss.readout.querySelector("b").innerText;
    press("+");
    await soon();
    results.pressed = shown(loss);
    press("0");
    await soon();
    results.unpressed = shown(loss);
    const curves = () => loss.plot.series.length - 1;
    results.curves = [curves()];
    slider.value = 0;
    slider.dispatchEvent(new Event("input"));
    results.curves.push(curves());
    document.querySelector('[data-axis="time"]').click();
    await soon();
    results.time = shown(loss);
    """,
    )
    assert seen["full"] == [0, STEPS]
    low, high = seen["kept"]
    assert seen["zoomed"] == [[low, high], [low, high]]
    assert (low, high) == (pytest.approx(0.25 * STEPS, abs=3), pytest.approx(0.5 * STEPS, abs=3))
    assert seen["reset"] == seen["again"] == seen["unpressed"] == [0, STEPS]
    assert seen["nearer"] == [0.25 * STEPS, 0.75 * STEPS]
    assert re.match(r"step 1(49|50|51) · [23] min", seen["tip"])
    values = r"[\d.]+ smoothed, [\d.]+ logged"
    compared_values = rf"slow: training\s+{values}\s+fast: training\s+{values}\s+" r"\N{MINUS SIGN}\d+(\.\d)?%"
    assert re.search(compared_values, seen["tip"])
    assert seen["focused"]
    assert (seen["first"], seen["second"]) == tuple(f"step {n} · {n} s\n% compared with slow" for n in (1, 2))
    assert seen["pressed"][1] - seen["pressed"][0] == pytest.approx(STEPS / 2)
    assert seen["curves"] == [9, 6]  # three runs, each with its smoothed curve and its evaluations
    assert seen["time"] == [0, STEPS]


def test_sorting_copying_and_saving(compared: Path, runs: list[Path]) -> None:
    seen = act(
        compared,
        """
    const order = () => [...document.querySelectorAll("#runs tbody tr")].map((row) => row.cells[0].innerText.trim());
    const head = [...document.querySelectorAll("#runs th")].find((each) => each.innerText.includes("Loss"));
    results.orders = [order()];
    for (let i = 0; i < 2; i++) { head.querySelector("button").click(); results.orders.push(order()); }
    results.sorted = head.getAttribute("aria-sort");
    const differing = [...document.querySelectorAll("#differences tbody tr")];
    results.differences = differing.map((row) => row.innerText.split(/\\s+/));
    Object.defineProperty(navigator, "clipboard", { value: { writeText: async (text) => (results.copied = text) } });
    document.querySelector(".commands .copy").click();
    await soon();
    results.button = document.querySelector(".commands .copy").textContent;
    window.Blob = class { constructor(parts) { results.csv = parts.join(""); } };
    URL.createObjectURL = () => "blob:none";
    HTMLAnchorElement.prototype.click = function () { results.file = this.download; };
    [...document.querySelectorAll("#figure-loss .toggle")].find((each) => each.textContent === "CSV").click();
    results.samples = document.getElementById("samples").innerText;
    results.figures = charts.map((chart) => chart.figure.name);
    """,
    )
    names = ["slow", "fast", "fastest"]
    assert seen["orders"] == [names, names[::-1], names]
    assert seen["sorted"] == "descending"
    assert seen["differences"] == [["learning_rate", "0.01", "0.02", "0.04"]]
    run = runs[0]
    assert seen["copied"] == (
        f"stepmark train {run}/used_recipe.yaml --output_dir {run} --resume_from_checkpoint true --nproc 2"
    )
    assert seen["button"] == "copied"
    assert seen["file"] == "loss.csv"
    rows = list(csv.DictReader(io.StringIO(seen["csv"])))
    assert len(rows) == 3 * (STEPS + 1)
    assert rows[0] == {"run": "slow", "series": "training", "step": "1", "seconds": "1", "value": rows[0]["value"]}
    assert "<i>def <main>(self):" in seen["samples"]
    assert {"processor", "rank_memory", "disk"} <= set(seen["figures"])


SORTED = """
    const shown = (element) => element !== null && element.getClientRects().length > 0;
    const sorter = document.querySelector(".sorter"), select = sorter.querySelector("select");
    results.shown = [shown(document.querySelector("#runs thead")), shown(sorter)];
"""
COLORS = """
    const drawn = () => charts[0].plot.series[charts[0].plot.series.length - 1].stroke();
    results.screen = drawn();
    dispatchEvent(new Event("beforeprint"));
    results.paper = drawn();
    dispatchEvent(new Event("afterprint"));
    results.after = drawn();
"""


def test_a_phone_in_the_dark(compared: Path) -> None:
    """Where a table has no heads, a list of its columns sorts it. Colors follow the scheme, and paper is light."""
    script = """
    const rows = () => [...document.querySelectorAll("#runs tbody tr")];
    const order = () => rows().map((row) => row.cells[0].innerText.trim().split(" ").pop());
    results.options = [...select.options].map((each) => each.text);
    results.orders = [order()];
    select.value = [...select.options].find((each) => each.text.includes("Loss")).value;
    select.dispatchEvent(new Event("change"));
    results.orders.push(order());
    sorter.querySelector("button").click();
    results.orders.push(order());
    results.button = sorter.querySelector("button").textContent;
    results.fits = document.documentElement.scrollWidth <= document.documentElement.clientWidth;
    """
    phone, desk = act(compared, COLORS + SORTED + script, (390, 844), DARK), act(compared, COLORS + SORTED)
    names = ["slow", "fast", "fastest"]
    assert (phone["shown"], desk["shown"]) == ([False, True], [True, False])
    assert phone["options"][:2] == ["as given", "Run"]
    assert phone["orders"] == [names, names[::-1], names]
    assert phone["button"] == "\N{DOWNWARDS ARROW} largest first"
    assert phone["fits"]
    assert desk["screen"] == desk["paper"] == desk["after"]
    assert phone["paper"] == desk["paper"] != phone["screen"] == phone["after"]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of three rates and two seeds, and another that has diverged at once."""
    folder = tmp_path_factory.mktemp("sweep")
    for rate in (0.01, 0.02, 0.04):
        for seed in range(2):
            run = make_run(folder / f"learning_rate={rate},seed={seed}", rate)
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            for line in lines:
                line["loss"] = line.get("loss", 0.0) + seed / 10 if "loss" in line else None
                line |= {"epoch": line["step"] / 100, "tokens_per_second": 100.0, "model_flops_per_second": 3e12}
            write(run / "metrics.jsonl", [{k: v for k, v in line.items() if v is not None} for line in lines])
            recipe = {"learning_rate": rate, "seed": seed, "output_dir": str(run)}
            (run / "used_recipe.yaml").write_text(format_yaml(recipe))
    run = folder / "learning_rate=9,seed=0"
    run.mkdir()
    write(run / "metrics.jsonl", [log(step, loss="NaN", learning_rate=1e4 - step) for step in range(1, 4)])
    (run / "status.json").write_text(json.dumps({"state": "failed", "step": 3, "reason": "it diverged", "time": 1.0}))
    return folder


SET = """
    const set = async (name, value) => {
      document.getElementById(name).value = value;
      document.getElementById(name).dispatchEvent(new Event("input"));
      await soon();
    };
    const [loss] = charts, curves = () => [...new Set(loss.drawn.map(({ points }) => loss.label(points.series)))];
"""


def test_runs_are_filtered_hidden_colored_and_grouped(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(sweep)]) == 0
    page = Path(capsys.readouterr().out.strip())
    assert page == sweep / "report.html"
    seen = act(
        page,
        SET
        + """
    results.begins = document.getElementById("group").value;
    await set("group", "");
    const boxes = [...document.querySelectorAll("#runs [type=checkbox]")];
    results.names = [...document.querySelectorAll("#runs a")].map((each) => each.textContent);
    const [best] = [...document.querySelectorAll("#runs .pill")].filter((each) => each.innerText === "best");
    results.best = best.closest("tr").cells[0].innerText.trim();
    results.legends = document.querySelectorAll("figure .legend button").length;
    results.all = curves().length;
    results.count = [document.getElementById("count").textContent];
    const before = loss.color(loss.figure.series.find((each) => each.run === 3));
    await set("filter", "0.02");
    results.filtered = curves();
    results.count.push(document.getElementById("count").textContent);
    results.sameColor = loss.color(loss.shown().find((each) => each.run === 3)) === before;
    boxes[3].click();
    await soon();
    results.hidden = curves();
    results.rowStays = !boxes[3].closest("tr").hidden;
    await set("filter", "");
    results.withoutOne = curves().length;
    document.getElementById("show-all").click();
    const picker = document.querySelectorAll("#runs [type=color]")[3];
    picker.click();
    results.picker = [picker.value === before, JSON.parse(sessionStorage.getItem(NAME))["hidden runs"]];
    picker.value = "#123456";
    picker.dispatchEvent(new Event("input"));
    await soon();
    results.picked = loss.color(loss.figure.series.find((each) => each.run === 3));
    await set("group", "learning_rate");
    results.groups = curves();
    results.legend = document.getElementById("legend").innerText;
    const mean = loss.shown().find((each) => each.group === "0.02" && each.name === "training");
    results.mean = [mean.y[200], mean.spread[200], mean.count[200], mean.x[200]];
    results.bands = loss.plot.bands.length;
    [...document.querySelectorAll("#legend button")].find((each) => each.innerText === "0.02").click();
    await soon();
    results.afterLegend = curves();
    document.getElementById("show-all").click();
    await set("group", "");
    results.axes = {};
    for (const axis of ["tokens", "epoch", "flops"]) {
      document.querySelector(`[data-axis=${axis}]`).click();
      await soon();
      results.axes[axis] = loss.full;
    }
    results.unit = loss.unit.textContent;
    """,
    )
    short = [f"{rate},{seed}" for rate in (0.01, 0.02, 0.04) for seed in (0, 1)]
    assert seen["names"] == [*short, "9,0"]
    assert seen["best"] == "0.01,0"
    assert seen["begins"] == "learning_rate"
    assert seen["legends"] == 0
    assert seen["all"] == 13  # six curves and six evaluations, and one without values
    assert seen["count"] == ["7 of 7 shown", "2 of 7 shown"]
    assert {name.partition(":")[0] for name in seen["filtered"]} == {"0.02,0", "0.02,1"}
    assert seen["sameColor"]
    assert {name.partition(":")[0] for name in seen["hidden"]} == {"0.02,0"}
    assert (seen["rowStays"], seen["withoutOne"]) == (True, 11)
    assert seen["picker"] == [True, []]
    assert seen["picked"] == "#123456"
    assert {name.partition(":")[0] for name in seen["groups"]} == {"0.01", "0.02", "0.04", NOTHING}
    assert re.sub(r"\s+", " ", seen["legend"]) == f"learning_rate: {NOTHING} 0.01 0.02 0.04"
    mean, spread, count, at = seen["mean"]
    assert (count, spread) == (2, pytest.approx(0.05, abs=1e-3))
    assert mean == pytest.approx(4 * math.exp(-0.02 * at) + 1.05, abs=0.1)
    assert seen["bands"] == 7  # of four curves of training and three of evaluations
    assert {name.partition(":")[0] for name in seen["afterLegend"]} == {"0.01", "0.04", NOTHING}
    assert seen["axes"] == {"tokens": [0, 300_000], "epoch": [0, 3], "flops": [0, pytest.approx(300_000 * 3e10)]}
    assert seen["unit"] == "FLOPs of the model"


TOLD = """
    const told = () => charts[0].box.querySelector(".empty")?.textContent ?? "";
    results.told = [told()];
"""


def test_a_curve_that_is_far_above_many_others_does_not_flatten_them(sweep: Path) -> None:
    """Nor are charts empty without a word once no run is shown."""
    seen = act(
        write_report(sweep),
        TOLD
        + """
    const rate = charts.find((chart) => chart.figure.name === "learning_rate");
    results.top = rate.plot.scales.y.max;
    results.note = rate.note.textContent;
    document.getElementById("hide-all").click();
    await soon();
    results.told.push(told());
    """,
    )
    assert seen["top"] < 0.05
    assert "higher curves are cut off" in seen["note"]
    assert seen["told"] == ["", "no run that is shown has this"]


def test_a_chart_without_values_says_so(sweep: Path) -> None:
    (told,) = act(write_report(sweep / "learning_rate=9,seed=0"), TOLD)["told"]
    assert told == "no finite value: all 3 are nan or infinite"


@pytest.mark.parametrize("width", [390, pytest.param(768, marks=pytest.mark.prove), 1280])
def test_values_cover_nothing(sweep: Path, width: int) -> None:
    """They stand below the chart, where room is kept for them, and the page does not move."""
    seen = act(
        write_report(sweep),
        SET
        + """
    await set("group", "");
    const { over } = loss.plot;
    const tops = () => charts.map((chart) => chart.box.getBoundingClientRect().top), before = tops();
    results.idle = loss.readout.innerText;
    for (const kind of ["mouseenter", "mousemove"]) mouse(over, kind, 0.5);
    await soon();
    results.moved = tops().some((top, i) => Math.abs(top - before[i]) > 1);
    results.read = loss.readout.querySelectorAll("li").length;
    const plot = loss.holder.getBoundingClientRect(), values = loss.readout.getBoundingClientRect();
    results.covers = values.top < plot.bottom - 1 || values.right > document.documentElement.clientWidth;
    results.fits = document.documentElement.scrollWidth <= document.documentElement.clientWidth;
    """,
        (width, 900),
    )
    assert ("values appear here under the pointer" in seen["idle"]) == (width < 1000)
    assert seen["read"] >= 3
    assert (seen["moved"], seen["covers"], seen["fits"]) == (False, False, True)


def test_a_chart_is_saved_as_a_picture_and_as_a_script(sweep: Path, tmp_path: Path) -> None:
    page = write_report(sweep, tables=tmp_path / "tables")
    seen = act(
        page,
        SET
        + """
    await set("group", "");
    const options = { width: 500, height: 300, font: "serif", size: 11 };
    results.svg = drawSvg(loss, options);
    const drawn = drawPng(results.svg, options).then((blob) => blob.arrayBuffer());
    drawn.then((content) => (results.png = [...new Uint8Array(content)].slice(0, 24)));
    while (!results.png) await soon(); // decoding goes on while the browser's clock jumps ahead
    results.plain = matplotlibScript(loss, options);
    await set("group", "learning_rate");
    document.querySelector("[data-axis=tokens]").click();
    await soon();
    results.script = matplotlibScript(loss, options);
    results.grouped = drawSvg(loss, options);
    const lines = loss.shown().filter((each) => each.kind === "line");
    results.means = lines.map((each) => [each.group, each.x.at(-1), each.y.at(-1)]);
    loss.box.querySelector(".buttons button:last-child").click();
    results.open = [document.getElementById("save").open];
    page.save = (name, content, type) => (results.saved = [name, type, content.slice(0, 5)]);
    document.querySelector("#save [value=svg]").click();
    await soon();
    results.open.push(document.getElementById("save").open);
    """,
        (1280, 900),
        "--virtual-time-budget=600000",
    )
    for svg, curves in ((seen["svg"], 18), (seen["grouped"], 6)):
        root = ElementTree.fromstring(svg)
        assert (root.get("width"), root.get("font-family"), root.get("font-size")) == ("500", "serif", "11")
        lines = [each for each in root.iter("{http://www.w3.org/2000/svg}path") if each.get("stroke-opacity")]
        assert len([each for each in lines if each.get("d")]) == curves
    texts = [each.text for each in ElementTree.fromstring(seen["svg"]).iter("{http://www.w3.org/2000/svg}text")]
    assert {"Loss, mean over target tokens", "0.01,0", "9,0", "300", "step"} <= set(texts)
    assert bytes(seen["png"][:8]) == b"\x89PNG\r\n\x1a\n"
    assert [int.from_bytes(seen["png"][at : at + 4]) for at in (16, 20)] == [1000, 600]
    assert (seen["open"], seen["saved"]) == ([True, False], ["loss.svg", "image/svg+xml", "<svg "])
    assert f"stepmark report {sweep} --csv tables\n" in seen["plain"]
    compile(seen["plain"], "plain", "exec")
    told = "import json\nprint(json.dumps([[*map(float, line.get_xydata()[-1])] for line in axes.lines]))"
    environment = {**os.environ, "MPLBACKEND": "Agg"}
    command = [sys.executable, "-c", f"{seen['script']}\n{told}"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    ends = json.loads(done.stdout)
    assert [x for x, _ in ends] == [300_000.0] * 6
    means = {group: (x, y) for group, x, y in seen["means"] if y is not None}
    assert sorted(y for _, y in ends)[-3:] == pytest.approx(sorted(y for _, y in means.values())[-3:], rel=0.02)
    assert (tmp_path / "loss.pdf").read_bytes().startswith(b"%PDF")


def test_a_smoothed_curve_ends_in_a_smoothed_value(tmp_path: Path) -> None:
    """And not in the last value that was logged, which may be a peak; and the page says which is which."""
    run = make_run(tmp_path / "run", 0.02)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    noisy = [json.loads(line) for line in lines if '"loss"' in line]
    for line in noisy:
        line["loss"] = 2 - line["step"] / STEPS + (0.3 if line["step"] % 2 else -0.3)
    noisy[-1]["loss"] = 9.0
    write(run / "metrics.jsonl", noisy)
    seen = act(
        write_report(run, [], tmp_path / "page.html"),
        """
    const [loss] = charts, series = loss.figure.series.find((each) => each.kind === "line");
    const note = () => loss.box.querySelector(".note").textContent;
    const at = (index) => loss.smoothedAt(series, index);
    results.last = series.y.at(-1);
    results.smoothed = [0, 1, 2].map((back) => at(series.y.length - 1 - back));
    results.middle = at(150);
    results.jumps = series.y.slice(20).map((_, i) => Math.abs(at(i + 20) - at(i + 19)));
    results.note = [note()];
    results.tip = loss.valueText(series, series.y.length - 1);
    const slider = document.getElementById("smoothing");
    for (const value of [200, 0]) {
      slider.value = value;
      slider.dispatchEvent(new Event("input"));
      results.note.push(note());
      results[value] = at(series.y.length - 1);
    }
    results.plain = loss.valueText(series, series.y.length - 1);
    """,
    )
    assert seen["last"] == 9.0
    assert seen["smoothed"] == pytest.approx([1.0, 1.0, 1.0], abs=0.35)
    assert seen["middle"] == pytest.approx(1.5, abs=0.35)
    assert max(seen["jumps"]) < 0.35
    assert seen["200"] == pytest.approx(1.0, abs=0.15)  # the window reaches 50 steps back
    assert seen["0"] is None
    assert seen["note"] == ["thick: smoothed, thin: as logged"] * 2 + [""]
    assert re.fullmatch(r"[\d.]+ smoothed, 9 logged", seen["tip"])
    assert seen["plain"] == "9"


def test_csv_files_have_every_value(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 0.01, 5000)
    write_report(run, tables=tmp_path / "tables")
    rows = list(csv.DictReader((tmp_path / "tables" / "loss.csv").read_text().splitlines()))
    assert [row["step"] for row in rows if row["series"] == "training"] == [str(step) for step in range(1, 5001)]
    assert float(rows[99]["value"]) == pytest.approx(4 * math.exp(-1) + 1 + 0.2 * math.sin(730))
    assert {path.stem for path in (tmp_path / "tables").iterdir()} >= {"loss", "grad_norm", "processor", "disk"}


TIMED = """<pre id="results"></pre><script>
const first = performance.now();
while (drawRest()) { /* all of them */ }
document.getElementById("results").textContent = JSON.stringify({ first, all: performance.now() });
</script></body>"""


@pytest.mark.prove
def test_eight_runs_of_100_000_logs_are_there_in_two_seconds(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"run-{index}", 0.001 * (index + 1), 100_000) for index in range(8)]
    page = write_report(runs[0], runs[1:])
    page.write_text(page.read_text().replace("</body>", TIMED))
    found = re.search(r'<pre id="results">(.*?)</pre>', dump_dom(page, real_time=True))
    assert found is not None
    seen = json.loads(found[1])
    print(
        f"{page.stat().st_size / 1e6:.1f} MB: first chart after {seen['first']:.0f} ms, all after {seen['all']:.0f} ms"
    )
    assert seen["first"] < 2000
