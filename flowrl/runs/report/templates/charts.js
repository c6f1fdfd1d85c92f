"use strict";
// Charts drawn from data. A chart has the keyboard: arrow keys move its reading line.
const BOX = { width: 460, height: 220, left: 52, right: 12, top: 10, bottom: 26 };

function ticks(low, high, count) {
  const raw = (high - low) / count || 1;
  const unit = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= raw * 0.7);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

// as many digits as tell neighbouring ticks apart, all alike
function tickTexts(values) {
  const most = Math.max(...values.map(Math.abs)), step = values.length > 1 ? Math.abs(values[1] - values[0]) : most;
  const unit = Math.floor(Math.log10(step || 1) + 1e-9);
  if (most && (most < 1e-3 || most >= 1e5)) {
    const digits = Math.max(0, Math.min(20, Math.floor(Math.log10(most)) - unit));
    return values.map((value) => (value ? value.toExponential(digits).replace("e+", "e") : "0"));
  }
  return values.map((value) => (value ? value.toFixed(Math.max(0, Math.min(20, -unit))) : "0"));
}

function span(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  if (!known.length) return [0, 1];
  const low = Math.min(...known), high = Math.max(...known);
  if (low === high) return [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  return [low, high];
}

// lines: [{name, color, x, y, low?, high?, faint?}]
// band: {limit, side}: where a monitor speaks
function lineChart(title, lines, band) {
  const [x0, x1] = span(lines.flatMap((line) => line.x));
  const whiskers = lines.flatMap((line) => [...(line.low || []), ...(line.high || [])]);
  let [y0, y1] = span([...lines.flatMap((line) => line.y), ...whiskers]);
  const pad = (y1 - y0) * 0.06;
  [y0, y1] = [y0 >= 0 && y0 - pad < 0 ? 0 : y0 - pad, y1 + pad];
  const px = (x) => BOX.left + ((x - x0) / (x1 - x0)) * (BOX.width - BOX.left - BOX.right);
  const py = (y) => BOX.height - BOX.bottom - ((y - y0) / (y1 - y0)) * (BOX.height - BOX.top - BOX.bottom);
  const plot = svg("svg", { viewBox: `0 0 ${BOX.width} ${BOX.height}`, role: "img", "aria-label": `${title} over the iterations` });
  const up = ticks(y0, y1, 4), upTexts = tickTexts(up);
  for (const [i, y] of up.entries()) {
    plot.append(svg("line", { class: "rule", x1: BOX.left, x2: BOX.width - BOX.right, y1: py(y), y2: py(y) }));
    plot.append(svg("text", { class: "tick", x: BOX.left - 6, y: py(y) + 3, "text-anchor": "end" }, upTexts[i]));
  }
  if (band) {
    // the healthy side is tinted, as far as it is in sight
    const edge = Math.min(Math.max(band.limit, y0), y1), top = band.side === "above" ? edge : y1, foot = band.side === "above" ? y0 : edge;
    plot.append(svg("rect", { class: "healthy", x: BOX.left, width: BOX.width - BOX.left - BOX.right, y: py(top), height: Math.max(0, py(foot) - py(top)) }));
  }
  const along = ticks(x0, x1, 5).filter((x) => x === Math.round(x)), alongTexts = tickTexts(along);
  for (const [i, x] of along.entries()) plot.append(svg("text", { class: "tick", x: px(x), y: BOX.height - 8, "text-anchor": "middle" }, alongTexts[i]));
  for (const line of lines) {
    (line.low || []).forEach((low, i) => {
      const high = line.high[i];
      if (low !== null && high !== null) plot.append(svg("line", { stroke: line.color, "stroke-width": 1.4, x1: px(line.x[i]), x2: px(line.x[i]), y1: py(low), y2: py(high) }));
    });
    let pen = "M", path = "";
    line.y.forEach((y, i) => {
      if (y === null) { pen = "M"; return; }
      path += `${pen}${px(line.x[i]).toFixed(1)},${py(y).toFixed(1)}`;
      pen = "L";
    });
    plot.append(svg("path", { d: path, fill: "none", stroke: line.color, "stroke-width": line.faint ? 1 : 1.8, opacity: line.faint ? 0.65 : 1 }));
    if (line.x.length <= 12) {
      line.y.forEach((y, i) => {
        if (y !== null) plot.append(svg("circle", { cx: px(line.x[i]), cy: py(y), r: 2.4, fill: line.color }));
      });
    }
  }
  const reading = el("p", { class: "reading", "aria-live": "polite" });
  const cursor = svg("line", { class: "cursor", y1: BOX.top, y2: BOX.height - BOX.bottom, x1: -9, x2: -9 });
  plot.append(cursor);
  const places = [...new Set(lines.flatMap((line) => line.x))].sort((a, b) => a - b);
  let at = places.length - 1;
  const read = (show) => {
    const x = places[at];
    if (show) { cursor.setAttribute("x1", px(x)); cursor.setAttribute("x2", px(x)); }
    const parts = [];
    for (const line of lines) {
      const i = nearest(line.x, x);
      if (i >= 0) parts.push(el("span", {}, swatch(line.color), `${line.name} ${short(line.y[i])}`));
    }
    reading.replaceChildren(el("b", {}, `iteration ${short(x)}`), ...parts);
  };
  const frame = el("figure", { class: "chart", tabindex: "0", "aria-label": `${title}: arrow keys read values` },
    el("figcaption", {}, title, band ? el("small", {}, ` healthy ${band.side === "above" ? "up to" : "from"} ${short(band.limit)}`) : null), plot, reading);
  frame.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    event.stopPropagation();
    at = Math.max(0, Math.min(places.length - 1, at + move));
    read(true);
  });
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect();
    const inside = ((event.clientX - box.left) / box.width) * BOX.width;
    const x = x0 + ((inside - BOX.left) / (BOX.width - BOX.left - BOX.right)) * (x1 - x0);
    at = Math.max(0, nearest(places, x));
    read(true);
  });
  read(false);
  return frame;
}

function nearest(sorted, x) {
  let best = -1;
  sorted.forEach((value, i) => {
    if (best < 0 || Math.abs(value - x) < Math.abs(sorted[best] - x)) best = i;
  });
  return best;
}

// A cell per denoising step and stretch of iterations.
function heatMap(name, panel) {
  const known = panel.rows.flat().filter((value) => value !== null);
  const low = Math.min(...known), high = Math.max(...known);
  const canvas = el("canvas", { width: panel.x.length, height: panel.steps.length, role: "img", "aria-label": `${panel.title} by denoising step and iteration` });
  const draw = canvas.getContext("2d");
  panel.rows.forEach((row, y) => row.forEach((value, x) => {
    if (value === null) return;
    const part = high > low ? (value - low) / (high - low) : 0;
    const mix = (a, b) => Math.round(a + (b - a) * part);
    draw.fillStyle = `rgb(${mix(226, 10)} ${mix(236, 60)} ${mix(250, 140)})`;
    draw.fillRect(x, y, 1, 1);
  }));
  const reading = el("p", { class: "reading", "aria-live": "polite" });
  const last = panel.x.length - 1;
  const read = (x, y) => reading.replaceChildren(el("b", {}, `step ${panel.steps[y]}, iteration ${short(panel.x[x])}`), ` ${short(panel.rows[y][x])}`);
  let x = last, y = 0;
  const frame = el("figure", { class: "chart heat", tabindex: "0", "aria-label": `${panel.title}: arrow keys read values` },
    el("figcaption", {}, name ? `${panel.title} · ${name}` : panel.title),
    el("div", { class: "cells" }, el("span", { class: "steps" }, panel.steps.map((step) => el("span", {}, step))), canvas),
    el("p", { class: "range" }, `${high > low ? `${short(low)} (light) to ${short(high)} (dark)` : `all ${short(low)}`}; a row per step, 0 = the noisiest`), reading);
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    x = Math.min(last, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * panel.x.length)));
    y = Math.min(panel.steps.length - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * panel.steps.length)));
    read(x, y);
  });
  frame.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!move) return;
    event.preventDefault();
    event.stopPropagation();
    x = Math.min(last, Math.max(0, x + move[0]));
    y = Math.min(panel.steps.length - 1, Math.max(0, y + move[1]));
    read(x, y);
  });
  read(x, y);
  return frame;
}

function histogram(title, found) {
  const frame = el("figure", { class: "chart" }, el("figcaption", {}, title));
  if (!found) return el("figure", { class: "chart" }, el("figcaption", {}, title), el("p", { class: "quiet" }, "nothing was scored"));
  const most = Math.max(...found.counts), wide = (BOX.width - 20) / found.counts.length;
  const plot = svg("svg", { viewBox: `0 0 ${BOX.width} 130`, role: "img", "aria-label": `${title}: ${found.counts.reduce((a, b) => a + b, 0)} values from ${short(found.low)} to ${short(found.high)}` });
  found.counts.forEach((count, i) => {
    const tall = (count / most) * 96;
    plot.append(svg("rect", { class: "bar", x: 10 + i * wide, width: Math.max(1, Math.min(wide - 1, 60)), y: 104 - tall, height: tall }, svg("title", {}, count)));
  });
  plot.append(svg("text", { class: "tick", x: 10, y: 122 }, short(found.low)));
  plot.append(svg("text", { class: "tick", x: BOX.width - 10, y: 122, "text-anchor": "end" }, short(found.high)));
  frame.append(plot);
  return frame;
}
