"use strict";
// The slider over checkpoints: every prompt from the same noise, one iteration at a time.
// runs: [{name, color, prompts, keys, iterations, right, url(iteration place, prompt place),
//   startsOf(prompt place): addresses of what its samples start from}]
function samplesOf(runs, notes) {
  const steps = [...new Set(runs.flatMap((run) => run.iterations))].sort((a, b) => a - b);
  const slider = el("input", { type: "range", id: "checkpoint", min: 0, max: steps.length - 1, value: steps.length - 1, "aria-label": "checkpoint" });
  const said = el("output", { for: "checkpoint" });
  const search = el("input", { type: "search", id: "search", placeholder: "search the prompts", "aria-label": "search the prompts" });
  const count = el("span", { class: "quiet" });
  const cards = el("div", { class: "cards" });
  const samples = [...new Set(runs.flatMap((run) => run.keys))];
  const shown = [];
  for (const key of samples) {
    const having = runs.filter((run) => run.keys.includes(key));
    const prompt = having[0].prompts[having[0].keys.indexOf(key)];
    const rows = having.map((run) => {
      const place = run.keys.indexOf(key);
      const before = framed("before", runs.length > 1), now = framed("now", runs.length > 1);
      shown.push({ run, place, before, now });
      return el("div", { class: "images" }, startsOf(run, place), before.frame, now.frame);
    });
    cards.append(el("article", { class: "card", "data-prompt": prompt.toLowerCase() }, el("h3", {}, prompt), rows));
  }
  function framed(kind, named) {
    const image = el("img", { alt: "", loading: "lazy", decoding: "async" });
    const caption = el("figcaption", {});
    const frame = el("figure", { class: kind }, image, caption);
    image.addEventListener("load", () => {
      image.classList.toggle("small", image.naturalHeight <= 128);
      // of a row as high as its pictures; a film has one of its own
      const shape = image.naturalWidth / image.naturalHeight;
      frame.classList.toggle("film", shape > 2.5);
      if (shape <= 2.5) frame.style.flexGrow = shape;
    });
    return { image, caption, named, frame };
  }
  function startsOf(run, place) {
    return run.startsOf(place).map((url, i, all) => {
      const slot = framed("source", false);
      slot.image.src = url;
      slot.image.alt = `${run.prompts[place]}, source${all.length > 1 ? ` ${i + 1}` : ""}`;
      slot.caption.textContent = all.length > 1 ? `source ${i + 1}` : "source";
      return slot.frame;
    });
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
      put(before, run, 0, place, run.iterations[0] === 0 ? "before training" : `iteration ${run.iterations[0]}`);
      put(now, run, index, place, run.iterations[index] === 0 ? "before training" : `iteration ${run.iterations[index]}`);
    }
  }
  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let left = 0;
    for (const card of cards.children) {
      card.hidden = !words.every((word) => card.dataset.prompt.includes(word));
      left += card.hidden ? 0 : 1;
    }
    count.textContent = `${left} of ${samples.length} prompts`;
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
  return portion("Samples", "samples",
    el("div", { class: "bar-of-tools" }, el("label", { for: "checkpoint" }, "checkpoint"), slider, said, search, count),
    el("p", { class: "quiet" }, "Each prompt from the same noise at every checkpoint. Keys: ← → move the slider, hold b for before training, / searches."),
    notes.map((note) => el("p", { class: "note" }, note)), cards);
}
