// What is drawn over time: a row of the timeline for each version, and the charts of lag and pause.
// Places are in percent, so that nothing has to be measured and all of it follows the page's width.

import { h } from "./dom.js";
import { clock, dateOf } from "./words.js";

const ROW = 22;
const CHART = 132;
const SECONDS = [
  0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800,
  3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800, 2592000, 7776000, 15552000, 31536000,
];
const UNITS = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"], [0.001, "ms"]];
const DAY = 86400;
const TENTH = 0.1; // the shortest step of clock time

/** From a range of seconds to percent, and where its ticks are: no two of them have the same label. */
export class Axis {
  /** `labels`: from a step to what says a tick's moment; `zone`: seconds from local time to that of the axis. */
  constructor(from, to, { wanted, labels, least = 0, zone = () => 0 }) {
    this.from = from;
    this.length = Math.max(to - from, 1e-3);
    this.room = wanted < 5 ? 84 : 91; // percent up to where a label begins that fits beside it
    const step = stepOf(this.length, wanted, least);
    const label = labels(step);
    this.ticks = [];
    const origin = zone(from);
    const first = Math.ceil((from - origin) / step);
    for (let count = first; count < first + 20; count += 1) { // counted: a sum may be too large to grow
      const even = count * step + origin;
      const at = even + zone(even) - origin; // where clocks are changed, midnight stays midnight
      if (at > from + this.length) {
        break;
      }
      if (at >= from && at > (this.ticks.at(-1)?.at ?? -Infinity)) {
        this.ticks.push({ at, label: label(at) });
      }
    }
  }

  /** Clock time in the viewer's zone. */
  static ofClock(from, to, wanted) {
    const zone = (at) => 60 * (dateOf(at)?.getTimezoneOffset() ?? 0);
    return new Axis(from, to, { wanted, least: TENTH, zone, labels: (step) => (at) => clockLabel(at, step, to - from) });
  }

  /** Seconds since something. */
  static ofSpan(to, wanted) {
    const labels = (step) => {
      const label = durations(step, to);
      return (at) => (at === 0 ? "0" : `+${label(at)}`);
    };
    return new Axis(0, to, { wanted, labels });
  }

  place(at) {
    return Math.min(100, Math.max(0, (100 * (at - this.from)) / this.length));
  }

  /** The labels: those too near to the right edge are left out. */
  labels() {
    return this.ticks
      .filter(({ at }) => this.place(at) <= this.room)
      .map(({ at, label }) => text(this.place(at), 12, "tick", label));
  }

  lines(height) {
    return this.ticks.map(({ at }) => line(this.place(at), 0, this.place(at), height, "grid"));
  }
}

/** The least round number of seconds of which so many fit into a length. */
function stepOf(length, wanted, least = 0) {
  return SECONDS.find((one) => one >= least && length / one <= wanted) ?? length;
}

/** Clock time at a tick, as exact as its step. */
function clockLabel(at, step, length) {
  const tenths = Math.round(10 * at);
  const day = clock(tenths / 10, NaN); // with its date
  if (step >= DAY) {
    return length > 300 * DAY ? `${dateOf(at)?.getFullYear()}-${day.slice(0, -9)}` : day.slice(0, -9);
  }
  if (length > DAY) {
    return day.slice(0, -3);
  }
  const time = clock(tenths / 10, tenths / 10);
  return step < 1 ? `${time}.${tenths % 10}` : step < 60 ? time : time.slice(0, -3);
}

/** Durations at ticks, all in one unit: that of which the step is a multiple. */
function durations(step, most) {
  const [length, unit] = step < 1 ? UNITS.at(most < 1 ? -1 : -2) : UNITS.find(([one]) => step % one === 0) ?? UNITS[0];
  return (at) => `${Number((at / length).toPrecision(6))} ${unit}`;
}

/** The head of the timeline. */
export function head(axis) {
  return h("svg", { class: "axis", height: 16, "aria-hidden": "true" }, axis.labels());
}

/**
 * One version: saved, merged, published, live on each explorer, pruned.
 *
 * @param version what history has.
 * @param axis where moments are.
 * @param zero what the axis' 0 is, in seconds since the epoch.
 * @param now the server's clock.
 */
export function row(version, axis, zero, now) {
  const place = (at) => axis.place(at - zero);
  const middle = ROW / 2;
  const { saved, published, merge_seconds: merge, pruned } = version;
  const parts = [axis.lines(ROW)];
  if (published !== null) {
    const end = pruned ?? (version.on_disk ? now : published);
    parts.push(line(place(published), middle, place(end), middle, "kept"));
    const begun = version.of === null && merge !== null ? published - merge : published;
    if (saved !== null) {
      parts.push(bar(place(saved), place(begun), "waited"));
    }
    if (begun < published) {
      parts.push(bar(place(begun), place(published), "merged"));
    }
    parts.push(line(place(published), 2, place(published), ROW - 2, "published"));
  }
  if (pruned !== null && pruned - zero <= axis.from + axis.length) {
    const at = place(pruned);
    parts.push(text(at, middle + 4, "pruned", "×", at > 98 ? "end" : "middle"));
  }
  const seen = new Set(); // of a hundred at the same place one is drawn
  for (const { time } of version.live) {
    if (time !== null) {
      const at = (Math.round(4 * place(time)) / 4).toFixed(2);
      if (!seen.has(at)) {
        seen.add(at);
        parts.push(h("circle", { class: "live", cx: `${at}%`, cy: middle, r: 3.5 }));
      }
    }
  }
  return h("svg", { class: "row", height: ROW, "aria-hidden": "true" }, parts);
}

/**
 * Durations over time: from the least to the most of each version's explorers, and the median.
 *
 * @param points of each version: `at`, and `values` (seconds, sorted, at least one).
 * @param axis of the clock.
 * @param told what it shows, for who does not see it.
 */
export function chart(points, axis, told) {
  const most = Math.max(...points.map(({ values }) => values.at(-1)), 1e-3);
  const step = stepOf(most, 3);
  const label = durations(step, most);
  const steps = Math.ceil(most / step);
  const y = (seconds) => CHART - 8 - (CHART - 24) * Math.min(1, seconds / step / steps);
  const parts = [axis.lines(CHART - 8)];
  for (let count = 0; count <= steps; count += 1) { // counted: a sum may be too large to grow
    const at = count * step;
    parts.push(line(0, y(at), 100, y(at), count === 0 ? "base" : "grid"));
    if (count > 0) {
      parts.push(h("text", { class: "tick", x: -6, y: y(at) + 4, "text-anchor": "end" }, label(at)));
    }
  }
  const thin = points.length > 60;
  let before = null;
  for (const { at, values } of points) {
    const x = axis.place(at);
    const middle = y(values[Math.floor((values.length - 1) / 2)]);
    if (before !== null) {
      parts.push(line(before.x, before.middle, x, middle, "median"));
    }
    if (values.length > 1) {
      parts.push(line(x, y(values[0]), x, y(values.at(-1)), thin ? "range thin" : "range"));
    }
    parts.push(h("circle", { class: "dot", cx: `${x.toFixed(2)}%`, cy: middle.toFixed(1), r: thin ? 1.2 : 2.5 }));
    before = { x, middle };
  }
  return h("div", { class: "chart" },
    h("svg", { height: CHART, role: "img", "aria-label": told }, parts),
    head(axis));
}

function line(x1, y1, x2, y2, kind) {
  const [from, to] = [`${x1.toFixed(2)}%`, `${x2.toFixed(2)}%`];
  return h("line", { class: kind, x1: from, y1: y1.toFixed(1), x2: to, y2: y2.toFixed(1) });
}

/** Never so short that it cannot be seen. */
function bar(from, to, kind) {
  const width = Math.max(to - from, 0.5);
  const x = Math.min(from, 100 - width);
  return h("rect", { class: kind, x: `${x.toFixed(2)}%`, y: 6, width: `${width.toFixed(2)}%`, height: 10 });
}

function text(x, y, kind, content, anchor = "start") {
  return h("text", { class: kind, x: `${x.toFixed(2)}%`, y: y.toFixed(1), "text-anchor": anchor }, content);
}
