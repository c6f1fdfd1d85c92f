"use strict";
// The slider over checkpoints: every prompt from the same noise, one iteration at a time.
// runs: [{name, color, prompts, iterations, right, url(iteration place, prompt place)}]
function samplesOf(runs, notes) {
  const steps = [...new Set(runs.flatMap((run) => run.iterations))].sort((a, b) => a - b);
  const slider = el("input", { type: "range", id: "checkpoint", min: 0, max: steps.length - 1, value: steps.length - 1, "aria-label": "checkpoint" });
  const said = el("output", { for: "checkpoint" });
  const search = el("input", { type: "search", id: "search", placeholder: "search the prompts", "aria-label": "search the prompts" });
  const count = el("span", { class: "quiet" });
  const cards = el("div", { class: "cards" });
  const prompts = [...new Set(runs.flatMap((run) => run.prompts))];
  const shown = [];
  for (const prompt of prompts) {
    const row = el("div", { class: "images" });
    for (const run of runs) {
      const place = run.prompts.indexOf(prompt);
      if (place < 0) continue;
      const before = framed(run, place, "before", runs.length > 1);
      const now = framed(run, place, "now", runs.length > 1);
      row.append(before.frame, now.frame);
      shown.push({ run, place, before, now });
    }
    cards.append(el("article", { class: "card", "data-prompt": prompt.toLowerCase() }, el("h3", {}, prompt), row));
  }
  function framed(run, place, kind, named) {
    const image = el("img", { alt: "", loading: "lazy", decoding: "async" });
    image.addEventListener("load", () => image.classList.toggle("small", image.naturalWidth <= 128));
    const caption = el("figcaption", {});
    return { image, caption, named, frame: el("figure", { class: kind }, image, caption) };
  }
  function put(slot, run, index, place, text) {
    const verdict = (run.right[index] || [])[place];
    slot.image.src = run.url(index, place);
    slot.image.alt = `${run.prompts[place]}, ${run.name}, ${text}`;
    slot.image.dataset.iteration = run.iterations[index];
    slot.frame.classList.toggle("right", verdict === true);
    slot.frame.classList.toggle("wrong", verdict === false);
    const says = verdict === true ? " ✓" : verdict === false ? " ✗" : "";
    slot.caption.replaceChildren(...(slot.named ? [swatch(run.color), `${run.name} · `] : []), text + says);
  }
  let held = false;
  function show() {
    const wanted = held ? steps[0] : steps[Number(slider.value)];
    said.textContent = wanted === 0 ? "before training" : `iteration ${wanted}`;
    for (const { run, place, before, now } of shown) {
      let index = 0;
      run.iterations.forEach((iteration, i) => { if (iteration <= wanted) index = i; });
      put(before, run, 0, place, run.iterations[0] === 0 ? "before" : `iteration ${run.iterations[0]}`);
      put(now, run, index, place, `iteration ${run.iterations[index]}`);
    }
  }
  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let left = 0;
    for (const card of cards.children) {
      card.hidden = !words.every((word) => card.dataset.prompt.includes(word));
      left += card.hidden ? 0 : 1;
    }
    count.textContent = `${left} of ${prompts.length} prompts`;
  }
  slider.addEventListener("input", show);
  search.addEventListener("input", filter);
  const typing = (event) => event.target.matches("input:not([type=range]), textarea, select") || event.ctrlKey || event.metaKey || event.altKey;
  const keys = (event) => {
    if (!slider.isConnected) { document.removeEventListener("keydown", keys); return; }
    if (typing(event)) return;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      if (event.target.type === "range") return; // it moves by itself
      slider.value = Number(slider.value) + (event.key === "ArrowLeft" ? -1 : 1);
      show();
    } else if (event.key === "b" && !event.repeat) { held = true; show(); }
    else if (event.key === "/") { event.preventDefault(); search.focus(); }
  };
  document.addEventListener("keydown", keys);
  document.addEventListener("keyup", (event) => { if (event.key === "b" && held) { held = false; show(); } });
  show();
  filter();
  return section("Samples", "samples",
    el("div", { class: "bar-of-tools" }, el("label", { for: "checkpoint" }, "checkpoint"), slider, said, search, count),
    el("p", { class: "quiet" }, "Each prompt from the same noise at every checkpoint. Keys: ← → move the slider, hold b for before, / searches."),
    notes.map((note) => el("p", { class: "note" }, note)), cards);
}
