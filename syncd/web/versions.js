// The versions of a job: where each was when, and how late and how long explorers took them.

import { Axis, chart, head, row } from "./charts.js";
import { h } from "./dom.js";
import { extent, isLive, median, sorted, table } from "./parts.js";
import { many, moment, printable, said, span } from "./words.js";

const NARROW = matchMedia("(max-width: 640px)");
const LOOKING = "Reading the versions for the first time…";
/** How many versions the charts show, at least. */
const LEAST = 20;
/** How many versions are shown first, and the other choices. */
const CHOICES = [NARROW.matches ? 10 : 20, 50];

/** What became of each; `chosen` is what the viewer wants to see of it. */
export function timeline(status, history, versions, chosen, now) {
  const parts = [h("h2", { id: "versions-head" }, "Versions")];
  if (versions === null) {
    parts.push(h("p", { class: "empty" }, history?.unseen ? said(history.unseen) : LOOKING));
  } else if (!versions.length) {
    parts.push(h("p", { class: "empty" }, "Nothing is published yet."));
  } else {
    parts.push(choices(versions.length, chosen), ...rows(status, versions, chosen, now));
  }
  return h("section", { class: "panel", "data-key": "versions", "aria-labelledby": "versions-head" }, parts);
}

function choices(count, chosen) {
  const radio = (value, text) => h("label", null,
    h("input", { type: "radio", name: "axis", value, checked: (value === "since") === chosen.since }), text);
  const amounts = CHOICES.filter((one) => one < count);
  return h("div", { class: "choices" },
    h("fieldset", null, h("legend", { class: "unseen-text" }, "Time axis"),
      radio("clock", "Clock time"), radio("since", "Since saved")),
    amounts.length ? h("label", null, "Show ", h("select", { id: "rows" },
      [...amounts, count].map((one) => h("option", { value: one === count ? 1e9 : one,
        "data-key": one === count ? "all" : one, selected: chosen.rows === one }, one === count ? `all ${count}` : `the newest ${one}`)))) : null);
}

function rows(status, versions, chosen, now) {
  const newest = versions.slice(-(chosen.rows ?? CHOICES[0]));
  const shown = versions.filter((one) => one.on_disk || newest.includes(one)).reverse();
  const wanted = innerWidth < 1000 ? 3 : 7;
  const later = laterLives(versions);
  const starts = (one) => one.saved ?? one.published;
  const axis = chosen.since
    ? Axis.ofSpan(1.05 * (extent(newest.flatMap((one) => momentsOf(one, later.get(one)).map((at) => at - starts(one))))
        ?.[1] ?? 0), wanted)
    : clockAxis(newest, now, wanted);
  const onDisk = new Map(status.versions.map((one) => [one.sequence, one]));
  const cells = shown.map((one) => [String(one.version), [
    h("span", null, h("b", null, `v${one.version}`), " ",
      h("span", { class: "dim" }, one.step === null ? "" : `step ${one.step}`)),
    row(one, axis, chosen.since ? starts(one) ?? now : 0, now),
    one.published === null ? "–" : moment(one.published, now),
    one.saved === null ? "–" : span(one.published - one.saved),
    one.of === null ? (one.merge_seconds === null ? "–" : span(one.merge_seconds)) : `= v${one.of}`,
    liveOf(one, chosen, now),
    endOf(one, onDisk.get(one.version), now),
  ]]);
  return [
    h("p", { class: "legend", "aria-hidden": "true" }, ["waited", "merged", "published", "live", "kept", "pruned"]
      .map((kind) => h("span", { class: `key ${kind}` },
        { waited: "saved, waits", merged: "merged", published: "published", live: "live on an explorer",
          kept: "on disk", pruned: "pruned" }[kind]))),
    h("div", { class: "narrow-axis", "aria-hidden": "true" }, head(axis)),
    table("Versions, the newest first",
      ["version", head(axis), "published", "after", "merge", "live on", "state"], cells, "timeline"),
  ];
}

/** From the first save that is shown to now, or not far behind the last thing that happened. */
function clockAxis(shown, now, wanted) {
  const [from, last] = extent(shown.flatMap((one) => momentsOf(one, one.live, one.pruned))) ?? [now - 1, now];
  return Axis.ofClock(from, Math.max(last, Math.min(now, last + 0.25 * (last - from) + 1)), wanted);
}

/** When something happened to a version that can be drawn. */
function momentsOf({ saved, published }, live, end = null) {
  return published === null ? [] : [saved, published, end, ...live.map(({ time }) => time)].filter((at) => at !== null);
}

/** Of each version the explorers that have served one before: the first load of one may be days late. */
function laterLives(versions) {
  const known = new Set();
  const found = new Map();
  for (const version of versions) {
    found.set(version, version.live.filter(({ explorer }) => known.has(explorer)));
    version.live.forEach(({ explorer }) => known.add(explorer));
  }
  return found;
}

function liveOf(version, chosen, now) {
  const { live } = version;
  if (!live.length) {
    return version.latest ? "no explorer yet" : "–";
  }
  const lags = sorted(live.map((one) => one.seconds));
  const slowest = lags.length ? `, +${span(lags.at(-1))}` : "";
  const key = `v${version.version}`;
  const open = chosen.opened.has(key);
  return h("details", { "data-key": key, open },
    h("summary", null, live.length === 1 ? said(live[0].explorer) : many(live.length, "explorer"), slowest),
    open ? h("ul", { class: "live" }, live.map((one) => h("li", null, said(one.explorer),
      one.seconds === null ? "" : ` +${span(one.seconds)}`,
      one.pause === null ? "" : `, paused ${span(one.pause)}`,
      one.time === null ? "" : [", at ", moment(one.time, now)]))) : null);
}

function endOf(version, onDisk, now) {
  const held = onDisk?.leases.length
    ? h("span", { title: printable(onDisk.leases.join(", ")) }, onDisk.leases.length === 1
      ? ["leased by ", said(onDisk.leases[0])] : `leased by ${onDisk.leases.length}`) : null;
  const state = version.latest ? h("b", null, "LATEST")
    : version.on_disk ? "kept"
    : version.pruned === null ? (version.linked === null || version.published !== null ? "gone" : "ahead")
    : h("span", { title: printable(version.pruned_why ?? "") }, version.published === null
      ? ["pruned ", moment(version.pruned, now)]
      : `pruned +${span(Math.max(0, version.pruned - version.published))}`);
  return h("span", null, state, onDisk?.pinned ? ", pinned" : "", held ? [", ", held] : "");
}

/** Lag and pause over time. */
export function charts(status, versions, chosen, now) {
  const shown = (versions ?? []).slice(-Math.max(chosen.rows ?? 0, LEAST));
  const later = laterLives(versions ?? []);
  const one = (title, what, lives, of, none) => {
    const points = shown.map((version) => ({ at: version.published, values: sorted(lives(version).map(of)) }))
      .filter(({ at, values }) => at !== null && values.length);
    const all = sorted(points.flatMap(({ values }) => values));
    const told = versions === null ? LOOKING : all.length === 0 ? none
      : `${what}: median ${span(median(all))}, longest ${span(all.at(-1))}, of ${
        many(points.length, "version")} that went live.`;
    const axis = clockAxis(shown, now, NARROW.matches ? 3 : 4);
    return h("figure", { class: "panel" }, h("figcaption", null, h("h2", null, title), h("p", null, told),
      all.length ? h("p", { class: "legend", "aria-hidden": "true" }, h("span", { class: "key median" }, "median"),
        h("span", { class: "key range" }, "from the quickest explorer to the slowest")) : null),
      all.length ? chart(points, axis, `${title}. ${told}`) : null);
  };
  const live = status.explorers.filter(isLive);
  const older = status.latest ? live.filter((each) => each.behind > 0) : [];
  return h("div", { class: "charts", "data-key": "charts" },
    one("Lag", "From LATEST to live", (version) => later.get(version), ({ seconds }) => seconds,
      "No explorer has changed from one version to the next yet."),
    one("Pause", "An engine did not serve", ({ live }) => live, ({ pause }) => pause,
      "No explorer has reported a load yet."),
    older.length ? h("p", { class: "charts-note" }, `${older.length} of ${many(live.length,
      "explorer")} still on an older version, or on none.`) : null);
}
