// What is on the page, made of the answers alone.

import { h } from "./dom.js";
import { events } from "./events.js";
import { coded, command, isLive, isSilent, median, note, silence, sorted, table, words } from "./parts.js";
import { charts, timeline } from "./versions.js";
import { ago, clock, link, many, moment, printable, said, size, span } from "./words.js";

const FEW = 20; // explorers
const KINDS = ["good", "warn", "bad"]; // of a health's level
const LATE = 15; // seconds after which what was read is no longer now

/** In the page's head: how old all of it is. */
export function freshness(known, now) {
  if (known.failures === 0) {
    return [h("span", { class: "beat", "aria-hidden": "true" }), h("span", null, "live, every 2 s")];
  }
  const since = known.overview === null
    ? "The server of this page does not answer"
    : [`Not updated since ${clock(known.overview.now, now)}: the server of this page does not answer`];
  return [
    h("strong", { class: "bad" }, since, ". Does ", h("code", null, "syncd web"), " still run?"),
    h("button", { id: "again", type: "button" }, "Ask again"),
  ];
}

export function titled(job) {
  const latest = job?.status?.latest;
  return [job?.status?.health.level ? "degraded" : null, latest ? `v${latest.sequence}` : null, job ? printable(job.name) : null, "syncd"]
    .filter(Boolean).join(" · ");
}

/** What is worth saying aloud when it changes. */
export function announced(job, lost, now) {
  if (lost) {
    return { job: job?.job, text: "This page is not updated any more." };
  }
  const status = job?.status;
  if (!status || status.unseen || isSilent(job, now)) {
    return { job: job?.job, text: "The job cannot be read." };
  }
  const latest = status.latest ? `v${status.latest.sequence} is the latest` : "Nothing is published";
  return { job: job.job, text: `${latest}; ${status.health.text}.` };
}

/** All jobs, where there are several. */
export function jobsTable(jobs, shown, now) {
  if (jobs.length < 2) {
    return null;
  }
  const rows = jobs.map((job) => {
    const { status } = job;
    const usable = status && !status.unseen;
    const state = stateOf(job, now);
    const slowest = usable ? slowestOf(status.explorers) : null;
    return [job.job, [
      h("a", { href: link(job.job), title: printable(job.job),
        "aria-current": job === shown ? "true" : null }, said(job.name)),
      badge(state),
      usable && status.latest ? `v${status.latest.sequence} · step ${status.latest.step}` : "–",
      usable ? publishedAgo(status, now) : "–",
      slowest ? behindOf(slowest) : "–",
      usable ? freeOf(status) : "–",
    ]];
  });
  return h("section", { class: "panel" },
    h("h2", null, "Jobs"),
    table("Jobs", ["job", "daemon", "latest", "published", "slowest explorer behind", "free"], rows, "stack"));
}

/** The chosen job. */
export function page(job, history, chosen, now) {
  if (job === null) {
    return note("warn", "There is no job to show.");
  }
  const { status } = job;
  const title = h("header", { class: "job" },
    h("h1", null, said(job.name)), h("p", { class: "path" }, said(job.job)));
  const notes = [];
  if (isSilent(job, now)) {
    notes.push(silence(job, now, status ? [" This page shows the job as of ", moment(job.read, now), "."] : ""));
  }
  if (status && notes.length === 0 && now - job.read > LATE) {
    notes.push(note("warn", "The job's storage is slow. This page shows the job as of ", moment(job.read, now), "."));
  }
  if (!status) {
    return [title, notes.length ? notes : note("", "Reading the job for the first time…")];
  }
  if (status.unseen) {
    return [title, notes, note("bad", "The job cannot be read: ", said(status.unseen), ". If the job is new, "
      + "start its daemon: ", command("run", job.job))];
  }
  const versions = history?.versions ?? null;
  const { memory } = status;
  return [
    title,
    notes,
    warnings(status),
    tiles(status, versions, now),
    explorers(status, chosen, now),
    timeline(status, history, versions, chosen, now),
    charts(status, versions, chosen, now),
    details(status),
    events(status.events, now),
    memory ? second(memory, chosen, now) : null,
  ];
}

function second(memory, chosen, now) {
  const parts = memory.unseen
    ? note("", "This directory cannot be read from this host: ", said(memory.unseen))
    : [
        h("p", { class: "path" }, said(memory.job)),
        tiles(memory, null, now),
        explorers(memory, chosen, now),
        events(memory.events, now),
      ];
  return h("section", { class: "second", "data-key": "memory" },
    h("h2", null, "Memory directory"), parts);
}

function warnings({ health, quarantined }) {
  const notes = health.problems.map(({ level, what, remedy }) =>
    note(level ? KINDS[level] : "", h("b", null, said(what)), ". ", coded(remedy)));
  if (!health.level) {
    notes.unshift(note("good", h("b", null, "healthy")));
  }
  if (quarantined.length) {
    notes.push(note("warn", `${many(quarantined.length, "save")} quarantined (`,
      said(quarantined.join(", ")), "). The reasons are in .syncd/quarantine."));
  }
  return notes;
}

function tiles(status, versions, now) {
  const { daemon, latest, trainer } = status;
  const slowest = slowestOf(status.explorers);
  const live = status.explorers.filter(isLive);
  const pauses = sorted(live.map((one) => one.reload?.pause));
  const found = [
    tile("Latest version", latest ? `v${latest.sequence}` : "none yet",
      latest ? [`step ${latest.step}`, latest.kind === "full" ? "" : `, ${latest.kind}`,
        latest.dtype ? `, ${latest.dtype}` : "", ", ",
        publishedAgo(status, now, versions),
        latest.tip ? `; ahead: step ${latest.tip.step} (${bytesOf(status.links)})` : ""]
        : "It appears after the first complete save."),
    tile("Slowest explorer", slowest ? (slowest.behind > 0 ? `${slowest.behind} behind` : "up to date") : "none yet",
      slowest ? [slowest.behind > 0 ? [slowest.behind_steps ? `or ${many(slowest.behind_steps, "step")}: ` : "",
        said(slowest.name), ", of "] : "of ", many(live.length, "explorer")] : "No live explorer serves this job."),
    tile("Pause of the last load", pauses.length ? span(pauses.at(-1)) : "–",
      pauses.length ? `longest of ${pauses.length}; median ${span(median(pauses))}` : "No load was reported."),
    tile("Trainer", trainer ? stateWord(trainer) : "not known", trainer
      ? [trainer.step === null ? "" : `announced step ${trainer.step}, `,
        `${many(trainer.world_size, "rank")}, heard `, ago(trainer.heard, now)]
      : "No trainer with a hook of syncd has started."),
    tile("Daemon", daemon ? badge(stateOf({ status, silent_since: null }, now)) : "none yet", daemon
      ? [said(daemon.host), ` pid ${daemon.pid}, epoch ${daemon.epoch}, heard `, ago(daemon.heard, now)]
      : "No daemon has served this job yet."),
    tile("Disk", freeOf(status), diskNote(status, versions)),
  ];
  return [
    h("dl", { class: "tiles" }, found),
    daemon ? doing(daemon) : null,
  ];
}

/** What the daemon does now: always there, so that nothing moves. */
function doing({ fold, merge, state, detail }) {
  const work = merge ?? fold;
  const words = work ? `${merge ? "Merging" : "Folding"} step ${work.step}: ${progress(work)}`
    : state === "merging" ? ["Merging ", said(detail)]
    : detail ? ["Waiting: ", said(detail)]
    : "Nothing is being merged.";
  return h("div", { class: `tile doing${work ? "" : " idle"}`, "data-key": "doing" },
    h("p", null, words),
    h("progress", { "aria-label": "Progress", max: Math.max(work?.total ?? 1, 1), value: work?.done ?? 0 }));
}

function progress({ done, total, seconds }) {
  const left = done ? `, ${span((seconds * (total - done)) / done)} left` : "";
  return `${size(done)} of ${size(total)} in ${span(seconds)}${left}`;
}

function diskNote(status, versions) {
  const on = versions?.filter((one) => one.on_disk) ?? [];
  const bytes = on.some((one) => one.bytes) && bytesOf(on);
  const files = status.free?.inodes;
  return [
    status.free ? "free on the job's filesystem" : "The filesystem does not report its free space",
    files === null || files === undefined ? "" : `, and ${files.toLocaleString("en")} files`,
    `; ${many(status.versions.length, "version")}`,
    bytes ? ` of ${bytes}` : "",
    " on disk",
  ];
}

function explorers(status, chosen, now) {
  const key = "explorers";
  const all = [...status.explorers] // who does not live is behind for good
    .sort((one, other) => isLive(other) - isLive(one) || other.behind - one.behind);
  const shown = chosen.allExplorers ? all : all.slice(0, FEW);
  const saying = shown.some((one) => isLive(one) && (one.fault || one.refused || one.starting));
  const rows = shown.map((one) => [one.name, [
    said(one.name),
    stateWord(one),
    one.sequence ? `v${one.sequence}` : one.bench == null ? "–" : "bench",
    one.step ?? one.bench ?? "–",
    !isLive(one) ? "–" : one.behind > 0 ? h("b", null, behindOf(one)) : "0",
    pauseOf(one.reload),
    ago(one.heard, now),
    ...(!saying ? [] : !isLive(one) ? [""] : [one.fault || one.refused
      ? h("span", { class: "bad" }, said(one.fault ?? one.refused))
      : said(one.starting ?? "")]),
  ]]);
  return h("section", { class: "panel", "data-key": key },
    h("h2", null, "Explorers"),
    rows.length
      ? table("Explorers: furthest behind first, stopped and lost last",
          ["explorer", "status", "version", "step", "behind", "pause", "heard", ...(saying ? ["says"] : [])], rows, "stack")
      : h("p", { class: "empty" }, "No explorer has reported yet. Start one with ExplorerHook or Reader, or beside a "
          + "server with ", command("follow", status.job, " --name server-0 --engine vllm --url URL")),
    all.length > FEW ? h("button", { id: "all-explorers", type: "button" }, chosen.allExplorers
      ? `Show the ${FEW} furthest behind` : `Show all ${all.length}`) : null);
}

/** What is kept besides, and what the daemon has done. */
function details(status) {
  const { daemon } = status;
  const counters = Object.entries(daemon?.counters ?? {}).filter(([, count]) => count)
    .map(([name, count]) => (name === "merged_bytes" ? `${size(count)} merged` : `${count} ${words(name.replace("s_", count === 1 ? " " : "s ").replace("linked", "ahead"))}`));
  const facts = [
    counters.length ? ["Done since the daemon began", counters.join(", ")] : null,
    status.no_links ? ["No deltas, because", said(status.no_links)] : null,
    status.pinned_steps.length ? ["Pinned steps", status.pinned_steps.join(", ")] : null,
  ].filter(Boolean);
  return facts.length === 0 ? null : h("section", { class: "panel", "data-key": "details" }, h("h2", null, "Details"),
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value)))));
}

function stateOf(job, now) {
  const { status } = job;
  if (isSilent(job, now)) {
    return { word: "no answer", kind: "bad" };
  }
  if (!status || status.unseen) {
    return status ? { word: "away", kind: "bad" } : { word: "…", kind: "" };
  }
  if (status.daemon === null) {
    return { word: "none yet", kind: "warn" };
  }
  const { state, liveness } = status.daemon;
  if (state === "lost" || liveness === "unknown") {
    return { word: liveness, kind: "bad" };
  }
  if (state === "stopped") {
    return { word: state, kind: "warn" };
  }
  const level = Math.max(0, ...status.daemon.blocked.map((one) => one.level));
  if (state === "watching" && (status.paused || level)) {
    return status.paused ? { word: "paused", kind: "warn" } : { word: "blocked", kind: KINDS[level] };
  }
  return { word: state, kind: "good" };
}

/** What a trainer or an explorer does, or its trouble. */
function stateWord({ trouble, status }) {
  return trouble ? h("b", { class: "bad" }, said(trouble)) : words(status);
}

function badge({ word, kind }) {
  return h("span", { class: `badge ${kind}` }, word);
}

function slowestOf(all) {
  return all.filter(isLive).reduce((most, one) => (most === null || one.behind > most.behind ? one : most), null);
}

function behindOf({ behind, behind_steps: steps }) {
  if (behind <= 0) {
    return "up to date";
  }
  return `${many(behind, "version")}${steps ? `, ${many(steps, "step")}` : ""}`;
}

/** By the events, which may be few, or by the history. */
function publishedAgo(status, now, versions = null) {
  const named = new Set(["published", "adopted", "rolled_back"]);
  const event = status.events.findLast((one) => named.has(one.event) && one.version === status.latest?.sequence);
  const at = event?.time ?? versions?.find((one) => one.version === status.latest?.sequence)?.published;
  return at === null || at === undefined ? "–" : ago(at, now);
}

function bytesOf(all) {
  return size(all.reduce((sum, { bytes }) => sum + bytes, 0));
}

function freeOf({ free }) {
  return free === null || free.bytes === null ? "not known" : size(free.bytes);
}

function pauseOf(reload) {
  if (reload === null) {
    return "–";
  }
  return span(reload.pause) + { null: "", true: ", staged", false: ", not staged" }[reload.staged]
    + (reload.delta_bytes === null ? "" : " by delta");
}

function tile(name, value, more) {
  return h("div", { class: "tile" }, h("dt", null, name), h("dd", { class: "value" }, value),
    h("dd", { class: "more" }, more));
}

/** Give each job its `name`: the end of its path that tells it from the others. */
export function nameJobs(jobs) {
  const end = ({ job }, length) => {
    const parts = job.split("/").filter(Boolean);
    return length > parts.length ? job : parts.slice(-length).join("/");
  };
  for (let length = 1, alike = jobs; alike.length; length += 1) {
    const ends = jobs.map((job) => end(job, length));
    const counts = new Map();
    ends.forEach((one) => counts.set(one, (counts.get(one) ?? 0) + 1));
    alike.forEach((job) => Object.assign(job, { name: end(job, length) }));
    alike = alike.filter(({ job, name }) => counts.get(name) > 1 && name !== job);
  }
}

