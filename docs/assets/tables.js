// Shows the tables of tables.md: a text filter, a choice for each column with few values, and rows a page at a time.
"use strict";

const PAGE = 25;
const FEW = 30;

function element(name, text, parent) {
  const made = document.createElement(name);
  if (text) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

// Text in backquotes as code, the rest as it is.
function fill(cell, value) {
  String(value).split("`").forEach((part, index) => cell.append(index % 2 ? element("code", part) : part));
}

function show(place) {
  const { made_by: madeBy, rows } = JSON.parse(place.querySelector("script").textContent);
  const columns = Object.keys(rows[0]);
  const controls = element("p", "", place);
  const text = element("input", "", controls);
  text.type = "search";
  text.placeholder = "Filter rows";
  text.setAttribute("aria-label", "Filter rows");
  const choices = new Map();
  for (const column of columns) {
    const values = [...new Set(rows.map((row) => row[column]))].sort();
    if (values.length < 2 || values.length > FEW || values.some((value) => value.length > 40)) continue;
    if (values.every((value) => /^\d*$/.test(value))) continue; // quantities
    const choice = element("select", "", controls);
    choice.setAttribute("aria-label", column);
    element("option", `${column}: any`, choice).value = "any";
    values.forEach((value) => { element("option", value || "none", choice).value = `=${value}`; });
    choices.set(column, choice);
  }
  const count = element("p", "", place);
  count.setAttribute("aria-live", "polite");
  const scroll = element("div", "", place);
  scroll.className = "md-typeset__scrollwrap";
  scroll.style.overflowX = "auto";
  const table = element("table", "", scroll);
  const head = element("tr", "", element("thead", "", table));
  columns.forEach((column) => element("th", column, head));
  const body = element("tbody", "", table);
  const more = element("button", "Show all", place);
  more.className = "md-button";
  let limit = PAGE;
  const draw = () => {
    const words = text.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter((row) =>
      [...choices].every(([column, choice]) => choice.value === "any" || choice.value === `=${row[column]}`) &&
      words.every((word) => columns.some((column) => String(row[column]).toLowerCase().includes(word))));
    count.textContent = `${found.length} of ${rows.length} rows`;
    body.replaceChildren();
    for (const row of found.slice(0, limit)) {
      const line = element("tr", "", body);
      columns.forEach((column) => fill(element("td", "", line), row[column]));
    }
    more.hidden = found.length <= limit;
  };
  const again = () => { limit = PAGE; draw(); };
  text.addEventListener("input", again);
  choices.forEach((choice) => choice.addEventListener("change", again));
  more.addEventListener("click", () => { limit = rows.length; draw(); });
  fill(element("p", "", place), `Made by ${madeBy}.`);
  draw();
}

document.addEventListener("DOMContentLoaded", () => document.querySelectorAll(".data-table").forEach(show));
