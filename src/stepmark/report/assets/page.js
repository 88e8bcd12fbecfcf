"use strict";
// The page: its charts together, the box of values under the pointer, sorted tables, and what is copied and saved.

const page = JSON.parse(document.getElementById("data").textContent);
const charts = [];
const tip = made("div", document.body, { className: "tip", hidden: true });
tip.setAttribute("role", "status");

// What a reader has set stays when the page is loaded again.

const NAME = `stepmark ${document.title}`;
const stored = (() => {
  try { return JSON.parse(sessionStorage.getItem(NAME)) ?? {}; } catch { return {}; }
})();
page.kept = (name) => stored[name];
page.keep = (name, value) => {
  stored[name] = value;
  try { sessionStorage.setItem(NAME, JSON.stringify(stored)); } catch { /* nothing is kept where it is forbidden */ }
};
page.byTime = page.kept("time") ?? false;
page.smoothing = page.kept("smoothing") ?? 20;
page.zooms = page.kept("zooms") ?? {};

// Zoom: one for all charts with the same axis

const axisOf = (chart) => (chart.byTime ? "time" : "step");
page.zoomOf = (chart) => page.zooms[axisOf(chart)] ?? null;

page.zoomTo = (range, on = null) => {
  const axis = on ? axisOf(on) : page.byTime ? "time" : "step";
  if (range) page.zooms[axis] = range; else page.zooms = {};
  page.keep("zooms", page.zooms);
  document.getElementById("reset").disabled = !Object.keys(page.zooms).length;
  charts.forEach((chart) => chart.rescale());
};

// Around a place, 0 the left end of what is shown and 1 the right one.
page.zoomBy = (factor, at = 0.5, on = null) => {
  const chart = on ?? charts.find((each) => !each.stacked) ?? charts[0];
  const [low, high] = page.zoomOf(chart) ?? chart.full, [first, last] = page.extent(chart);
  const middle = low + at * (high - low);
  const range = [Math.max(middle - (middle - low) * factor, first), Math.min(middle + (high - middle) * factor, last)];
  page.zoomTo(range[0] <= first && range[1] >= last ? null : range, chart);
};

page.extent = (chart) => {
  const same = charts.filter((each) => axisOf(each) === axisOf(chart));
  return [Math.min(...same.map((each) => each.full[0])), Math.max(...same.map((each) => each.full[1]))];
};

// Values under the pointer, or at the place that arrow keys have reached

function row(table, color, cells) {
  const line = made("tr", table);
  cells.forEach((text, i) => {
    const cell = made("td", line);
    if (!i) made("i", cell).style.background = color;
    cell.append(text);
  });
}

// How a value differs from that of the first run that has one.
function difference(chart, value, first) {
  if (first === undefined || !first || chart.stacked) return "";
  const share = (value / first - 1) * 100;
  return `${share < 0 ? "−" : "+"}${Math.abs(share).toFixed(Math.abs(share) < 10 ? 1 : 0)}%`;
}

function fillTip(chart, x) {
  const values = chart.valuesAt(x), table = document.createElement("table"), firsts = {};
  const anchor = values.find(({ series }) => series.kind === "line") ?? values[0];
  for (const { series, index } of values) {
    const value = chart.smoothedAt(series, index) ?? series.y[index], compares = page.runs.length > 1 && series.kind !== "lost";
    const other = compares && firsts[series.name] !== undefined ? difference(chart, value, firsts[series.name]) : "";
    if (compares) firsts[series.name] ??= value;
    row(table, chart.color(series), [chart.label(series) + (index === series.best ? " (best)" : ""), chart.valueText(series, index), other]);
  }
  const head = document.createElement("b");
  if (anchor) {
    const { series, index } = anchor, time = series.times[index];
    head.textContent = `step ${series.x[index].toLocaleString("en")}` + (time === null ? "" : ` · ${duration(time)}`);
  }
  tip.replaceChildren(head, table);
  for (const mark of chart.marksAt(x)) made("p", tip, { textContent: mark.label });
  return values.length > 0;
}

page.show = (chart, x) => {
  chart.box.append(tip);
  tip.hidden = !fillTip(chart, x);
  const over = chart.plot.over.getBoundingClientRect(), box = chart.box.getBoundingClientRect();
  const left = over.left - box.left + chart.plot.valToPos(x, "x"), room = chart.box.clientWidth;
  tip.style.top = `${chart.holder.offsetTop + 24}px`;
  tip.style.left = left + 16 + tip.offsetWidth < room ? `${left + 16}px` : `${Math.max(4, left - 16 - tip.offsetWidth)}px`;
};

page.pointed = (chart, u) => {
  if (page.active !== chart || chart.plot !== u || u.cursor.left < 0) return;
  page.show(chart, u.posToVal(u.cursor.left, "x"));
};

page.leave = () => {
  tip.hidden = true;
  page.active = null;
};

const KEYS = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
page.key = (chart, event) => {
  const [low, high] = page.zoomOf(chart) ?? chart.full, share = chart.at === undefined ? 0.5 : (chart.at - low) / (high - low);
  if (event.key === "+" || event.key === "=") page.zoomBy(0.5, Math.min(Math.max(share, 0), 1), chart);
  else if (event.key === "-") page.zoomBy(2, Math.min(Math.max(share, 0), 1), chart);
  else if (event.key === "0" || event.key === "Escape") page.zoomTo(null);
  else if (event.key in KEYS) readAlong(chart, KEYS[event.key], low, high);
  else return;
  event.preventDefault();
};

// Moves by so many places of the longest curve, and shows the values there.
function readAlong(chart, by, low, high) {
  const curves = chart.shown().map((series) => chart.points(series).x.filter((x) => x >= low && x <= high));
  const places = curves.reduce((longest, each) => (each.length > longest.length ? each : longest), []);
  if (!places.length) return;
  const begin = chart.at === undefined ? (by > 0 ? -1 : places.length) : nearest(places, chart.at);
  chart.at = places[Math.min(Math.max(begin + by, 0), places.length - 1)];
  page.active = chart;
  chart.plot.setCursor({ left: chart.plot.valToPos(chart.at, "x"), top: 10 }, false);
  page.show(chart, chart.at);
}

// Buttons above the charts

const rebuild = () => charts.forEach((chart) => chart.build());

for (const button of document.querySelectorAll("[data-axis]")) {
  const press = () => document.querySelectorAll("[data-axis]").forEach((each) => each.setAttribute("aria-pressed", String(each.dataset.axis === (page.byTime ? "time" : "step"))));
  button.onclick = () => {
    page.byTime = button.dataset.axis === "time";
    page.keep("time", page.byTime);
    press();
    rebuild();
  };
  press();
}
const slider = document.getElementById("smoothing");
if (slider) {
  slider.value = page.smoothing;
  slider.oninput = () => {
    page.smoothing = Number(slider.value);
    page.keep("smoothing", page.smoothing);
    charts.filter((chart) => chart.figure.smooth).forEach((chart) => chart.build());
  };
  document.getElementById("zoom-in").onclick = () => page.zoomBy(0.5);
  document.getElementById("zoom-out").onclick = () => page.zoomBy(2);
  document.getElementById("reset").onclick = () => page.zoomTo(null);
  document.getElementById("reset").disabled = !Object.keys(page.zooms).length;
}

// Tables that are sorted by a column, commands that are copied, files that are saved

// Sorts by the column of a head; empty cells come last. A phone has a list of the columns instead of the heads.
function sortBy(head, down) {
  const table = head.closest("table"), body = table.tBodies[0], column = head.cellIndex;
  const key = (line) => line.cells[column].dataset.value ?? line.cells[column].textContent;
  const compare = (a, b) => (isNaN(a) || isNaN(b) ? String(a).localeCompare(String(b)) : a - b);
  const empty = (line) => key(line) === "";
  const lines = [...body.rows].sort((a, b) => empty(a) - empty(b) || compare(key(a), key(b)) * (down ? -1 : 1));
  head.parentElement.querySelectorAll("th").forEach((each) => each.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  body.append(...lines);
  const sorter = table.parentElement.querySelector(".sorter");
  sorter.querySelector("select").value = column;
  sorter.querySelector("button").textContent = down ? "↓ largest first" : "↑ smallest first";
}

const isAscending = (head) => head.getAttribute("aria-sort") === "ascending";
for (const button of document.querySelectorAll("th button"))
  button.onclick = () => sortBy(button.parentElement, isAscending(button.parentElement));

for (const sorter of document.querySelectorAll(".sorter")) {
  const heads = sorter.parentElement.querySelector("thead tr").cells, select = sorter.querySelector("select");
  select.onchange = () => select.value !== "" && sortBy(heads[select.value], false);
  sorter.querySelector("button").onclick = () => {
    const head = heads[select.value === "" ? 0 : select.value];
    sortBy(head, isAscending(head));
  };
}

for (const button of document.querySelectorAll("button.copy"))
  button.onclick = async () => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch { // not allowed here: the older way
      getSelection().selectAllChildren(code);
      document.execCommand("copy");
    }
    button.textContent = "copied";
    setTimeout(() => (button.textContent = "copy"), 1500);
  };

page.save = (name, text) => {
  const link = made("a", null, { download: name, href: URL.createObjectURL(new Blob([text], { type: "text/csv" })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
};

// Drawing: the first chart at once, the others when the page is there

page.figures.slice(0, 1).forEach((figure) => charts.push(new Chart(figure, page.marks, page)));
const drawRest = () => {
  const next = page.figures[charts.length];
  if (next) charts.push(new Chart(next, page.marks, page));
  return next !== undefined;
};
const drawing = setInterval(() => drawRest() || clearInterval(drawing), 0);

let width = document.body.clientWidth;
new ResizeObserver(() => {
  if (document.body.clientWidth !== width) charts.forEach((chart) => chart.resize());
  width = document.body.clientWidth;
}).observe(document.body);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", rebuild);
for (const [event, printing] of [["beforeprint", true], ["afterprint", false]])
  addEventListener(event, () => {
    while (drawRest()) { /* all of them are printed */ }
    page.printing = printing;
    document.documentElement.classList.toggle("printing", printing);
    rebuild();
  });

// Served by `stepmark report --serve`: the page is loaded again when the run has written something

if (page.live)
  setInterval(async () => {
    try {
      const answer = await fetch("version", { cache: "no-store" });
      if (answer.ok && (await answer.text()) !== page.live.version) location.reload();
    } catch { /* the server has ended; what is here stays */ }
  }, page.live.seconds * 1000);
