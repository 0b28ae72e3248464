// Sizes, times, durations and names as people read them: the same words as the command line's.

import { h } from "./dom.js";

/** Bytes in decimal units: `512 B`, `3.4 GB`. */
export function size(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 999.5 && unit < units.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${count.toFixed(unit === 0 || count >= 99.95 ? 0 : 1)} ${units[unit]}`;
}

/** A duration in seconds: `12 ms`, `1.3 s`, `48 s`, `12 min`, `30 h`, `12 d`. */
export function span(seconds) {
  if (seconds < 0.9995) {
    return `${(1000 * Math.max(0, seconds)).toFixed(0)} ms`;
  }
  if (seconds < 9.95) {
    return `${seconds.toFixed(1)} s`;
  }
  for (const [limit, length, unit] of [[99.5, 1, "s"], [5970, 60, "min"], [172800, 3600, "h"]]) {
    if (seconds < limit) {
      return `${(seconds / length).toFixed(0)} ${unit}`;
    }
  }
  return `${Math.min(seconds / 86400, 99999).toFixed(0)} d`;
}

export function many(count, one, more = `${one}s`) {
  return `${count} ${count === 1 ? one : more}`;
}

/** What others wrote, apart from our words: on one line, and without what would change others. */
export function said(text) {
  return h("bdi", null, printable(text));
}

export function printable(text) {
  return String(text).replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (char) => {
    const code = char.codePointAt(0).toString(16);
    return `\\u${code.padStart(4, "0")}`;
  });
}

/** Where a job is on this page: its path, of which what is no UTF-8 cannot be part of an address. */
export function link(path) {
  return `#${encodeURI(path.replace(/\p{Cs}/gu, "\ufffd"))}`;
}

/** A moment in the viewer's zone; the date only where it is not today's. */
export function clock(seconds, now) {
  const at = dateOf(seconds);
  if (at === null) {
    return "?";
  }
  const time = at.toLocaleTimeString("en-GB");
  const today = dateOf(now)?.toDateString() === at.toDateString();
  return today ? time : `${pad(at.getMonth() + 1)}-${pad(at.getDate())} ${time}`;
}

/** A moment as an element that says all of it to whoever asks. */
export function moment(seconds, now) {
  return timed(seconds, clock(seconds, now));
}

/** How long ago something was, likewise. */
export function ago(seconds, now) {
  return timed(seconds, `${span(Math.max(0, now - seconds))} ago`);
}

export function dateOf(seconds) {
  const at = new Date(1000 * seconds);
  return Number.isNaN(at.getTime()) ? null : at; // others write what they like
}

function timed(seconds, text) {
  const at = dateOf(seconds);
  if (at === null) {
    return "?";
  }
  return h("time", { datetime: at.toISOString(), title: at.toISOString() }, text);
}

function pad(number) {
  return String(number).padStart(2, "0");
}
