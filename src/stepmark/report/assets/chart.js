"use strict";
// One figure, drawn by uPlot: its curves, what marks them, its buttons, and the values at a place.

const MARKS = {
  resumed: ["--c2", "resumed"], compilation: ["--warn", "compiled"], trouble: ["--bad", "trouble"],
  lost: ["--bad", "trained again"],
};
const DIGIT = 6.8; // pixels, the width of a digit of an axis
const PART_COLORS = { step: "var(--c0)", data: "var(--c1)", save: "var(--c2)", evaluation: "var(--c3)" };
const FONT = '11.5px system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
const DISTINCT = 8; // colors that everybody can tell apart; curves after them are dashed as well
const MARGIN = 0.06; // of the values' range, above and below them
const GROUP_POINTS = 400; // at most, of a curve of means
const ENTRY_ROWS = 3; // of the list of values at a place
const FAR = 20; // times the middle one of the curves' highest values: a curve beyond it does not set the axis

const AXIS_UNITS = { step: "step", tokens: "tokens", epoch: "epoch", flops: "FLOPs of the model" };

const translucent = (color) => (color[0] === "#" ? `${color}26` : color.replace(")", " / 15%)"));

// A canvas needs a color itself, not the name of one.
function resolved(color) {
  const name = color.match(/^var\((.*)\)$/);
  return name ? getComputedStyle(document.documentElement).getPropertyValue(name[1]).trim() : color;
}

function made(name, parent, properties = {}) {
  const element = Object.assign(document.createElement(name), properties);
  if (parent) parent.append(element);
  return element;
}

class Chart {
  constructor(figure, marks, page) {
    Object.assign(this, { figure, page, stacked: figure.name === "time" });
    this.marks = this.stacked ? [] : marks;
    this.hidden = new Set(page.kept(`hidden ${figure.name}`) ?? []);
    this.log = page.kept(`log ${figure.name}`) ?? figure.log;
    this.names = [...new Set(figure.series.filter((s) => s.kind !== "lost").map((s) => s.name))];
    this.box = document.getElementById(`figure-${figure.name}`);
    this.wide = this.box.classList.contains("wide");
    this.holder = this.box.querySelector(".plot");
    this.note = made("span", null, { className: "unit note" });
    this.box.querySelector(".buttons").before(this.note);
    this.readout = this.box.querySelector(".readout");
    this.several = page.runs.length > 1;
    this.makeLegend();
    this.makeButtons();
    this.build();
  }

  // Names and colors

  place(series) { return this.several ? series.run : this.names.indexOf(series.name.replace(", trained again", "")); }

  color(series) { return resolved(series.kind === "bar" ? PART_COLORS[series.name] : this.page.colors[this.place(series)]); }

  label(series) {
    if (!this.several) return series.name;
    const name = series.group ?? this.page.runs[series.run], lost = series.kind === "lost" ? ", trained again" : "";
    return this.names.length > 1 ? `${name}: ${series.name}` : name + lost;
  }

  text(value, series) {
    if (this.figure.percent) return `${(value * 100).toFixed(1)}%`;
    return series.kind === "bar" ? duration(value) : fullNumber(value);
  }

  meanText(mean, deviation, series) {
    if (this.figure.percent || series.kind === "bar") return `${this.text(mean, series)} ± ${this.text(deviation, series)}`;
    return withDeviation(mean, deviation);
  }

  smoothedAt(series, index) { return this.smoothed.get(series)?.get(index) ?? null; }

  // The value of a place in words: of a curve that is smoothed both of its values.
  valueText(series, index) {
    if (series.count) return `${this.meanText(series.y[index], series.spread[index], series)} of ${series.count[index]}`;
    const logged = this.text(series.y[index], series), smoothed = this.smoothedAt(series, index);
    if (smoothed !== null && this.crowded) return this.text(smoothed, series);
    return smoothed === null ? logged : `${this.text(smoothed, series)} smoothed, ${logged} logged`;
  }

  // Legend and buttons

  makeLegend() {
    const legend = this.box.querySelector(".legend");
    const labels = [...new Set(this.figure.series.filter((s) => s.kind !== "lost").map((s) => this.label(s)))];
    if (labels.length < 2 || this.several) return; // the page has one for all
    for (const label of labels) {
      const series = this.figure.series.find((s) => this.label(s) === label);
      const button = made("button", legend, { type: "button" }), swatch = made("i", button, { className: series.kind });
      swatch.style.background = series.kind === "bar" ? PART_COLORS[series.name] : this.page.colors[this.place(series)];
      button.append(label);
      button.setAttribute("aria-pressed", String(!this.hidden.has(label)));
      button.onclick = () => {
        this.hidden.has(label) ? this.hidden.delete(label) : this.hidden.add(label);
        button.setAttribute("aria-pressed", String(!this.hidden.has(label)));
        this.page.keep(`hidden ${this.figure.name}`, [...this.hidden]);
        this.build();
      };
    }
  }

  makeButtons() {
    const caption = this.box.querySelector(".buttons"), { name } = this.figure;
    const positive = this.figure.series.every((s) => s.y.every((v) => v === null || v > 0));
    if (positive && !this.stacked && name !== "memory") {
      const button = made("button", caption, { type: "button", textContent: "log", title: "logarithmic axis" });
      button.className = "toggle";
      button.setAttribute("aria-pressed", String(this.log));
      button.onclick = () => {
        this.log = !this.log;
        button.setAttribute("aria-pressed", String(this.log));
        this.page.keep(`log ${name}`, this.log);
        this.build();
      };
    }
    const csv = made("button", caption, { type: "button", textContent: "CSV", className: "toggle" });
    csv.title = "save the values that are drawn";
    csv.onclick = () => this.page.save(`${name}.csv`, this.csv(), "text/csv");
    const picture = made("button", caption, { type: "button", textContent: "image", className: "toggle" });
    picture.title = "PNG, SVG, or a script for matplotlib";
    picture.onclick = () => openSave(this);
  }

  csv() {
    const rows = [["run", "series", "step", "seconds", "value"]];
    for (const series of this.figure.series)
      series.x.forEach((step, i) => rows.push([this.page.names[series.run], series.name, step, series.times[i], series.y[i]]));
    return toCsv(rows);
  }

  // What is drawn

  // Bars are of steps, whatever the axis of the curves is.
  get axis() { return this.stacked ? "step" : this.page.axis; }

  shown() {
    if (!this.several) return this.figure.series.filter((s) => !this.hidden.has(this.label(s).replace(", trained again", "")));
    if (this.page.group) return this.groups;
    return this.figure.series.filter((s) => this.page.runShown(s.run));
  }

  // Of each group of runs and each name a curve of means: at a place, over the runs that reach it.
  grouped() {
    const found = [];
    for (const [group, { runs, color }] of this.page.groups())
      for (const name of this.names) {
        const members = this.figure.series.filter((s) => s.name === name && s.kind !== "lost" && runs.includes(s.run));
        const curves = members.map((s) => this.points(s)).map(({ series, order, x }) => ({ x, y: this.smoothedValues(series, order) ?? order.map((i) => series.y[i]) }));
        const all = [...new Set(curves.flatMap(({ x }) => x))].sort((a, b) => a - b), every = Math.ceil(all.length / GROUP_POINTS);
        const x = all.filter((_, i) => i % every === 0 || i === all.length - 1), series = { name, kind: members[0]?.kind, run: color, group, hollow: members[0]?.hollow, best: null, x, y: [], spread: [], count: [] };
        for (const place of x) {
          const values = curves.map((curve) => valueAt(curve, place)).filter((v) => v !== null), n = values.length;
          const mean = n ? values.reduce((a, b) => a + b) / n : null;
          series.y.push(mean);
          series.spread.push(n ? Math.sqrt(values.reduce((sum, v) => sum + (v - mean) ** 2, 0) / n) : null);
          series.count.push(n);
        }
        if (members.length) found.push(series);
      }
    return found;
  }

  // Sorted places on the axis, with the index of each in the series; places that are not known are left out.
  points(series) {
    const { axis } = this, known = this.page.axes[series.run]?.[axis];
    const xs = series.group !== undefined || axis === "step" ? series.x : axis === "time" ? series.times : series.x.map((step) => (known ? along(known, step) : null));
    const order = [...xs.keys()].filter((i) => xs[i] !== null).sort((a, b) => xs[a] - xs[b]);
    return { series, order, x: order.map((i) => xs[i]) };
  }

  // The curves, in the order of drawing: `ys` belong to the places of `points`.
  curves() {
    this.smoothed = new Map(); // by series: the values in the order of its places
    this.groups = this.several && this.page.group ? this.grouped() : [];
    const found = [], shown = this.shown();
    if (this.stacked) return this.stack(shown);
    for (const series of [...shown].sort((a, b) => b.run - a.run)) {
      const points = this.points(series), positive = (y) => (this.log && y !== null && y <= 0 ? null : y);
      if (series.count) for (const sign of [1, -1]) found.push({ points, ys: series.y.map((y, i) => (y === null ? null : positive(y + sign * series.spread[i]))), edge: sign });
      const smoothed = series.count ? null : this.smoothedValues(series, points.order);
      found.push({ points, ys: points.order.map((i) => positive(series.y[i])), faint: smoothed !== null });
      if (smoothed === null) continue;
      this.smoothed.set(series, new Map(points.order.map((i, at) => [i, smoothed[at]])));
      found.push({ points, ys: smoothed, derived: true });
    }
    return found;
  }

  // Of a noisy line its smoothed values, in this order; else null.
  smoothedValues(series, order) {
    const many = series.y.length > 60 && this.figure.smooth && series.kind === "line" && this.page.smoothing > 0;
    return many ? smooth(order.map((i) => (series.mean ?? series.y)[i]), this.page.smoothing) : null;
  }

  stack(shown) {
    const sums = shown.length ? shown[0].x.map(() => 0) : [], found = [];
    for (const series of shown) {
      series.y.forEach((value, i) => (sums[i] += value ?? 0));
      const points = this.points(series);
      found.unshift({ points: { ...points, x: [0, ...points.x] }, ys: [0, ...sums], bar: true });
    }
    return found;
  }

  style({ points, faint, derived, bar, edge }) {
    const { series } = points, color = this.color(series), place = this.place(series);
    if (bar) return { stroke: color, fill: color, width: 0, paths: uPlot.paths.stepped({ align: -1 }), points: { show: false } };
    if (edge) return { stroke: "transparent", width: 0, points: { show: false } };
    if (series.kind === "points")
      return {
        stroke: color, width: 1, alpha: 1,
        points: { show: true, size: 7, stroke: color, width: 1.5, fill: series.hollow ? resolved("var(--card)") : color },
      };
    const lost = series.kind === "lost", dash = lost ? [3, 3] : place >= DISTINCT ? [8, 3] : undefined;
    return {
      stroke: color, dash, alpha: lost ? 0.75 : faint ? 0.35 : 1,
      width: lost ? 1.3 : faint ? 1 : derived ? 2.2 : 1.8,
      points: { show: true, size: 5, fill: color, stroke: color, filter: (u, index) => (derived ? [] : alone(u.data[index])) },
    };
  }

  build() {
    const curves = this.curves(), height = this.wide ? (this.width() < 560 ? 260 : 320) : 215;
    this.drawn = curves.filter((curve) => !curve.derived && !curve.edge);
    const tables = curves.map(({ points, ys }) => [points.x, ys]);
    const data = tables.length ? uPlot.join(tables) : [[0, 1]];
    this.crowded = this.shown().length > ENTRY_ROWS * 2; // then values at a place are short
    this.cut = this.farthest();
    this.full = this.range(curves.flatMap(({ points }) => (points.x.length ? [points.x[0], points.x.at(-1)] : [])));
    this.plot?.destroy();
    this.plot = this.layer = null; // until the new ones are there
    this.unit = this.unit ?? made("span", this.holder, { className: "axis-unit" });
    this.plot = new uPlot(this.options(curves, height), data, this.holder);
    const how = this.groups.length ? "mean ± one standard deviation" : this.smoothed.size ? "thick: smoothed, thin: as logged" : "";
    this.note.textContent = [how, ...(this.cut < Infinity ? ["higher curves are cut off"] : [])].filter(Boolean).join("; ");
    this.describe();
    this.overlay();
    this.read(null);
  }

  // Up to where the axis goes where few of many curves are far above the others, as of runs that diverged.
  farthest() {
    const tops = this.drawn.map(({ ys }) => ys.reduce((top, y) => Math.max(top, y ?? -Infinity), -Infinity)).filter(isFinite).sort((a, b) => a - b);
    const far = FAR * tops[tops.length >> 1];
    return tops.length > 3 && !this.log && !this.stacked && far > 0 && tops.at(-1) > far ? tops.findLast((top) => top <= far) : Infinity;
  }

  // Why nothing is drawn.
  get emptiness() {
    const values = this.drawn.flatMap(({ points }) => points.series.y);
    if (!this.drawn.length) return this.several ? "no run that is shown has this" : "all curves are hidden";
    if (values.every((y) => y === null)) return `no finite value: all ${values.length} are nan or infinite`;
    return this.drawn.some(({ ys }) => ys.some((y) => y !== null)) ? "" : `not logged by ${this.axis}`;
  }

  range(ends) {
    let left = Math.min(...ends), right = Math.max(...ends);
    if (!ends.length) [left, right] = [0, 1];
    if (left < right * 0.25) left = 0;
    return left === right ? [left - 1, right + 1] : [left, right];
  }

  width() { return Math.max(this.page.printing ? 660 : this.holder.clientWidth, 240); }

  options(curves, height) {
    const soft = resolved("var(--soft)"), grid = resolved("var(--grid)");
    return {
      width: this.width(), height, padding: [18, 12, 0, 0], legend: { show: false },
      scales: {
        x: { time: false, range: () => this.page.zoomOf(this) ?? this.full },
        y: { distr: this.log ? 3 : 1, range: (u, low, high) => this.span(low, high) },
      },
      axes: [
        { font: FONT, stroke: soft, size: 24, gap: 4, grid: { show: false }, ticks: { show: false },
          splits: (u, axis, low, high) => this.xTicks(low, high), values: (u, ticks) => this.xLabels(ticks) },
        { font: FONT, stroke: soft, gap: 6, grid: { stroke: grid, width: 1 }, ticks: { show: false },
          size: (u, labels) => Math.max(50, ...(labels ?? []).map((label) => label.length * DIGIT + 13)),
          splits: (u, axis, low, high) => (this.log ? logTicks(low, high) : niceTicks(low, high, this.wide ? 6 : 4)),
          filter: (u, ticks) => ticks,
          values: (u, ticks) => (this.figure.percent ? ticks.map((v) => `${+(v * 100).toPrecision(3)}%`) : tickLabels(ticks)) },
      ],
      series: [{}, ...curves.map((curve) => this.style(curve))],
      bands: curves.flatMap(({ points, edge }, i) => (edge === 1 ? [{ series: [i + 1, i + 2], fill: translucent(this.color(points.series)) }] : [])),
      cursor: {
        drag: { x: true, y: false, setScale: false, dist: 6 },
        sync: { key: this.axis, scales: ["x", null], filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
        points: { show: false }, y: false,
        bind: { dblclick: () => () => this.page.zoomTo(null) },
      },
      hooks: {
        setSelect: [(u) => this.selected(u)],
        setCursor: [(u) => this.page.pointed(this, u)],
        setScale: [(u, key) => key === "x" && this.moveOverlay()],
        setSize: [() => this.moveOverlay()],
      },
    };
  }

  span(low, high) {
    if (low === null || low === undefined || high === null) return this.log ? [0.1, 1] : [0, 1];
    if (this.log) return [low / 1.12, high * 1.12];
    if (low < this.cut) high = Math.min(high, this.cut);
    const margin = (high - low || Math.abs(high) || 1) * MARGIN;
    return [this.figure.zero ? Math.min(0, low) : low - margin, high + margin];
  }

  xTicks(low, high) {
    const scale = this.axis === "time" ? timeUnit(high)[0] : 1, count = Math.max(2, Math.min(8, Math.floor(this.width() / 95)));
    const ticks = niceTicks(low / scale, high / scale, count).map((tick) => tick * scale);
    return this.axis === "step" ? ticks.filter((tick) => tick % 1 === 0) : ticks;
  }

  xLabel(tick, high) {
    if (this.axis === "time") return String(+(tick / timeUnit(high)[0]).toPrecision(4));
    return this.axis === "epoch" ? String(+tick.toPrecision(4)) : stepLabel(tick);
  }

  // The unit stands at the right end, where no other label has room.
  xLabels(ticks) {
    const [low, high] = this.page.zoomOf(this) ?? this.full, unit = this.axis === "time" ? timeUnit(high)[1] : AXIS_UNITS[this.axis];
    if (this.unit) this.unit.textContent = unit;
    const end = high - ((high - low) / Math.max(this.width() - 70, 100)) * (unit.length * DIGIT + 16);
    return ticks.map((tick) => (tick > end ? "" : this.xLabel(tick, high)));
  }

  // For those who do not see the canvas, and for the keyboard.
  describe() {
    const { root } = this.plot;
    root.tabIndex = 0;
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", `${this.figure.title}: chart; arrow keys read values, plus and minus zoom, 0 shows all`);
    root.setAttribute("aria-describedby", `summary-${this.figure.name}`);
    root.onkeydown = (event) => this.page.key(this, event);
    root.onblur = () => this.page.leave();
    this.plot.over.addEventListener("mouseenter", () => (this.page.active = this));
    this.plot.over.addEventListener("mouseleave", () => this.page.leave());
    root.dataset.curves = this.drawn.map(({ points }) => `${points.series.kind}: ${this.label(points.series)}`).join("; ");
  }

  // Marks and the best evaluation, over the canvas

  overlay() {
    this.layer = made("div", this.plot.over, { className: "layer" });
    this.placed = [];
    if (this.emptiness) made("p", this.layer, { className: "empty", textContent: this.emptiness });
    for (const mark of this.marks) {
      if (this.several && (this.page.group || !this.page.runShown(mark.run))) continue;
      const element = made("div", this.layer, { className: "mark" }), [color, label] = MARKS[mark.kind];
      Object.assign(element.dataset, { kind: mark.kind, step: mark.step }, mark.until === null ? {} : { until: mark.until });
      element.style.setProperty("--mark", `var(${color})`);
      if (this.wide && mark.kind !== "lost") made("span", element, { textContent: label });
      const last = mark.until ?? mark.step, known = this.page.axes[mark.run]?.[this.axis];
      const places = { step: [mark.step, last], time: [mark.time, mark.until_time ?? mark.time] };
      const [from, to] = places[this.axis] ?? (known ? [along(known, mark.step), along(known, last)] : [null, null]);
      if (from !== null && to !== null) this.placed.push({ element, from, to, mark });
      else element.remove();
    }
    for (const { points } of this.drawn) {
      const { series, order, x } = points, at = series.best === null ? -1 : order.indexOf(series.best);
      if (at < 0 || series.y[series.best] === null || (this.page.best !== null && series.run !== this.page.best)) continue;
      const element = made("div", this.layer, { className: "best", textContent: "best" });
      element.dataset.step = series.x[series.best];
      element.style.setProperty("--mark", this.color(series));
      this.placed.push({ element, from: x[at], to: x[at], y: series.y[series.best] });
    }
    this.moveOverlay();
  }

  moveOverlay() {
    if (!this.layer || !this.plot) return;
    const u = this.plot, right = u.over.clientWidth;
    let before = -Infinity;
    for (const { element, from, to, y } of [...this.placed].sort((a, b) => a.from - b.from)) {
      const start = u.valToPos(from, "x"), end = u.valToPos(to, "x"), inside = end >= -1 && start <= right + 1;
      element.hidden = !inside;
      if (!inside) continue;
      if (y !== undefined) element.style.top = `${u.valToPos(y, "y")}px`;
      if (element.dataset.kind === "lost") {
        element.style.left = `${Math.max(start, 0)}px`;
        element.style.width = `${Math.max(Math.min(end, right) - Math.max(start, 0), 1)}px`;
        continue;
      }
      element.style.left = `${start}px`;
      element.classList.toggle("close", y === undefined && start - before < 80);
      if (y === undefined) before = start;
    }
  }

  selected(u) {
    const { left, width } = u.select;
    if (width > 5) this.page.zoomTo([u.posToVal(left, "x"), u.posToVal(left + width, "x")], this);
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  // The ends of the axis have changed.
  rescale() { this.plot.setScale("x", { min: this.full[0], max: this.full[1] }); }

  resize() {
    const width = this.width(), height = this.wide ? (width < 560 ? 260 : 320) : 215;
    this.plot.setSize({ width, height });
  }

  // Eight pixels of an axis this long. The plot has no width until it is laid out, after the first reading.
  reachOf(length) { return (length / (this.plot.over.clientWidth || this.width())) * 8; }

  // The values at a place of the axis: of each curve the nearest, where it is near or `anyway`.
  valuesAt(x, anyway = false) {
    const [low, high] = this.page.zoomOf(this) ?? this.full, reach = this.reachOf(high - low);
    const found = [];
    for (const curve of this.shown().map((s) => this.points(s))) {
      const at = nearest(curve.x, x), { series } = curve;
      if (at < 0 || series.y[curve.order[at]] === null) continue;
      const far = Math.abs(curve.x[at] - x), near = series.kind === "points" ? reach * 2 : Math.max(reach, (high - low) / 10);
      if (far <= near || (anyway && series.kind !== "lost")) found.push({ series, index: curve.order[at], x: curve.x[at] });
    }
    return found;
  }

  // The list of values at a place, below the chart: those nearest to height `y`, where there is no room for all.
  // `place` null: at the end of the curves.
  read(place, y = null) {
    const at = place ?? (this.page.zoomOf(this) ?? this.full)[1], values = this.valuesAt(at, place === null);
    const entry = this.groups.length ? 320 : this.crowded ? 240 : 390, columns = Math.max(1, Math.floor(this.width() / entry)), room = columns * ENTRY_ROWS;
    const count = this.shown().filter((s) => s.kind !== "lost").length, firsts = {};
    this.readout.style.minHeight = `${26 + 19 * Math.min(ENTRY_ROWS, Math.ceil(count / columns))}px`;
    for (const found of values) {
      const { series, index } = found, compares = this.several && series.kind !== "lost";
      found.value = this.smoothedAt(series, index) ?? series.y[index];
      found.difference = compares && firsts[series.name] !== undefined ? difference(this, found.value, firsts[series.name].value) : "";
      if (compares) firsts[series.name] ??= found;
    }
    const distance = ({ value }) => Math.abs(this.plot.valToPos(value, "y") - y);
    const kept = values.length <= room ? values : (y === null ? values : values.toSorted((a, b) => distance(a) - distance(b))).slice(0, room - 1);
    if (kept !== values) kept.sort((a, b) => b.value - a.value);
    if (place === null && values.length > room) kept.length = 0; // no few of them stand for all
    const head = made("b"), list = made("ul"), first = values.find(({ series }) => series.kind === "line") ?? values[0];
    list.style.gridTemplateColumns = `repeat(${columns}, minmax(0, 1fr))`;
    if (first) head.textContent = this.placeText(first);
    if (kept.some((each) => each.difference)) made("span", head, { textContent: `% compared with ${this.firstOf(firsts)}` });
    for (const { series, index, difference } of kept) {
      const line = made("li", list);
      made("i", line).style.background = this.color(series);
      made("span", line, { className: "name", textContent: this.label(series) + (index === series.best ? " (best)" : ""), title: this.label(series) });
      made("span", line, { className: "number", textContent: `${this.valueText(series, index)} ${difference}`.trim() });
    }
    if (!kept.length && values.length) head.textContent = ""; // of the place
    if (!kept.length) made("li", list, { textContent: values.length ? "values appear here under the pointer" : "" });
    else if (kept.length < values.length) made("li", list, { className: "more", textContent: `and ${values.length - kept.length} more` });
    this.readout.replaceChildren(head, list);
    if (place !== null) for (const mark of this.marksAt(place)) made("span", head, { textContent: mark.label });
    return values.length;
  }

  // The run, or the group of runs, that others are compared with.
  firstOf(firsts) {
    const names = new Set(Object.values(firsts).map(({ series }) => series.group ?? this.page.runs[series.run]));
    return names.size === 1 ? [...names][0] : "the first that has a value";
  }

  placeText({ series, index, x }) {
    const { axis } = this;
    if (series.group !== undefined && axis !== "step") return axis === "time" ? duration(x) : `${stepLabel(+x.toPrecision(4))} ${AXIS_UNITS[axis]}`;
    const time = series.times?.[index] ?? null, more = axis === "step" || axis === "time" ? "" : ` · ${shortNumber(x)} ${AXIS_UNITS[axis]}`;
    return `step ${series.x[index].toLocaleString("en")}` + (time === null ? "" : ` · ${duration(time)}`) + more;
  }

  marksAt(x) {
    const [low, high] = this.page.zoomOf(this) ?? this.full, reach = this.reachOf(high - low);
    return this.placed.filter(({ from, to, mark }) => mark && x >= from - reach && x <= to + reach).map(({ mark }) => mark);
  }
}

// The value of a curve at a place, linearly between its neighbours; null outside of it, and in a gap.
function valueAt({ x, y }, place) {
  const at = nearest(x, place);
  if (at < 0 || place < x[0] || place > x.at(-1)) return null;
  const next = x[at] === place ? at : x[at] < place ? at + 1 : at - 1;
  if (next === at || y[at] === null || y[next] === null) return y[at] === null || next === at ? y[at] : null;
  return y[at] + ((place - x[at]) / (x[next] - x[at])) * (y[next] - y[at]);
}

// The value of an axis at a step: of steps and values, linearly, also beyond the last step.
function along([steps, values], step) {
  const at = Math.max(1, nearest(steps, step)), next = steps[at] < step && at + 1 < steps.length ? at + 1 : at;
  return values[next - 1] + ((step - steps[next - 1]) / (steps[next] - steps[next - 1])) * (values[next] - values[next - 1]);
}

// Points without a neighbour, between which no line is drawn.
function alone(values) {
  const known = [];
  values.forEach((value, i) => value !== undefined && known.push(i));
  return known.filter((at, i) => {
    const empty = (j) => j < 0 || j >= known.length || values[known[j]] === null;
    return values[at] !== null && empty(i - 1) && empty(i + 1);
  });
}
