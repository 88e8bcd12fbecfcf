"use strict";
// A chart as a picture: SVG, PNG from it, or a script for matplotlib.

// The chart as the markup of an SVG element of this size, in light colors.
function drawSvg(chart, { width, height, font, size }) {
  const root = document.documentElement, dark = !root.classList.contains("printing");
  root.classList.toggle("printing", true);
  try {
    return drawLightSvg(chart, width, height, font, size);
  } finally {
    root.classList.toggle("printing", !dark);
  }
}

function drawLightSvg(chart, width, height, font, size) {
  const { figure, log } = chart, curves = chart.curves(), [left, right] = chart.page.zoomOf(chart) ?? chart.full;
  const inside = curves.flatMap(({ points, ys }) => ys.filter((y, i) => y !== null && points.x[i] >= left && points.x[i] <= right));
  const least = (values) => values.reduce((a, b) => Math.min(a, b), Infinity), most = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
  const [low, high] = inside.length ? chart.span(least(inside), most(inside)) : chart.span(null, null);
  const yTicks = log ? logTicks(low, high) : niceTicks(low, high, Math.max(2, height / size / 6));
  const yLabels = figure.percent ? yTicks.map((v) => `${+(v * 100).toPrecision(3)}%`) : tickLabels(yTicks);
  const named = (series) => series.group ?? (chart.several ? chart.page.runs[series.run] : series.name);
  const labels = new Map(chart.shown().filter((series) => series.kind !== "lost").map((series) => [named(series), series]));
  const character = size * (font === "monospace" ? 0.62 : 0.56), entry = most([0, ...[...labels.keys()].map((each) => each.length)]) * character + 2.6 * size;
  const columns = Math.max(1, Math.floor((width - size) / entry)), lines = Math.max(1, Math.floor((height * 0.4) / size / 1.4));
  const legend = labels.size > 1 ? Math.min(Math.ceil(labels.size / columns), lines) * 1.4 * size : 0, last = columns * lines - 1;
  const x0 = most(yLabels.map((each) => each.length)) * character + 1.2 * size, x1 = width - size, y0 = height - 3 * size, y1 = 2.6 * size + legend;
  const scale = (value, from, to, start, end) => +(start + ((value - from) / (to - from)) * (end - start)).toFixed(2);
  const x = (value) => scale(value, left, right, x0, x1);
  const y = (value) => (log ? scale(Math.log(value), Math.log(low), Math.log(high), y0, y1) : scale(value, low, high, y0, y1));
  const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll('"', "&quot;");
  const text = (at, top, words, more = "") => `<text x="${at}" y="${top}" ${more}>${escaped(words)}</text>`;
  const clip = `inside-${Math.random().toString(36).slice(2)}`; // another picture of the same document has another
  const parts = [`<rect width="${width}" height="${height}" fill="#ffffff"/>`];
  parts.push(text(size / 2, 1.4 * size, figure.title + (figure.unit ? `, ${figure.unit}` : ""), 'font-weight="bold"'));
  [...labels].forEach(([label, series], i) => {
    if (!legend || i > last) return;
    const at = size / 2 + (i % columns) * entry, top = (3 + Math.floor(i / columns) * 1.4) * size;
    if (i === last && labels.size > last + 1) parts.push(text(at, top, `and ${labels.size - last} more`));
    else parts.push(`<rect x="${at}" y="${top - size * 0.5}" width="${size}" height="${size / 4}" fill="${chart.color(series)}"/>`, text(at + 1.5 * size, top, label));
  });
  yTicks.forEach((tick, i) => parts.push(`<path d="M${x0} ${y(tick)}H${x1}" stroke="#e4e4e4"/>`, text(x0 - size / 2, y(tick) + size * 0.35, yLabels[i], 'text-anchor="end"')));
  for (const tick of niceTicks(left, right, Math.max(2, width / size / 9)))
    parts.push(text(x(tick), y0 + 1.4 * size, chart.xLabel(tick, right), 'text-anchor="middle"'));
  parts.push(text(x1, height - 0.4 * size, chart.axis === "time" ? timeUnit(right)[1] : AXIS_UNITS[chart.axis], 'text-anchor="end"'));
  parts.push(`<clipPath id="${clip}"><rect x="${x0}" y="${y1 - 4}" width="${x1 - x0}" height="${y0 - y1 + 8}"/></clipPath><g clip-path="\u0075rl(#${clip})" fill="none">`);
  curves.forEach((curve, i) => {
    const { points, ys, bar, edge } = curve, style = chart.style(curve), { series } = points;
    const runs = [[]];
    ys.forEach((value, at) => (value === null ? runs.push([]) : runs.at(-1).push([x(points.x[at]), y(value)])));
    const line = runs.filter((run) => run.length).map((run) => `M${run.map((each) => each.join(" ")).join("L")}`).join("");
    if (edge === -1) return;
    if (edge === 1) {
      const lower = curves[i + 1].ys.map((value, at) => (value === null ? null : [x(points.x[at]), y(value)])).filter(Boolean).reverse();
      parts.push(`<path d="M${[...runs.flat(), ...lower].map((each) => each.join(" ")).join("L")}Z" fill="${chart.color(series)}" fill-opacity="0.15"/>`);
    } else if (bar) {
      const steps = runs.flat().slice(1).map(([at, top], j) => `M${runs.flat()[j][0]} ${y(0)}V${top}H${at}V${y(0)}Z`).join("");
      parts.push(`<path d="${steps}" fill="${style.fill}"/>`);
    } else {
      const dash = style.dash ? ` stroke-dasharray="${style.dash.join(" ")}"` : "";
      parts.push(`<path d="${line}" stroke="${style.stroke}" stroke-width="${style.width}" stroke-opacity="${style.alpha}"${dash}/>`);
      const dots = series.kind === "points" ? runs.flat() : runs.filter((run) => run.length === 1).flat();
      for (const [at, top] of dots) parts.push(`<circle cx="${at}" cy="${top}" r="3" stroke="${style.stroke}" fill="${series.hollow ? "#ffffff" : style.stroke}"/>`);
    }
  });
  parts.push("</g>");
  const holder = made("template", null, { innerHTML: `<svg width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="${font}" font-size="${size}" fill="#222222">${parts.join("")}</svg>` });
  return new XMLSerializer().serializeToString(holder.content.firstChild); // with its namespace
}

async function drawPng(svg, { width, height }) {
  const image = new Image(), canvas = made("canvas", null, { width: 2 * width, height: 2 * height });
  await new Promise((loaded, failed) => {
    Object.assign(image, { onload: loaded, onerror: failed, src: `data:image/svg+xml;charset=utf-8,${encodeURIComponent(svg)}` });
  });
  canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done) => canvas.toBlob(done, "image/png"));
}

// A script that draws the chart from the complete values.
function matplotlibScript(chart, { width, height, font, size }) {
  const { page, figure } = chart, several = page.runs.length > 1, strength = figure.smooth ? page.smoothing : 0;
  const ofRun = (i) => [page.runs[i], hex(resolved(page.colors[i])), [page.names[i]]];
  const runs = page.names.map((_, i) => i).filter((i) => !several || page.runShown(i));
  const curves = page.group ? [...page.groups()].map(([name, { runs, color }]) => [`${page.group} ${name}`, hex(resolved(page.colors[color])), runs.map((i) => page.names[i])]) : runs.map(ofRun);
  const series = Object.fromEntries(chart.shown().filter((s) => s.kind !== "lost").map((s) => [s.name, s.kind === "points" ? "o-" : "-"]));
  const axis = { time: "seconds" }[chart.axis] ?? chart.axis, quoted = (value) => JSON.stringify(value);
  const limits = Object.entries({ x: page.zoomOf(chart), y: chart.cut < Infinity ? [chart.plot.scales.y.min, chart.plot.scales.y.max] : null });
  return `# ${figure.title}. First write the values: ${page.command} --csv tables
import csv
from collections import defaultdict
from statistics import mean, median_high, pstdev

import matplotlib.pyplot as plt

plt.rcParams.update({"font.family": ${quoted(font)}, "font.size": ${size * 0.72}})  # points
SMOOTHING = ${strength}  # a window of so many 600ths of a curve; 0: none
CURVES = [  # label, color, runs: of several the mean, and one standard deviation around it
${curves.map((each) => `    (${each.map(quoted).join(", ")}),`).join("\n")}
]
STYLES = ${quoted(series)}


def smooth(values):
    reach = max(1, round(len(values) * SMOOTHING / 1200))
    if not SMOOTHING or len(values) <= 60:
        return values
    middle = [median_high(values[i - min(2, i) : i + min(2, i) + 1]) for i in range(len(values))]
    return [mean(middle[i - min(reach, i) : i + min(reach, i) + 1]) for i in range(len(values))]


points = defaultdict(dict)  # by run and series: x and y by step
with open("tables/${figure.name}.csv", newline="") as file:
    for row in csv.DictReader(file):
        if row["value"] and row["${axis}"]:
            points[row["run"], row["series"]][float(row["step"])] = float(row["${axis}"]), float(row["value"])

figure, axes = plt.subplots(figsize=(${width / 100}, ${height / 100}), layout="constrained")
for label, color, runs in CURVES:
    for name, style in STYLES.items():
        found = [points[run, name] for run in runs if points[run, name]]
        if not found:
            continue
        ys = [[y for _, y in run.values()] for run in found]
        curves = [dict(zip(run, smooth(y) if style == "-" else y)) for run, y in zip(found, ys)]
        steps = sorted(set().union(*found))  # at each, the runs that have it
        xs = [mean(run[step][0] for run in found if step in run) for step in steps]
        columns = [[curve[step] for curve in curves if step in curve] for step in steps]
        means, spreads = [mean(column) for column in columns], [pstdev(column) for column in columns]
        axes.plot(xs, means, style, color=color, markersize=4, label=label if name == next(iter(STYLES)) else None)
        if len(found) > 1:
            edges = [[m + sign * s for m, s in zip(means, spreads)] for sign in (-1, 1)]
            axes.fill_between(xs, *edges, color=color, alpha=0.15, linewidth=0)
axes.set(title=${quoted(figure.title)}, xlabel=${quoted(axis === "seconds" ? "seconds" : AXIS_UNITS[axis])}, ylabel=${quoted(figure.unit)}${chart.log ? ', yscale="log"' : ""}${limits.map(([name, ends]) => (ends ? `, ${name}lim=(${ends.join(", ")})` : "")).join("")})
${curves.length > 1 ? 'figure.legend(loc="outside lower center", ncols=2)\n' : ""}figure.savefig("${figure.name}.pdf")
`;
}

// A color as #rrggbb.
function hex(color) {
  const pen = document.createElement("canvas").getContext("2d");
  pen.fillStyle = color;
  return pen.fillStyle;
}

const openSave = (chart) => {
  const dialog = document.getElementById("save"), input = (name) => document.getElementById(`save-${name}`);
  for (const [name, value] of Object.entries(page.kept("save") ?? {})) input(name).value = value;
  dialog.querySelector("form").onsubmit = async ({ submitter }) => {
    const options = { width: +input("width").value, height: +input("height").value, font: input("font").value, size: +input("size").value };
    const kind = submitter.value, { name } = chart.figure;
    if (kind) page.keep("save", options);
    if (kind === "svg") page.save(`${name}.svg`, drawSvg(chart, options), "image/svg+xml");
    if (kind === "png") page.save(`${name}.png`, await drawPng(drawSvg(chart, options), options), "image/png");
    if (kind === "py") page.save(`${name}.py`, matplotlibScript(chart, options), "text/x-python");
  };
  dialog.showModal();
};
