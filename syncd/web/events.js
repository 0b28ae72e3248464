// The last things that happened, in the words of `syncd status`.

import { h } from "./dom.js";
import { moment, said, size, span } from "./words.js";

const NAMES = 4;
const ALL = 50; // of explorers that went live the status has no more

/** The section; `events` are those of the status, oldest first. */
export function events(all, now) {
  const told = grouped(all).reverse();
  return h("section", { class: "panel", "data-key": "events" }, h("h2", null, "Last events"),
    told.length
      ? h("ol", { class: "events" }, told.map(({ at, text }) =>
          h("li", null, moment(at, now), h("span", null, text))))
      : h("p", { class: "empty" }, "Nothing has happened yet."));
}

/** Explorers that go live on a version one after the other are one line. */
function grouped(all) {
  const found = [];
  for (const event of all) {
    const last = found.at(-1);
    if (event.event === "live" && last?.version === event.version) {
      last.names.push(event.explorer);
      last.at = event.time;
    } else if (event.event === "live") {
      found.push({ at: event.time, version: event.version, names: [event.explorer] });
    } else {
      found.push({ at: event.time, text: words(event) });
    }
  }
  return found.map(({ at, text, version, names }) => ({ at, text: text ?? live(version, names) }));
}

function live(version, names) {
  const shown = names.length > NAMES + 1 ? names.slice(0, NAMES) : names;
  const rest = names.length - shown.length;
  return [`v${version} is live on `, said(shown.join(", ")), rest ? ` and ${names.length < ALL ? rest : "many"} more` : ""];
}

function words(event) {
  const [version, step, of] = [`v${event.version}`, event.step, `v${event.of}`];
  const by = said(event.by ?? "someone");
  switch (event.event) {
    case "active":
      return "a daemon began to serve the job";
    case "published":
      return [
        `published step ${step} as ${version}: ${size(event.bytes ?? 0)} in ${span(event.seconds ?? 0)}`,
        ...(event.why ? [", with ", said(event.why)] : []),
      ];
    case "names":
      return [
        `${version}: tensors have the names of the ${event.names}`,
        ...(event.why ? [", because ", said(event.why)] : []),
      ];
    case "adopted":
      return `adopted ${version} of step ${step}, which an earlier daemon had finished`;
    case "rolled_back":
      return [`${of} is served again, as ${version}: asked for by `, by];
    case "refused":
      return [`no rollback to ${of} for `, by, ": ", said(event.why)];
    case "linked":
      return `served step ${step} ahead of ${version}: ${size(event.delta_bytes ?? 0)}`;
    case "closed":
      return [`no delta of step ${step}: `, said(event.why)];
    case "skipped":
      return `skipped step ${step}: a newer one was announced`;
    case "quarantined":
      return [`quarantined step ${step}: `, said(event.why)];
    default:
      return [`pruned ${event.what} `, said(event.name.replace(/^global_step_|(?<=^[vd])0+/, "")), ": ", said(event.why)];
  }
}
