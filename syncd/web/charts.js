// What is drawn over time: a row of the timeline for each version, and the charts of lag and pause.
// Places are in percent, so that nothing has to be measured and all of it follows the page's width.

import { h } from "./dom.js";
import { clock, dateOf, span } from "./words.js";

const ROW = 22;
const CHART = 132;
const SECONDS = [
  0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200,
  86400, 172800, 604800, 2592000, 31536000,
];

/** From a range of seconds to percent, and where its ticks are. */
export class Axis {
  constructor(from, to, { wanted, label, origin = 0 }) {
    this.from = from;
    this.length = Math.max(to - from, 1e-3);
    const step = SECONDS.find((one) => this.length / one <= wanted) ?? this.length;
    this.ticks = [];
    const first = Math.ceil((from - origin) / step) * step + origin;
    for (let at = first; at <= from + this.length && this.ticks.length < 20; at += step) {
      this.ticks.push({ at, label: label(at) });
    }
  }

  /** Clock time in the viewer's zone. */
  static ofClock(from, to, wanted) {
    const zone = 60 * (dateOf(from)?.getTimezoneOffset() ?? 0);
    const long = to - from > 86400;
    const label = (at) => (long ? clock(at, 0).slice(0, -3) : clock(at, at)).replace(/:00$/, (end) =>
      to - from > 1200 && !long ? "" : end);
    return new Axis(from, to, { wanted, label, origin: zone });
  }

  /** Seconds since something. */
  static ofSpan(to, wanted) {
    return new Axis(0, to, { wanted, label: (at) => (at === 0 ? "0" : `+${span(at)}`) });
  }

  place(at) {
    return Math.min(100, Math.max(0, (100 * (at - this.from)) / this.length));
  }

  /** The labels: those too near to the right edge are left out. */
  labels() {
    return this.ticks
      .filter(({ at }) => this.place(at) <= 94)
      .map(({ at, label }) => text(this.place(at), 12, "tick", label));
  }

  lines(height) {
    return this.ticks.map(({ at }) => line(this.place(at), 0, this.place(at), height, "grid"));
  }
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
  const step = [1, 2, 2.5, 5, 10]
    .map((times) => times * 10 ** Math.floor(Math.log10(most / 2)))
    .find((one) => most / one <= 3);
  const steps = Math.ceil(most / step);
  const y = (seconds) => CHART - 8 - (CHART - 24) * Math.min(1, seconds / step / steps);
  const parts = [axis.lines(CHART - 8)];
  for (let count = 0; count <= steps; count += 1) { // counted: a sum may be too large to grow
    const at = count * step;
    parts.push(line(0, y(at), 100, y(at), count === 0 ? "base" : "grid"));
    if (count > 0) {
      parts.push(h("text", { class: "tick", x: -6, y: y(at) + 4, "text-anchor": "end" }, span(at)));
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
