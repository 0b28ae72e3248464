// The page: asks the server again and again, and shows what it says. It draws the same from the same
// answer; what the viewer has chosen is in `chosen`, and nothing else is kept.

import { show } from "./dom.js";
import { announced, freshness, jobsTable, nameJobs, page, titled } from "./view.js";
import { link } from "./words.js";

const EVERY = 2000; // ms from an answer to the next question
const SLOWEST = 30000; // between two that fail
const PATIENCE = 20000;

const known = {
  overview: null, // what /jobs.json said last
  history: null, // of the chosen job: its id, when it was read, and the history
  answeredAt: 0, // by this page's own clock, in ms
  failures: 0,
};
const chosen = { since: false, rows: null, allExplorers: false, opened: new Set() };
let timer = null;
let asking = false;
let news = null;

/** The server's clock now; the browser's own may be wrong by hours, and is not asked. */
function now() {
  return (known.overview?.now ?? 0) + (performance.now() - known.answeredAt) / 1000;
}

function job() {
  const jobs = known.overview?.jobs ?? [];
  const named = decoded(location.hash);
  return jobs.find((one) => decoded(link(one.job)) === named) ?? jobs[0] ?? null;
}

function decoded(hash) {
  try {
    return decodeURI(hash);
  } catch {
    return null;
  }
}

async function ask(path) {
  const answer = await fetch(path, { cache: "no-store", signal: AbortSignal.timeout(PATIENCE) });
  if (!answer.ok) {
    throw new Error(`${path}: ${answer.status}`);
  }
  return answer.json();
}

/** Ask for all jobs, and for the history of the chosen one: both of one moment. */
async function look() {
  let asked;
  do { // the first answer says which jobs there are
    asked = job()?.id;
    const before = known.history?.id === asked ? known.history : null;
    const overview = await ask(`jobs.json${asked === undefined ? "" : `?history=${asked}&had=${before?.since ?? 0}`}`);
    nameJobs(overview.jobs);
    const { history, since } = overview.jobs.find(({ id }) => id === asked) ?? {};
    Object.assign(known, { overview, answeredAt: performance.now(),
      history: since && since === before?.since ? before : { id: asked, since, history } });
  } while (job()?.id !== asked);
}

async function refresh() {
  if (asking || document.hidden) {
    return;
  }
  asking = true;
  clearTimeout(timer);
  try {
    await look();
    known.failures = 0;
  } catch {
    known.failures += 1; // the page says so
  } finally {
    asking = false;
  }
  if (!document.hidden) {
    timer = setTimeout(refresh, Math.min(EVERY * 2 ** known.failures, SLOWEST));
  }
  draw();
}

function draw() {
  const at = now();
  show(document.getElementById("fresh"), freshness(known, at));
  if (known.overview === null) {
    return;
  }
  const one = job();
  const history = one?.id === known.history?.id ? known.history?.history : null;
  show(document.getElementById("jobs"), jobsTable(known.overview.jobs, one, at));
  show(document.getElementById("main"), page(one, history, chosen, at));
  document.title = titled(one);
  // Said aloud when something has become otherwise, never as the page opens.
  const told = announced(one, known.failures > 0, at);
  if (news !== null && news.job === told.job && news.text !== told.text) {
    document.getElementById("news").textContent = told.text;
  }
  news = told;
}

document.addEventListener("change", ({ target }) => {
  if (target.name === "axis") {
    chosen.since = target.value === "since";
  } else if (target.id === "rows") {
    chosen.rows = Number(target.value);
  }
  draw();
});

document.addEventListener("click", (event) => {
  const { target } = event;
  if (target.classList.contains("skip")) {
    event.preventDefault(); // the #fragment says which job is shown
    document.getElementById("main").focus();
  } else if (target.id === "all-explorers") {
    chosen.allExplorers = !chosen.allExplorers;
    draw();
  } else if (target.id === "again") {
    refresh();
  }
});

// What is inside of an opened row is only made then.
document.addEventListener("toggle", ({ target }) => {
  const key = target.dataset.key;
  if (target.open !== chosen.opened.has(key)) {
    chosen.opened[target.open ? "add" : "delete"](key);
    draw();
  }
}, true);

document.addEventListener("visibilitychange", () => {
  clearTimeout(timer);
  refresh();
});
window.addEventListener("online", refresh);
window.addEventListener("hashchange", () => {
  chosen.opened.clear();
  draw();
  refresh();
});

refresh();
