"use strict";
// Elements of a page. Every text goes in as text: nothing that a run says can become markup.
const SVG = "http://www.w3.org/2000/svg";
const PALETTE = ["#3b82d6", "#d1602b", "#3c9d5b", "#a05fc0", "#b8860b", "#2a9aa8", "#c0487a", "#808080"];

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(Infinity)) {
    if (child !== null && child !== undefined) node.append(child instanceof Node ? child : String(child));
  }
  return node;
}

function el(tag, attributes, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function short(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(2).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

function swatch(color) {
  const mark = el("i", { class: "swatch", "aria-hidden": "true" });
  mark.style.background = color;
  return mark;
}

function tableOf(rows, { head = true, mark = () => "" } = {}) {
  const table = el("table");
  rows.forEach((row, place) => {
    const cell = head && place === 0 ? "th" : "td";
    table.append(el("tr", { class: mark(row, place) || null }, row.map((text) => el(cell, {}, text))));
  });
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": "table" }, table);
}

function section(title, id, ...children) {
  return el("section", { id }, el("h2", {}, title), ...children);
}
