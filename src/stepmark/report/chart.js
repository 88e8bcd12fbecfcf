"use strict";
// Draws one figure as inline SVG at the available width, with values under the pointer.

const SVG = "http://www.w3.org/2000/svg";
const MARKS = {
  resumed: ["var(--c2)", "resumed"], compilation: ["var(--warn)", "compiled"], trouble: ["var(--bad)", "trouble"],
  lost: ["var(--bad)", "trained again"],
};
const DIGIT = 6.8; // pixels, the width of a digit of an axis
const PART_COLORS = { step: "var(--c0)", data: "var(--c1)", save: "var(--c2)", evaluation: "var(--c3)" };

function element(name, attributes = {}, parent = null, text = null) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function niceTicks(low, high, count) {
  const raw = (high - low || 1) / count, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step + 0);
  return ticks;
}

function logTicks(low, high) {
  const ticks = [], first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const factors = last - first > 3 ? [1] : last - first > 1 ? [1, 3] : [1, 2, 5];
  for (let power = first; power <= last; power++)
    for (const factor of factors) {
      const tick = factor * 10 ** power;
      if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
    }
  return ticks.length > 1 ? ticks : [low, high];
}

function shortNumber(value) {
  const size = Math.abs(value);
  if (size >= 1e9) return +(value / 1e9).toPrecision(3) + "G";
  if (size >= 1e6) return +(value / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return +(value / 1e3).toPrecision(3) + "k";
  if (size > 0 && size < 1e-3) return value.toExponential(1).replace(".0e", "e").replace("e-", "e−");
  return String(+value.toPrecision(3));
}

// The labels of ticks, all in the same form.
function tickLabels(ticks) {
  const most = Math.max(...ticks.map(Math.abs)), step = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : most;
  if (most >= 1e4 || most < 1e-3 || most / Math.min(...ticks.filter((t) => t > 0)) > 500) return ticks.map(shortNumber);
  const digits = Math.max(0, ...ticks.map((t) => (String(+t.toPrecision(6)).split(".")[1] || "").length));
  return ticks.map((t) => t.toFixed(Math.min(digits, Math.max(0, 3 - Math.floor(Math.log10(step))))));
}

function fullNumber(value) {
  const size = Math.abs(value);
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  if (size > 0 && size < 1e-3) return value.toExponential(3);
  return String(+value.toPrecision(5));
}

function duration(seconds) {
  if (seconds < 100) return `${+seconds.toPrecision(2)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  return `${+(seconds / 3600).toPrecision(3)} h`;
}

// The mean of neighbours' medians, so that one peak moves nothing, in windows that shrink at the ends, so that the curve
// does not lag.
function smooth(values) {
  const reach = Math.max(2, Math.round(values.length / 60));
  const median = (near) => near.sort((a, b) => a - b)[near.length >> 1];
  const mean = (near) => near.reduce((a, b) => a + b, 0) / near.length;
  return around(around(values, reach, median), Math.ceil(reach / 2), mean);
}

function around(values, reach, measure) {
  return values.map((value, i) => {
    if (value === null) return null;
    const span = Math.min(reach, i, values.length - 1 - i);
    return measure(values.slice(i - span, i + span + 1).filter((v) => v !== null));
  });
}

class Chart {
  constructor(figure, marks, page) {
    Object.assign(this, { figure, page, marks: figure.name === "time" ? [] : marks });
    this.hidden = new Set();
    this.log = figure.log;
    this.names = [...new Set(figure.series.filter((s) => s.kind !== "lost").map((s) => s.name))];
    this.box = document.getElementById(`figure-${figure.name}`);
    this.wide = this.box.classList.contains("wide");
    this.holder = this.box.querySelector(".plot");
    this.makeLegend();
    const positive = figure.series.every((s) => s.y.every((v) => v === null || v > 0));
    if (positive && figure.name !== "time" && figure.name !== "memory") this.makeToggle();
  }

  color(series) {
    if (series.kind === "bar") return PART_COLORS[series.name];
    const base = series.name.replace(", trained again", "");
    return this.page.colors[this.page.runs.length > 1 ? series.run : this.names.indexOf(base)];
  }

  label(series) {
    const { runs } = this.page;
    if (runs.length < 2) return series.name;
    const lost = series.kind === "lost" ? ", trained again" : "";
    return this.names.length > 1 ? `${runs[series.run]}: ${series.name}` : runs[series.run] + lost;
  }

  makeLegend() {
    const legend = this.box.querySelector(".legend");
    const labels = [...new Set(this.figure.series.filter((s) => s.kind !== "lost").map((s) => this.label(s)))];
    if (labels.length < 2) return;
    for (const label of labels) {
      const series = this.figure.series.find((s) => this.label(s) === label);
      const button = document.createElement("button"), swatch = document.createElement("i");
      button.setAttribute("aria-pressed", "true");
      swatch.className = series.kind;
      swatch.style.background = this.color(series);
      button.append(swatch, label);
      button.onclick = () => {
        this.hidden.has(label) ? this.hidden.delete(label) : this.hidden.add(label);
        button.setAttribute("aria-pressed", String(!this.hidden.has(label)));
        this.draw();
      };
      legend.append(button);
    }
  }

  makeToggle() {
    const button = document.createElement("button");
    button.className = "toggle";
    button.textContent = "log";
    button.title = "logarithmic axis";
    button.setAttribute("aria-pressed", String(this.log));
    button.onclick = () => {
      this.log = !this.log;
      button.setAttribute("aria-pressed", String(this.log));
      this.draw();
    };
    this.box.querySelector("figcaption").append(button);
  }

  // Bars are of steps, whatever the axis of the curves is.
  get byTime() { return this.page.byTime && this.figure.name !== "time"; }

  xs(series) { return this.byTime ? series.times : series.x; }

  shown() { return this.figure.series.filter((s) => !this.hidden.has(this.label(s).replace(", trained again", ""))); }

  // Where a mark begins and ends on the axis.
  place(mark) {
    return this.byTime ? [mark.time, mark.until_time ?? mark.time] : [mark.step, mark.until ?? mark.step];
  }

  scales(width, height) {
    const series = this.shown();
    const xs = series.flatMap((s) => this.xs(s)).filter((x) => x !== null);
    let ys = series.flatMap((s) => s.y).filter((y) => y !== null && (!this.log || y > 0));
    if (this.figure.name === "time")
      ys = series.length ? series[0].y.map((_, i) => series.reduce((sum, s) => sum + s.y[i], 0)) : [];
    let left = Math.min(...xs), right = Math.max(...xs), low = Math.min(...ys), high = Math.max(...ys);
    if (!xs.length || !ys.length) [left, right, low, high] = [0, 1, 0, 1];
    if (left < right * 0.25) left = 0;
    if (left === right) [left, right] = [left - 1, right + 1];
    const pad = this.log ? 0 : (high - low || Math.abs(high) || 1) * 0.06;
    if (this.figure.zero && !this.log) low = 0; else low -= pad;
    high += pad;
    if (this.log) [low, high] = [low / 1.12, high * 1.12];
    const ticks = this.log ? logTicks(low, high) : niceTicks(low, high, this.wide ? 6 : 4);
    const labels = this.figure.percent ? ticks.map((v) => `${+(v * 100).toPrecision(3)}%`) : tickLabels(ticks);
    const room = Math.max(...labels.map((label) => label.length)) * DIGIT + 11;
    const inner = { left: Math.max(50, room), right: width - 12, top: 20, bottom: height - 24 };
    const part = this.log
      ? (y) => (Math.log(y) - Math.log(low)) / (Math.log(high) - Math.log(low))
      : (y) => (y - low) / (high - low);
    return {
      inner, left, right, low, high, ticks, labels,
      x: (x) => inner.left + ((x - left) / (right - left)) * (inner.right - inner.left),
      y: (y) => inner.bottom - part(y) * (inner.bottom - inner.top),
      back: (px) => left + ((px - inner.left) / (inner.right - inner.left)) * (right - left),
    };
  }

  draw() {
    const width = Math.max(this.holder.clientWidth, 260), height = this.wide ? (width < 560 ? 260 : 320) : 215;
    const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": this.figure.title });
    this.scale = this.scales(width, height);
    this.width = width;
    this.axes(svg);
    this.drawBands(svg);
    if (this.figure.name === "time") this.drawBars(svg);
    else for (const series of [...this.shown()].sort((a, b) => b.run - a.run)) this.drawSeries(svg, series);
    this.drawMarks(svg);
    this.cross = element("line", { class: "cross", y1: this.scale.inner.top, y2: this.scale.inner.bottom, visibility: "hidden" }, svg);
    this.dots = element("g", {}, svg);
    this.holder.replaceChildren(svg);
    svg.addEventListener("pointermove", (event) => this.page.point(this, event));
    svg.addEventListener("pointerdown", (event) => this.page.point(this, event));
    svg.addEventListener("pointerleave", () => this.page.leave());
    this.svg = svg;
  }

  axes(svg) {
    const { inner, x, y, left, right, ticks, labels } = this.scale;
    ticks.forEach((tick, i) => {
      element("line", { class: "grid", x1: inner.left, x2: inner.right, y1: y(tick), y2: y(tick) }, svg);
      element("text", { x: inner.left - 7, y: y(tick) + 4, "text-anchor": "end" }, svg, labels[i]);
    });
    element("line", { class: "axis", x1: inner.left, x2: inner.right, y1: inner.bottom, y2: inner.bottom }, svg);
    const name = this.byTime ? timeAxis(right) : { scale: 1, unit: "step", text: (v) => (v >= 1e4 ? shortNumber(v) : v.toLocaleString("en")) };
    const count = Math.max(2, Math.min(8, Math.floor(this.width / 95)));
    for (const tick of niceTicks(left / name.scale, right / name.scale, count)) {
      if (!this.byTime && tick % 1) continue;
      const at = x(tick * name.scale);
      if (at > inner.right - 14 - name.unit.length * 6.5) continue;
      element("text", { x: at, y: inner.bottom + 16, "text-anchor": "middle" }, svg, name.text(tick));
    }
    element("text", { x: inner.right, y: inner.bottom + 16, "text-anchor": "end" }, svg, name.unit);
  }

  drawSeries(svg, series) {
    const { x, y } = this.scale, xs = this.xs(series), color = this.color(series);
    const group = element("g", { class: `series ${series.kind}`, "data-name": series.name }, svg);
    if (series.kind === "points") {
      this.path(group, xs, series.y, { stroke: color, "stroke-width": 1, "stroke-opacity": 0.5, fill: "none" });
      series.y.forEach((value, i) => {
        if (value === null || xs[i] === null || (this.log && value <= 0)) return;
        const best = i === series.best;
        const circle = { cx: x(xs[i]), cy: y(value), r: best ? 5 : 3.2, stroke: best ? "var(--card)" : color, "stroke-width": 1.5 };
        if (best) element("circle", { cx: x(xs[i]), cy: y(value), r: 9, fill: "none", stroke: color, "stroke-width": 1.5, class: "best", "data-step": series.x[i] }, group);
        element("circle", { ...circle, fill: series.hollow && !best ? "var(--card)" : color }, group);
        if (best) this.tag(group, x(xs[i]), y(value) - 14, "best", color);
      });
      return;
    }
    const lost = series.kind === "lost", many = series.y.length > 60 && this.figure.smooth && !lost;
    const raw = { stroke: color, fill: "none", "stroke-linejoin": "round", "stroke-width": many ? 1 : series.run ? 3 : 1.8 };
    if (many) raw["stroke-opacity"] = 0.35;
    if (lost) Object.assign(raw, { "stroke-dasharray": "3 3", "stroke-opacity": 0.75, "stroke-width": 1.3 });
    this.path(group, xs, series.y, raw);
    if (many) this.path(group, xs, smooth(series.mean ?? series.y), { ...raw, "stroke-opacity": series.run ? 0.8 : 1, "stroke-width": series.run ? 3.4 : 2 });
  }

  path(parent, xs, ys, attributes) {
    const { x, y } = this.scale;
    const drawn = (i) => i >= 0 && i < ys.length && ys[i] !== null && xs[i] !== null && !(this.log && ys[i] <= 0);
    let d = "";
    ys.forEach((value, i) => {
      if (!drawn(i)) return;
      d += `${drawn(i - 1) ? "L" : "M"}${x(xs[i]).toFixed(1)} ${y(value).toFixed(1)}`;
      if (!drawn(i - 1) && !drawn(i + 1))  // a path of one point is invisible
        element("circle", { class: "single", cx: x(xs[i]), cy: y(value), r: 2.5, fill: attributes.stroke }, parent);
    });
    if (d) element("path", { d, ...attributes }, parent);
  }

  drawBars(svg) {
    const { x, y, inner } = this.scale, shown = this.shown();
    if (!shown.length) return;
    const xs = this.xs(shown[0]), sums = xs.map(() => 0);
    for (const series of shown) {
      const group = element("g", { class: "series bar", "data-name": series.name, fill: this.color(series) }, svg);
      series.y.forEach((value, i) => {
        const from = i ? x(xs[i - 1]) : inner.left, to = x(xs[i]);
        const base = sums[i];
        sums[i] += value;
        const gap = to - from > 5 ? 1.5 : 0;
        if (value > 0) element("rect", { x: from + gap / 2, width: Math.max(to - from - gap, 0.5), y: y(sums[i]), height: y(base) - y(sums[i]) }, group);
      });
    }
  }

  drawBands(svg) {
    const { x, inner } = this.scale;
    for (const mark of this.marks.filter((m) => m.kind === "lost")) {
      const [from, to] = this.place(mark);
      if (from === null || to === null || to < from) continue;
      element("rect", {
        class: "mark", "data-kind": "lost", "data-step": mark.step, "data-until": mark.until, x: x(from), y: inner.top,
        width: Math.max(x(to) - x(from), 1), height: inner.bottom - inner.top, fill: "var(--bad)", opacity: 0.09,
      }, svg);
    }
  }

  drawMarks(svg) {
    const { x, inner } = this.scale;
    const placed = this.marks.filter((m) => m.kind !== "lost" && this.place(m)[0] !== null).map((m) => [x(this.place(m)[0]), m]);
    const inside = placed.filter(([px]) => px > inner.left - 1 && px < inner.right + 1).sort((a, b) => a[0] - b[0]);
    inside.forEach(([px, mark], i) => {
      const [color, label] = MARKS[mark.kind], room = (i + 1 < inside.length ? inside[i + 1][0] : inner.right) - px;
      const group = element("g", { class: "mark", "data-kind": mark.kind, "data-step": mark.step }, svg);
      element("line", { x1: px, x2: px, y1: inner.top - 6, y2: inner.bottom, stroke: color, "stroke-width": 1.2, "stroke-dasharray": "4 3" }, group);
      element("circle", { cx: px, cy: inner.top - 8, r: 4, fill: color }, group);
      if (this.wide && room > 14 + label.length * 6.2)
        element("text", { class: "mark-label", x: px + 8, y: inner.top - 4, style: `fill: ${color}` }, group, label);
    });
  }

  tag(parent, x, y, text, color) {
    const anchor = x > this.scale.inner.right - 14 ? "end" : "middle";
    element("text", { x: anchor === "end" ? x + 9 : x, y, "text-anchor": anchor, style: `fill: ${color}; font-weight: 600` }, parent, text);
  }
}

function timeAxis(seconds) {
  const [scale, unit] = seconds < 180 ? [1, "seconds"] : seconds < 10800 ? [60, "minutes"] : [3600, "hours"];
  return { scale, unit, text: (v) => String(+v.toPrecision(4)) };
}
