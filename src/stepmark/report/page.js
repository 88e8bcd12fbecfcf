"use strict";
// Makes the figures interactive: one shared pointer, steps or time along the axis.

const page = JSON.parse(document.getElementById("data").textContent);
page.byTime = false;
const charts = page.figures.map((figure) => new Chart(figure, page.marks, page));
const tip = document.createElement("div");
tip.className = "tip";
tip.hidden = true;

function nearest(xs, value) {
  let best = -1, distance = Infinity;
  xs.forEach((x, i) => {
    if (x !== null && Math.abs(x - value) < distance) [best, distance] = [i, Math.abs(x - value)];
  });
  return best;
}

function row(color, name, value) {
  const line = document.createElement("tr"), cell = document.createElement("td"), swatch = document.createElement("i");
  swatch.style.background = color;
  cell.append(swatch, name);
  const number = document.createElement("td");
  number.textContent = value;
  line.append(cell, number);
  return line;
}

function fillTip(chart, value) {
  const table = document.createElement("table"), { scale } = chart, reach = (8 / (scale.inner.right - scale.inner.left)) * (scale.right - scale.left);
  let step = null, time = null;
  chart.dots.replaceChildren();
  for (const series of chart.shown()) {
    const xs = chart.xs(series), i = nearest(xs, value), far = Math.abs(xs[i] - value);
    if (i < 0 || series.y[i] === null) continue;
    if (far > (series.kind === "line" || series.kind === "bar" ? Math.max(reach, (scale.right - scale.left) / 10) : reach * 2)) continue;
    if (step === null || series.kind === "line") [step, time] = [series.x[i], series.times[i]];
    const text = chart.figure.percent ? `${(series.y[i] * 100).toFixed(1)}%` : series.kind === "bar" ? duration(series.y[i]) : fullNumber(series.y[i]);
    table.append(row(chart.color(series), chart.label(series) + (i === series.best ? " (best)" : ""), text));
    if (series.kind !== "bar" && (!chart.log || series.y[i] > 0))
      element("circle", { cx: scale.x(xs[i]), cy: scale.y(series.y[i]), r: 3.5, fill: chart.color(series) }, chart.dots);
  }
  const head = document.createElement("b");
  head.textContent = step === null ? "" : `step ${step.toLocaleString("en")}` + (time === null ? "" : ` · ${duration(time)}`);
  tip.replaceChildren(head, table);
  for (const mark of chart.marks) {
    const [at, until] = chart.place(mark);
    if (at === null || value < at - reach || value > until + reach) continue;
    const note = document.createElement("p");
    note.textContent = mark.label;
    tip.append(note);
  }
  return step !== null;
}

page.point = (chart, event) => {
  const bounds = chart.svg.getBoundingClientRect(), { inner } = chart.scale;
  const px = ((event.clientX - bounds.left) / bounds.width) * chart.width;
  const value = chart.scale.back(Math.min(Math.max(px, inner.left), inner.right));
  for (const other of charts) {
    const at = other.scale.x(value), inside = other.byTime === chart.byTime && at >= other.scale.inner.left && at <= other.scale.inner.right;
    other.cross.setAttribute("visibility", inside ? "visible" : "hidden");
    other.cross.setAttribute("x1", at);
    other.cross.setAttribute("x2", at);
    if (other !== chart) other.dots.replaceChildren();
  }
  chart.box.append(tip);
  tip.hidden = !fillTip(chart, value);
  const left = event.clientX - chart.box.getBoundingClientRect().left, room = chart.box.clientWidth;
  tip.style.top = `${chart.holder.offsetTop + 24}px`;
  tip.style.left = left + 16 + tip.offsetWidth < room ? `${left + 16}px` : `${Math.max(4, left - 16 - tip.offsetWidth)}px`;
};

page.leave = () => {
  tip.hidden = true;
  for (const chart of charts) {
    chart.cross.setAttribute("visibility", "hidden");
    chart.dots.replaceChildren();
  }
};

const drawAll = () => charts.forEach((chart) => chart.draw());
for (const button of document.querySelectorAll(".switch button"))
  button.onclick = () => {
    page.byTime = button.dataset.axis === "time";
    for (const each of document.querySelectorAll(".switch button")) each.setAttribute("aria-pressed", String(each === button));
    drawAll();
  };
let width = 0;
new ResizeObserver(() => {
  if (document.body.clientWidth !== width) drawAll();
  width = document.body.clientWidth;
}).observe(document.body);
drawAll();
