"use strict";
// A blind vote: which of two images fits the prompt better? Nothing here knows which is whose. Who
// has a link sees the vote alone: its addresses stand below the link's own.
const root = document.documentElement.dataset.root;
const voter = (() => {
  let found = localStorage.getItem("flowrl-voter");
  if (!found) {
    found = [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
    localStorage.setItem("flowrl-voter", found);
  }
  return found;
})();
const given = new URLSearchParams(location.search);
const part = { one: el("select", { id: "one", "aria-label": "first checkpoint" }), two: el("select", { id: "two", "aria-label": "second checkpoint" }),
  board: el("section", { id: "board" }), scores: el("section", { id: "scores" }), link: el("p", { id: "link", class: "quiet", role: "status" }) };
let ballot = null, sending = false, voted = 0;

async function get(path, parameters) {
  const answer = await fetch(`${path}?${new URLSearchParams(parameters || {})}`);
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error || `status ${answer.status}`);
  return found;
}

async function send(path, body) {
  const answer = await fetch(root + path, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  const found = await answer.json();
  if (!answer.ok) throw new Error(found.error || `status ${answer.status}`);
  return found;
}

function sides() {
  return part.one.value && part.two.value ? { one: part.one.value, two: part.two.value } : {};
}

async function next(note) {
  ballot = null;
  try {
    ballot = await send("/api/ballot", { voter, ...sides() });
  } catch (error) {
    part.board.replaceChildren(el("p", { class: "note", role: "alert" }, error.message));
    return;
  }
  if (!ballot.ballot) {
    const none = root ? "Nothing waits for votes. This page looks again by itself." : "No run waits for votes. Choose two checkpoints above to compare them.";
    const text = ballot.of ? `You have voted on all ${ballot.of}. Thank you.` : none;
    part.board.replaceChildren(el("p", { id: "nothing" }, text));
    ballot = null;
    return;
  }
  const address = (side) => `${root}/api/side?${new URLSearchParams({ ballot: ballot.ballot, side })}`;
  const starts = Array.from({ length: ballot.sources }, (_, i) => {
    const name = ballot.sources > 1 ? `source ${i + 1}` : "source";
    return el("figure", {}, el("img", { alt: name, src: address(`source${i}`) }), el("figcaption", {}, name));
  });
  const fits = starts.length ? "prompt and source" : "the prompt";
  const candidate = (side) => el("button", { class: "side", id: side, "aria-label": `${side} is better`, onclick: () => vote(side) },
    el("img", { alt: `the ${side} image`, src: address(side) }));
  part.board.replaceChildren(
    note ? el("p", { class: "note", role: "alert" }, note) : "",
    el("p", { class: "quiet" }, `Which image fits ${fits} better? Choose it, or keys: ← left, → right, ↓ or space for a tie.`),
    el("h2", { id: "prompt" }, ballot.prompt),
    el("div", { class: "trial" }, starts.length ? el("div", { class: "starts" }, starts) : null,
      el("div", { class: "duel" }, candidate("left"), candidate("right"))),
    el("button", { id: "tie", onclick: () => vote("tie") }, "equally good"),
    el("p", { class: "quiet", id: "progress" }, `${voted} votes, ${ballot.left_over} left of ${ballot.of}`));
}

async function vote(choice) {
  if (!ballot || sending) return;
  sending = true;
  let note = "";
  try {
    const answer = await fetch(`${root}/api/vote`, { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ ballot: ballot.ballot, choice, voter }) });
    if (answer.ok) voted += 1;
    else note = (await answer.json()).error;
  } catch (error) {
    document.getElementById("state").textContent = `the vote was not heard (${error.message}); vote again`;
    sending = false;
    return;
  }
  document.getElementById("state").textContent = "";
  await next(note);
  sending = false;
  showScores();
}

async function offerLink() {
  const found = await send("/api/link", sides()).catch((error) => ({ error: error.message }));
  if (found.error) { part.link.replaceChildren(found.error); return; }
  const here = ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname);
  const field = el("input", { id: "address", readonly: true, "aria-label": "link to send", value: location.origin + found.path, onfocus: () => field.select() });
  const takeBack = el("button", { onclick: async () => {
    await send("/api/link", { take_back: found.token });
    part.link.replaceChildren("The link was taken back: it opens nothing any more.");
  } }, "take it back");
  part.link.replaceChildren(field, " ", takeBack, " It opens this vote and nothing else, for whoever has it.",
    here ? " It leads to this machine: others need a tunnel, or flowrl view with --host and --token-env." : "");
  field.focus();
}

async function showScores() {
  if (root) return;
  const rows = await get("/api/scores").catch(() => []);
  if (rows.length < 2) { part.scores.replaceChildren(); return; }
  const percent = (value) => (value === null ? "–" : `${Math.round(value * 100)} %`);
  const cells = rows.map((row, i) => [row.name, i ? `${percent(row.share)} [${percent(row.share_low)}, ${percent(row.share_high)}]` : "–",
    i ? `${short(row.score)} [${short(row.low)}, ${short(row.high)}]` : "0", row.votes]);
  const shown = el("details", { id: "result" }, el("summary", {}, "Result so far (looking at it before you vote makes you less blind)"),
    tableOf([["checkpoint", `preferred to ${rows[0].name}`, "Bradley-Terry score", "votes"], ...cells]),
    el("p", { class: "quiet" }, "Log-odds with 95 % intervals, ties half a win for both. Votes count as independent."));
  const old = document.getElementById("result");
  shown.open = Boolean(old && old.open);
  part.scores.replaceChildren(shown);
}

async function begin() {
  if (root) {
    document.querySelector("main").replaceChildren(el("h1", {}, "Blind vote"), part.board);
    await next();
    setInterval(() => { if (!ballot && !sending) next(); }, 5000);
    return;
  }
  const runs = (await get("/api/runs")).filter((run) => !run.error);
  const options = [];
  for (const run of runs) {
    for (const iteration of await get("/api/samples", { run: run.id }).catch(() => [])) options.push(`${run.id}@${iteration}`);
  }
  for (const [name, select] of [["one", part.one], ["two", part.two]]) {
    select.append(el("option", { value: "" }, "(a run that waits)"), ...options.map((text) => el("option", { value: text }, text)));
    select.value = options.includes(given.get(name)) ? given.get(name) : "";
    select.addEventListener("change", () => {
      history.replaceState(null, "", `?${new URLSearchParams(sides())}`);
      part.link.replaceChildren();
      next();
    });
  }
  document.querySelector("main").replaceChildren(el("h1", {}, "Blind vote"),
    el("div", { class: "bar-of-tools" }, el("label", { for: "one" }, "compare"), part.one, el("label", { for: "two" }, "with"), part.two, el("button", { id: "send", onclick: offerLink }, "link to send")),
    part.link, part.board, part.scores);
  await next();
  showScores();
  setInterval(() => { if (!ballot && !sending && !sides().one) next(); }, 2000);
}

document.addEventListener("keydown", (event) => {
  if (event.target.matches("select, input") || event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
  const choice = { ArrowLeft: "left", ArrowRight: "right", ArrowDown: "tie", " ": "tie" }[event.key];
  if (!choice) return;
  event.preventDefault();
  vote(choice);
});
begin().catch((error) => document.querySelector("main").replaceChildren(el("p", { class: "note", role: "alert" }, error.message)));
