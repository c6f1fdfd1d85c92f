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

function listed(runs) {
  const rows = runs.map((run) => {
    const box = el("input", { type: "checkbox", "aria-label": `show ${run.id}`, onchange: (event) => choose(run.id, event.target.checked) });
    box.checked = chosen.includes(run.id);
    const score = run.score === null || run.score === undefined ? "–" : `${short(run.before)} → ${short(run.score)} ${run.scored_by}`;
    return el("tr", { class: run.state === "training" ? "live" : null, "data-run": run.id },
      el("td", {}, box), el("td", {}, run.id), el("td", {}, run.error || run.state), el("td", {}, run.iterations), el("td", {}, short(run.reward)), el("td", {}, score));
  });
  const head = el("tr", {}, ["", "run", "state", "iterations", "reward", "held out"].map((text) => el("th", {}, text)));
  const search = shell.list.querySelector("input[type=search]") || el("input", { type: "search", id: "find-run", placeholder: "search the runs", "aria-label": "search the runs" });
  const had = document.activeElement && shell.list.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
  search.oninput = () => filter(search.value);
  shell.list.replaceChildren(el("h1", {}, "Runs"), search, el("div", { class: "wide" }, el("table", {}, head, rows)),
    runs.length ? "" : el("p", { class: "quiet" }, "There is no run here yet."));
  filter(search.value);
  if (had) for (const one of shell.list.querySelectorAll("input")) if (one.getAttribute("aria-label") === had) one.focus();
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

// a story is told once; then what changed of it, and of curves the points that came
function merged(before, found) {
  if (found.damaged) return found;
  const old = before && before.panels ? before : { panels: [] };
  const panels = found.panels.map((panel) => ({ ...panel, lines: panel.lines.map((line) => {
    if (!line.from) return line;
    const had = old.panels.find((one) => one.title === panel.title).lines.find((one) => one.name === line.name);
    return { ...line, x: [...had.x.slice(0, line.from), ...line.x], y: [...had.y.slice(0, line.from), ...line.y] };
  }) }));
  return { ...old, ...found.parts, panels, marks: found.marks, stamp: found.stamp };
}

let busy = false;
async function look() {
  if (busy) return;
  busy = true;
  const state = document.getElementById("state");
  try {
    const runs = await get("/api/runs", { known: marks.get("/api/runs") || "" });
    if (runs) listed(runs);
    let changed = drawnFor !== chosen.join("\n");
    for (const id of chosen) {
      const before = known.get(id);
      const there = before && before.stamp;
      const have = there ? JSON.stringify({ marks: before.marks, lengths: before.lengths }) : "";
      const found = await get("/api/story", { run: id, known: there ? before.stamp : "", have });
      if (found) { known.set(id, merged(before, found)); changed = true; }
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
