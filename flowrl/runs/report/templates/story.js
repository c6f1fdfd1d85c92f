"use strict";
// A page of one run, or of several side by side, from their stories.
function colored(stories) {
  return stories.map((story, i) => ({ ...story, color: PALETTE[i % PALETTE.length] }));
}

function headline(stories) {
  return el("div", { class: "heads" }, stories.map((story) => el("div", { class: "head" },
    el("h1", {}, stories.length > 1 ? swatch(story.color) : null, story.name),
    ...story.verdict.map((line) => el("p", { class: "verdict" }, line)),
    el("dl", {}, Object.entries(story.facts).map(([key, value]) => el("div", {}, el("dt", {}, key), el("dd", {}, value)))))));
}

// what changed comes first: on a phone the rest is further right
function changeFirst(rows) {
  const change = rows[0].indexOf("change");
  return change < 0 ? rows : rows.map((row) => [row[0], row[change], ...row.filter((_, i) => i && i !== change)]);
}

function beforeAfter(stories) {
  const tables = stories.filter((story) => story.table.length);
  if (!tables.length) return null;
  const last = (row, place, rows) => (place === rows.length - 1 ? "total" : "");
  return portion("Before and after", "before-after", tables.map((story) => [
    stories.length > 1 ? el("h3", {}, swatch(story.color), story.name) : null,
    tableOf(changeFirst(story.table), { mark: (row, place) => last(row, place, story.table) })]),
    el("p", { class: "quiet" }, "Mean score on held-out prompts, with its 95 % interval in brackets. Both see the same prompts and noise, so the change has an interval of its own: the sentence at the top."));
}

function panelLines(stories, title) {
  const lines = [];
  for (const story of stories) {
    const panel = story.panels.find((one) => one.title === title);
    if (!panel) continue;
    const main = panel.lines.find((line) => line.name === "all" || line.name === "total");
    const kept = stories.length > 1 && main ? [main] : panel.lines;
    kept.forEach((line, i) => {
      const color = stories.length > 1 ? story.color : PALETTE[i % PALETTE.length];
      const name = stories.length > 1 ? (line === main ? story.name : `${story.name} ${line.name}`) : line.name;
      lines.push({ ...line, name, color, faint: kept.length > 1 && line !== main && main !== undefined });
    });
  }
  return lines;
}

function portion(title, id, ...children) {
  return el("div", { id, class: "part" }, el("h3", {}, title), ...children);
}

const outside = (band, value) => value !== null && (band.side === "above" ? value > band.limit : value < band.limit);

// the curves of a group; those that say nothing are folded: they never move, or stay in their healthy range
function curves(stories, group) {
  const titles = [...new Set(stories.flatMap((story) => story.panels.filter((panel) => panel.group === group).map((panel) => panel.title)))];
  const told = [], silent = [];
  for (const title of titles) {
    const lines = panelLines(stories, title);
    const band = stories.flatMap((story) => story.panels).find((panel) => panel.title === title && panel.band)?.band;
    const values = lines.flatMap((line) => line.y).filter((value) => value !== null);
    const flat = values.length > 1 && new Set(values).size === 1;
    const good = band && !values.some((value) => outside(band, value));
    (flat || (good && group === "Is it safe?") ? silent : told).push(lineChart(title, lines, band));
  }
  const folded = silent.length ? el("details", { class: "silent" }, el("summary", {}, `${silent.length} more that did not move or stayed in the healthy range`), el("div", { class: "charts" }, silent)) : null;
  return [told.length ? el("div", { class: "charts" }, told) : null, folded].filter(Boolean);
}

function group(title, id, parts) {
  const found = parts.flat(Infinity).filter(Boolean);
  return found.length ? section(title, id, found) : null;
}

function steps(stories) {
  const maps = stories.flatMap((story) => story.by_step.map((panel) => heatMap(stories.length > 1 ? story.name : "", panel)));
  return maps.length ? el("details", { id: "by-step" }, el("summary", {}, "By denoising step"), el("div", { class: "charts" }, maps)) : null;
}

function counted(stories) {
  const known = stories.filter((story) => story.histograms.length);
  if (!known.length) return null;
  const most = Math.max(...known.map((story) => story.histograms.length));
  const slider = el("input", { type: "range", id: "counted", min: 0, max: most - 1, value: most - 1, "aria-label": "iteration of the histograms" });
  const drawn = el("div", { class: "charts" });
  const show = () => drawn.replaceChildren(...known.flatMap((story) => {
    const line = story.histograms[Math.min(story.histograms.length - 1, Number(slider.value))];
    const of = `iteration ${line.iteration}${stories.length > 1 ? ` · ${story.name}` : ""}`;
    return [histogram(`Rewards, ${of}`, line.reward), histogram(`Advantages, ${of}`, line.advantage)];
  }));
  slider.addEventListener("input", show);
  show();
  return portion("Rewards and advantages", "histograms", el("div", { class: "bar-of-tools" }, el("label", { for: "counted" }, "iteration"), slider), drawn);
}

function findings(stories) {
  const parts = [];
  if (stories.every((story) => !story.findings.length)) parts.push(el("p", { class: "quiet" }, "✓ The monitors found nothing."));
  else for (const story of stories) {
    const name = stories.length > 1 ? el("h3", {}, swatch(story.color), story.name) : null;
    const said = story.findings.map((row) => el("li", {}, el("span", { class: "bad" }, "✗ "), `After ${row.iteration} iterations, `, el("b", {}, row.monitor), ` (${row.action}): ${row.what}. ${row.advice}.`));
    parts.push(name, said.length ? el("ul", {}, said) : el("p", { class: "quiet" }, "✓ The monitors found nothing."));
  }
  return portion("Findings of the monitors", "monitors", parts);
}

function doctors(stories) {
  const parts = [];
  for (const story of stories.filter((one) => one.doctor)) {
    const seen = story.doctor;
    if (stories.length > 1) parts.push(el("h3", {}, swatch(story.color), story.name));
    if (seen.other.length) parts.push(el("p", { class: "note" }, `It looked at another config than the run's: ${seen.other.slice(0, 8).join(", ")} differ.`));
    if (seen.findings.length) parts.push(el("ul", {}, seen.findings.map((row) => el("li", {}, el("b", {}, row.id), `: ${row.found}. ${row.change}.`))));
    else parts.push(el("p", {}, "Nothing to change was found."));
    parts.push(el("p", { class: "quiet" }, `Looked at: ${seen.looked_at.join(", ")}.`));
    for (const [name, why] of Object.entries(seen.skipped)) parts.push(el("p", { class: "quiet" }, `Not looked at: ${name} (${why})`));
    for (const [name, rows] of Object.entries(seen.tables)) parts.push(el("h4", {}, name === "gradient" ? "gradient of the weights by step" : "ratio before any update"), tableOf(rows));
  }
  return parts.length ? portion("Findings of the doctor, before training", "doctor", parts) : null;
}

function sideBySide(stories, key) {
  const names = [...new Set(stories.flatMap((story) => Object.keys(story[key])))];
  const rows = names.map((name) => [name, ...stories.map((story) => story[key][name] ?? "–")]);
  const differs = rows.filter((row) => new Set(row.slice(1)).size > 1);
  return { head: [key === "config" ? "key" : "what", ...stories.map((story) => story.name)], rows, differs };
}

function settings(stories) {
  const parts = [], config = sideBySide(stories, "config"), place = sideBySide(stories, "environment");
  if (stories.length > 1) {
    parts.push(config.differs.length ? tableOf([config.head, ...config.differs]) : el("p", {}, "The configs are the same."));
  }
  const mark = (row, i) => (i && new Set(row.slice(1)).size > 1 ? "differs" : "");
  for (const [name, found] of [[`Resolved configuration (${config.rows.length} keys)`, config], ["Environment", place]]) {
    if (found.rows.length) parts.push(el("details", {}, el("summary", {}, name), tableOf([found.head, ...found.rows], { mark })));
  }
  return section(stories.length > 1 ? "What differs, and the rest" : "Configuration and environment", "config", parts);
}

function sampleImages(stories, url, startsOf) {
  const runs = stories.filter((story) => story.samples).map((story) => ({
    name: story.name, color: story.color, ...story.samples,
    url: (index, place) => url(story, index, place),
    startsOf: (place) => startsOf(story, place) }));
  if (!runs.length) return null;
  const noise = new Set(stories.filter((story) => story.samples).map((story) => story.noise));
  const notes = noise.size > 1 ? ["The runs sampled from different noise (samples.seed), so images differ by that, too."] : [];
  return samplesOf(runs, notes);
}

function tell(given, url, startsOf) {
  const stories = colored(given);
  const measured = stories.some((story) => story.panels.length);
  return [headline(stories),
    measured ? null : el("p", { class: "quiet" }, "Nothing was measured yet."),
    group("Is it better?", "better", [beforeAfter(stories), curves(stories, "Is it better?"), sampleImages(stories, url, startsOf)]),
    group("Is it learning?", "learning", [curves(stories, "Is it learning?"), counted(stories)]),
    group("Is it safe?", "safe", [findings(stories), doctors(stories), curves(stories, "Is it safe?"), steps(stories)]),
    group("Time", "time", curves(stories, "Time")), settings(stories)].filter(Boolean);
}

const embedded = document.getElementById("data");
if (embedded) {
  const stories = JSON.parse(embedded.textContent);
  document.querySelector("main").replaceChildren(...tell(stories,
    (story, index, place) => story.samples.images[index][place], (story, place) => story.samples.sources[place]));
}
