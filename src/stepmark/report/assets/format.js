"use strict";
// Numbers, times and ticks as text.

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
  const [unit, name] = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"]].find(([each]) => size >= each) ?? [1];
  if (name) return +(value / unit).toPrecision(3) + name;
  if (size >= 1e4) return +(value / 1e3).toPrecision(3) + "k";
  if (size > 0 && size < 1e-3) return value.toExponential(1).replace(".0e", "e").replace("e-", "e−");
  return String(+value.toPrecision(3));
}

// The labels of ticks, all in the same form.
function tickLabels(ticks) {
  if (!ticks.length) return [];
  const most = Math.max(...ticks.map(Math.abs)), step = ticks.length > 1 ? Math.abs(ticks[1] - ticks[0]) : most;
  if (most >= 1e4 || most < 1e-3 || most / Math.min(...ticks.filter((t) => t > 0)) > 500) return ticks.map(shortNumber);
  const digits = Math.max(0, ...ticks.map((t) => (String(+t.toPrecision(12)).split(".")[1] || "").length));
  return ticks.map((t) => t.toFixed(Math.min(digits, Math.max(0, 3 - Math.floor(Math.log10(step))))));
}

function fullNumber(value) {
  const size = Math.abs(value);
  if (size >= 1e4) return Math.round(value).toLocaleString("en");
  if (size > 0 && size < 1e-3) return value.toExponential(3);
  return String(+value.toPrecision(5));
}

// A mean and its deviation, both to the deviation's second digit.
function withDeviation(mean, deviation) {
  const digits = Math.max(0, 1 - Math.floor(Math.log10(deviation)));
  if (!(deviation > 0) || digits > 6 || Math.abs(mean) >= 1e4) return `${fullNumber(mean)} ± ${fullNumber(deviation)}`;
  return `${mean.toFixed(digits)} ± ${deviation.toFixed(digits)}`;
}

function duration(seconds) {
  if (seconds < 100) return `${+seconds.toPrecision(2)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  return `${+(seconds / 3600).toPrecision(3)} h`;
}

// The unit of an axis of time, in seconds, and its name.
function timeUnit(span) {
  if (span < 200) return [1, "s"];
  if (span < 12000) return [60, "min"];
  return span < 400000 ? [3600, "h"] : [86400, "days"];
}

const stepLabel = (value) => (value >= 1e4 ? shortNumber(value) : value.toLocaleString("en"));

// The mean over a window, after a median of five neighbours, so that one peak moves nothing. Windows shrink at the
// beginning, where curves are steep. At the end they lose only the values that are not there yet: the curve ends in a
// smoothed value. `strength` 20 is a window of a thirtieth of the curve on both sides together.
function smooth(values, strength) {
  const reach = Math.max(1, Math.round((values.length * strength) / 1200)), count = values.length;
  const sums = new Float64Array(count + 1), known = new Int32Array(count + 1);
  for (let i = 0; i < count; i++) {
    const span = Math.min(2, i);
    const near = values.slice(i - span, i + span + 1).filter((v) => v !== null).sort((a, b) => a - b);
    const middle = values[i] === null ? null : near[near.length >> 1];
    sums[i + 1] = sums[i] + (middle ?? 0);
    known[i + 1] = known[i] + (middle === null ? 0 : 1);
  }
  return values.map((value, i) => {
    if (value === null) return null;
    const span = Math.min(reach, i), from = i - span, to = Math.min(i + span + 1, count);
    return (sums[to] - sums[from]) / (known[to] - known[from]);
  });
}

// The place of the value that is nearest to `wanted` in sorted `values`; -1 where there is none.
function nearest(values, wanted) {
  let low = 0, high = values.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (values[middle] <= wanted) low = middle; else high = middle;
  }
  return high < 0 || Math.abs(values[low] - wanted) <= Math.abs(values[high] - wanted) ? Math.min(low, high) : high;
}

function toCsv(rows) {
  const cell = (value) => (/[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value ?? "");
  return rows.map((row) => row.map(cell).join(",")).join("\n") + "\n";
}
