// Parts that several places of the page are made of.

import { h } from "./dom.js";
import { moment, said, span } from "./words.js";

const SILENCE = 10; // seconds

/**
 * A table in a box of its own, which alone scrolls where there is no room; narrow, its rows are blocks.
 *
 * @param heads a text for each column, or an element.
 * @param rows of each its key, and its cells; the first one is its head.
 */
export function table(caption, heads, rows, kind) {
  // Roles are said, because some browsers take them away from a table that is laid out otherwise.
  return h("div", { class: "scroll", role: "region", tabindex: 0, "aria-label": caption },
    h("table", { class: kind, role: "table" },
      h("caption", { class: "unseen-text" }, caption),
      h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, heads.map((one) =>
        h("th", { scope: "col", role: "columnheader" }, one, one instanceof Node
          ? h("span", { class: "unseen-text" }, "timeline") : "")))),
      h("tbody", { role: "rowgroup" }, rows.map(([key, cells]) => h("tr", { role: "row", "data-key": key },
        cells.map((cell, index) => h(index ? "td" : "th", { role: index ? "cell" : "rowheader",
          scope: index ? null : "row", "data-label": heads[index] instanceof Node ? "" : heads[index] }, cell)))))));
}

export function note(kind, ...text) {
  return h("p", { class: `note ${kind}` }, text);
}

/** What to type, with the path of a job. */
export function command(name, path, rest = "") {
  const quoted = /^[\w@%+=:,./-]+$/.test(path) ? path : `'${path.replaceAll("'", `'"'"'`)}'`;
  return h("code", null, said(`syncd ${name} ${quoted}${rest}`));
}

/** What others wrote, with its `commands`. */
export function coded(text) {
  return text.split("`").map((part, index) => (index % 2 ? h("code", null, said(part)) : said(part)));
}

/** Whether storage has let an answer wait for too long. */
export function isSilent(answer, now) {
  return answer.silent_since !== null && now - answer.silent_since > SILENCE;
}

/** Neither lost nor ended. */
export function isLive({ status }) {
  return status !== "lost" && status !== "stopped";
}

/** That it has. */
export function silence(answer, now, ...more) {
  return note("bad", "The job's storage has not answered since ", moment(answer.silent_since, now), ` (${
    span(now - answer.silent_since)}).`, more);
}

export function words(name) {
  return name.replaceAll("_", " ");
}

/** Numbers alone, the least first. */
export function sorted(values) {
  return values.filter((one) => one !== null && one !== undefined).sort((one, other) => one - other);
}

/** The least and the most of numbers, however many; null where there are none. */
export function extent(values) {
  let found = null;
  for (const one of values) {
    if (one !== null && one !== undefined) {
      found = found === null ? [one, one] : [Math.min(found[0], one), Math.max(found[1], one)];
    }
  }
  return found;
}

export function median(values) {
  return values[Math.floor((values.length - 1) / 2)];
}
