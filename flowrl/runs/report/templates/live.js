"use strict";
// The list of runs, and runs side by side, asked for anew every few seconds.
const EVERY = 2000;
const shell = { list: el("section", { id: "runs" }), told: el("div", { id: "told" }) };
const known = new Map(); // id -> the newest story
const marks = new Map(); // address -> mark of its last answer
let chosen = new URLSearchParams(location.search).getAll("run");
let drawnFor = "";

async function get(path, parameters) {
  const answer = await fetch(`${path}?${new URLSearchParams(parameters || {})}`);
  if (answer.status === 204) return null;
  const found = await answer.json();
  if (answer.status === 422) return { damaged: found.error };
  if (!answer.ok) throw new Error(found.error || `status ${answer.status}`);
  marks.set(path, answer.headers.get("X-Known") || "");
  return found;
}

function choose(id, wanted) {
  chosen = wanted ? [...chosen, id] : chosen.filter((one) => one !== id);
  const query = new URLSearchParams(chosen.map((one) => ["run", one]));
  history.replaceState(null, "", chosen.length ? `?${query}` : location.pathname);
  look();
}

function clock(seconds) {
  if (seconds === null || seconds === undefined) return "";
  const minutes = Math.ceil(seconds / 60);
  if (minutes < 60) return `${minutes} min left`;
  return minutes < 48 * 60 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min left` : `${Math.round(minutes / 1440)} days left`;
}

const MARKS = { training: "●", done: "✓", stopped: "■", damaged: "✗" };
const pictures = new Map(); // a sample is asked for once

function picture(run) {
  if (run.sample === null || run.sample === undefined) return el("span", { class: "no-picture", "aria-hidden": "true" });
  const key = `${run.id}@${run.sample}`;
  if (!pictures.has(key)) {
    const image = el("img", { class: "thumbnail", alt: `newest sample of ${run.id}`, loading: "lazy", decoding: "async", width: 48, height: 48,
      src: `/api/thumbnail?${new URLSearchParams({ run: run.id, iteration: run.sample })}` });
    image.addEventListener("error", () => { image.hidden = true; });
    pictures.set(key, image);
  }
  return pictures.get(key);
}

function heldOut(run) {
  if (run.score === null || run.score === undefined) return "–";
  const from = run.before === null || run.before === undefined ? "" : `${short(run.before)} → `;
  const within = run.interval ? ` [${short(run.interval[0])}, ${short(run.interval[1])}]` : "";
  return `${from}${short(run.score)}${within} ${run.scored_by}`;
}

function line(run) {
  const box = el("input", { type: "checkbox", "aria-label": `show ${run.id}`, onchange: (event) => choose(run.id, event.target.checked) });
  box.checked = chosen.includes(run.id);
  const name = el("a", { href: `?${new URLSearchParams({ run: run.id })}` }, run.id);
  const state = run.reading ? "reading" : run.state;
  const cell = (kind, label, ...inside) => el("td", { class: kind, "data-label": label }, inside);
  const facts = run.error ? [el("td", { class: "error", colspan: 3 }, run.error)] : [
    cell("progress", "iterations", run.wanted ? `${run.iterations} of ${run.wanted}` : run.iterations, run.seconds_left === null ? null : el("small", {}, ` ${clock(run.seconds_left)}`)),
    cell("reward", "reward", short(run.reward)), cell("score", "held out", heldOut(run))];
  const row = el("tr", { class: state, "data-run": run.id }, cell("box", null, box), cell("picture", null, picture(run)), cell("name", null, name),
    cell("state", null, el("span", { "aria-hidden": "true" }, `${MARKS[state] || "…"} `), state), facts);
  row.addEventListener("click", (event) => {
    if (!event.target.closest("a, input") && !String(getSelection())) name.click();
  });
  return row;
}

function listed(runs) {
  const rows = runs.map(line);
  const heads = ["", "", "run", "state", "iterations", "reward", "held-out score [95 % interval]"];
  const head = el("thead", {}, el("tr", {}, heads.map((text) => el("th", { scope: "col" }, text))));
  const search = shell.list.querySelector("input[type=search]") || el("input", { type: "search", id: "find-run", placeholder: "search the runs", "aria-label": "search the runs" });
  const had = document.activeElement && shell.list.contains(document.activeElement) ? document.activeElement : null;
  const named = (one) => one.getAttribute("aria-label") || one.getAttribute("href");
  search.oninput = () => filter(search.value);
  shell.list.replaceChildren(el("h1", {}, "Runs"), search, el("div", { class: "wide" }, el("table", {}, head, el("tbody", {}, rows))),
    runs.length ? "" : el("p", { class: "quiet" }, "There is no run here yet."));
  filter(search.value);
  if (had) for (const one of shell.list.querySelectorAll("input, a")) if (named(one) === named(had)) one.focus({ preventScroll: true });
}

function filter(text) {
  for (const row of shell.list.querySelectorAll("tr[data-run]")) row.hidden = !row.dataset.run.toLowerCase().includes(text.toLowerCase());
}

function draw() {
  const stories = colored(chosen.map((id) => known.get(id)).filter((story) => story && !story.damaged));
  // a damaged run is said, and keeps no other from being shown
  const damaged = chosen.filter((id) => known.get(id) && known.get(id).damaged)
    .map((id) => el("p", { class: "note", role: "alert" }, `${id} is damaged: ${known.get(id).damaged}`));
  const url = (story, index, place) => `/api/image?${new URLSearchParams({ run: story.id, iteration: story.samples.iterations[index], place })}`;
  const startsOf = (story, place) => Array.from({ length: story.samples.sources[place] },
    (_, which) => `/api/source?${new URLSearchParams({ run: story.id, place, which })}`);
  // what the eye or the hand is on stays where it is: the slider, the search, open parts
  const kept = {};
  for (const name of ["checkpoint", "search", "counted"]) {
    const input = document.getElementById(name);
    if (input) kept[name] = { value: input.value, last: input.max && input.value === input.max, focus: document.activeElement === input };
  }
  const open = [...document.querySelectorAll("details")].map((one) => one.open);
  const at = window.scrollY;
  shell.told.replaceChildren(...damaged, ...(stories.length ? tell(stories, url, startsOf) : []));
  const same = drawnFor === chosen.join("\n");
  drawnFor = chosen.join("\n");
  if (!same) return;
  for (const [name, was] of Object.entries(kept)) {
    const input = document.getElementById(name);
    if (!input) continue;
    if (!was.last) input.value = was.value; // one at its end follows the run
    input.dispatchEvent(new Event("input"));
    if (was.focus) input.focus();
  }
  document.querySelectorAll("details").forEach((one, i) => { one.open = Boolean(open[i]); });
  window.scrollTo(0, at);
}

let busy = false;
async function look() {
  if (busy) return;
  busy = true;
  const state = document.getElementById("state");
  try {
    const runs = await get("/api/runs", { known: marks.get("/api/runs") || "" });
    if (runs) listed(runs);
    if (runs && runs.some((run) => run.reading)) setTimeout(look, 50); // the rest of them
    let changed = drawnFor !== chosen.join("\n");
    for (const id of chosen) {
      const before = known.get(id);
      const found = await get("/api/story", { run: id, known: (before && before.stamp) || "" });
      if (found) { known.set(id, found); changed = true; }
    }
    if (changed) draw();
    state.textContent = "live";
  } catch (error) {
    state.textContent = `no answer: ${error.message}; trying on`;
  }
  busy = false;
}

document.querySelector("main").replaceChildren(shell.list, shell.told);
look();
setInterval(() => { if (!document.hidden) look(); }, EVERY);
