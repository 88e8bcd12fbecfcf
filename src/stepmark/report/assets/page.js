"use strict";
// The page: its charts together, the runs that are shown, sorted tables, and what is copied and saved.

const page = JSON.parse(document.getElementById("data").textContent);
const charts = [];

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
page.axis = page.kept("axis") ?? "step";
page.smoothing = page.kept("smoothing") ?? 20;
page.zooms = page.kept("zooms") ?? {};

// Zoom: one for all charts with the same axis

const axisOf = (chart) => chart.axis;
page.zoomOf = (chart) => page.zooms[axisOf(chart)] ?? null;

page.zoomTo = (range, on = null) => {
  const axis = on ? axisOf(on) : page.axis;
  if (range) page.zooms[axis] = range; else page.zooms = {};
  page.keep("zooms", page.zooms);
  document.getElementById("reset").disabled = !Object.keys(page.zooms).length;
  charts.forEach((chart) => {
    chart.rescale();
    chart.read(null);
  });
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

// Values under the pointer, or at the place that arrow keys have reached: below the chart, where they cover nothing

// How a value differs from that of the first run that has one.
function difference(chart, value, first) {
  if (first === undefined || !first || chart.stacked) return "";
  const share = (value / first - 1) * 100;
  return `${share < 0 ? "−" : "+"}${Math.abs(share).toFixed(Math.abs(share) < 10 ? 1 : 0)}%`;
}

page.pointed = (chart, u) => {
  if (page.active !== chart || chart.plot !== u || u.cursor.left < 0) return;
  chart.read(u.posToVal(u.cursor.left, "x"), u.cursor.top);
};

page.leave = () => {
  page.active?.read(null);
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
  chart.read(chart.at);
}

// Buttons above the charts

const rebuild = () => charts.forEach((chart) => chart.build());

const axisButtons = [...document.querySelectorAll("[data-axis]")];
const pressAxis = () => axisButtons.forEach((each) => each.setAttribute("aria-pressed", String(each.dataset.axis === page.axis)));
for (const button of axisButtons) {
  const { axis } = button.dataset;
  button.hidden = axis in AXIS_UNITS && axis !== "step" && !page.axes.some((each) => each[axis]);
  button.onclick = () => {
    page.axis = axis;
    page.keep("axis", axis);
    pressAxis();
    rebuild();
  };
}
pressAxis();
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

page.save = (name, content, type) => {
  const link = made("a", null, { download: name, href: URL.createObjectURL(new Blob([content], { type })) });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
};

// Runs: which are shown, their colors, and groups of them

const rows = [...(document.getElementById("runs")?.tBodies[0].rows ?? [])]; // by the index of the run
const control = (name) => document.getElementById(name);
page.hidden = new Set(page.kept("hidden runs") ?? []);
// Runs of several seeds begin in groups: by the first other field that has fewer values than there are runs.
const swept = "seed" in page.fields && Object.keys(page.fields).find((name) => !name.endsWith("seed") && new Set(page.fields[name]).size < rows.length);
const kept = page.kept("group") ?? swept;
page.group = kept in page.fields ? kept : "";
page.filter = page.kept("filter") ?? "";
const matches = (i) => page.filter.toLowerCase().split(/\s+/).every((word) => `${page.names[i]} ${rows[i].textContent}`.toLowerCase().includes(word));
page.runShown = (i) => !page.hidden.has(page.names[i]) && !rows[i].hidden;

// By the value of the field: the runs that are shown, and the index of a color, which stays when others are hidden.
page.groups = () => {
  const values = page.fields[page.group], found = new Map();
  const all = [...new Set(values)].sort((a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b));
  all.forEach((value, color) => {
    const runs = values.flatMap((each, i) => (each === value && page.runShown(i) ? [i] : []));
    if (runs.length) found.set(value, { runs, color });
  });
  return found;
};

function hideRuns(indices, hide) {
  indices.forEach((i) => page.hidden[hide ? "add" : "delete"](page.names[i]));
  page.keep("hidden runs", [...page.hidden]);
  showRuns();
  rebuild();
}

// The rows, the legend of all charts, and how many runs are shown.
function showRuns() {
  rows.forEach((row, i) => {
    row.hidden = !matches(i);
    row.querySelector("[type=checkbox]").checked = !page.hidden.has(page.names[i]);
    row.querySelector(".dot").style.background = page.colors[i];
  });
  const all = rows.map((_, i) => i), kept = all.filter((i) => !rows[i].hidden);
  control("count").textContent = `${all.filter(page.runShown).length} of ${all.length} shown`;
  const legend = control("legend"), entries = kept.map((i) => [page.runs[i], [i], i]);
  if (page.group) {
    const values = page.fields[page.group], colors = [...new Set(values)].sort((a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b) : a - b));
    entries.splice(0, Infinity, ...colors.map((value, color) => [value, kept.filter((i) => values[i] === value), color]).filter(([, runs]) => runs.length));
  }
  legend.replaceChildren(...(page.group ? [`${page.group}: `] : []));
  for (const [label, runs, color] of entries) {
    const button = made("button", legend, { type: "button", title: runs.map((i) => page.names[i]).join("\n") }), shown = runs.some(page.runShown);
    made("i", button).style.background = page.colors[color];
    button.append(label);
    button.setAttribute("aria-pressed", String(shown));
    button.onclick = () => hideRuns(runs, shown);
  }
}

if (rows.length) {
  rows.forEach((row, i) => {
    const picker = row.querySelector("[type=color]");
    page.colors[i] = page.kept(`color ${page.names[i]}`) ?? page.colors[i];
    row.querySelector("[type=checkbox]").onchange = ({ target }) => hideRuns([i], !target.checked);
    picker.onclick = () => (picker.value = hex(resolved(page.colors[i])));
    picker.oninput = () => {
      page.colors[i] = picker.value;
      page.keep(`color ${page.names[i]}`, picker.value);
      showRuns();
      rebuild();
    };
  });
  const filter = control("filter"), group = control("group"), visible = () => rows.flatMap((row, i) => (row.hidden ? [] : [i]));
  Object.keys(page.fields).forEach((name) => made("option", group, { textContent: name, value: name }));
  [filter.value, group.value] = [page.filter, page.group];
  for (const [input, name] of [[filter, "filter"], [group, "group"]])
    input.oninput = () => {
      page[name] = input.value.trim();
      page.keep(name, page[name]);
      showRuns();
      rebuild();
    };
  control("show-all").onclick = () => hideRuns(visible(), false);
  control("hide-all").onclick = () => hideRuns(visible(), true);
  showRuns();
}
const unfold = () => document.querySelector(location.hash.startsWith("#run-") ? location.hash : null)?.setAttribute("open", "");
addEventListener("hashchange", unfold);
document.addEventListener("toggle", ({ target }) => target.querySelectorAll("pre").forEach((each) => (each.scrollTop = each.scrollHeight)), true); // the cause is at the end
unfold();

// Drawing: the first chart at once, the others when the page is there

page.figures.slice(0, 1).forEach((figure) => charts.push(new Chart(figure, page.marks, page)));
const drawRest = () => {
  const next = page.figures[charts.length];
  if (next) charts.push(new Chart(next, page.marks, page));
  return next !== undefined;
};
const drawing = setInterval(() => drawRest() || clearInterval(drawing), 0);

// A table that is wider than the page breaks its cells, and one that still is has its rows as lists.
function fitTables() {
  const narrow = matchMedia("(max-width: 760px)").matches;
  for (const each of document.querySelectorAll(".table")) {
    const overflows = () => each.scrollWidth > each.clientWidth;
    each.classList.remove("broken");
    each.classList.toggle("listed", narrow);
    each.classList.toggle("broken", !narrow && overflows());
    each.classList.toggle("listed", narrow || overflows());
  }
}

let width = document.body.clientWidth;
fitTables();
document.addEventListener("toggle", fitTables, true);
new ResizeObserver(() => {
  if (document.body.clientWidth !== width) charts.forEach((chart) => chart.resize());
  if (document.body.clientWidth !== width) fitTables();
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
