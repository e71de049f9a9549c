// Filters as rows of column, comparison and value; together they are one tree of the API's grammar.

import { make } from "./dom.js";

const COMPARISONS = { eq: "is", ne: "is not", gt: ">", gte: "≥", lt: "<", lte: "≤", in: "is one of", nin: "is none of" };
const OF_BOOLEANS = ["eq", "ne"];
const RARELY_FILTERED = ["doc_id", "title", "source_file", "cluster_id", "num_tokens"];
const MAX_OFFERED = 50;

export class Filters {
  #columns = [];
  #seen = new Map();
  #number = 0;

  /** `changed()` is called whenever the tree is another one. */
  constructor(element, changed) {
    this.element = element;
    this.changed = changed;
    this.join = make("select", { "aria-label": "Match", on: { change: changed } }, make("option", { value: "and" }, "all of"), make("option", { value: "or" }, "any of"));
    this.lead = make("p", { class: "join" }, "Match ", this.join);
  }

  /** Take up a collection's columns; rows of columns it does not have go. */
  use(columns) {
    this.#columns = [...columns].sort((a, b) => RARELY_FILTERED.includes(a.name) - RARELY_FILTERED.includes(b.name));
    this.#seen.clear();
    const rows = this.#rows();
    for (const row of rows) {
      const column = row.querySelector("[name=column]");
      const { value } = column;
      column.replaceChildren(...this.#choices());
      column.value = value;
      if (column.value !== value) row.remove();
    }
    this.#settle();
    if (this.#rows().length < rows.length) this.changed();
  }

  /** Take note of values that documents of an answer have: they are offered where a value is typed. */
  offer(hits) {
    for (const { metadata } of hits) {
      for (const [name, value] of Object.entries(metadata)) {
        if (value === null || value === "" || typeof value === "object") continue;
        if (!this.#seen.has(name)) this.#seen.set(name, new Set());
        if (this.#seen.get(name).size < MAX_OFFERED) this.#seen.get(name).add(String(value));
      }
    }
  }

  /** Add a row; without a value it waits for one. */
  add({ key = this.#columns[0]?.name, type = "eq", value = "" } = {}) {
    if (!this.#columns.some((column) => column.name === key)) return;
    const row = make("div", { class: "filter" });
    const column = make("select", { name: "column", "aria-label": "Column" }, ...this.#choices());
    const comparison = make("select", { name: "comparison", "aria-label": "Comparison" });
    const input = make("input", { name: "value", "aria-label": "Value", value: Array.isArray(value) ? value.join(", ") : String(value), spellcheck: "false", dir: "auto" });
    const offered = make("datalist", { id: `values-${(this.#number += 1)}` });
    input.setAttribute("list", offered.id);
    input.addEventListener("focus", () => offered.replaceChildren(...[...(this.#seen.get(column.value) ?? [])].sort().map((each) => make("option", { value: each }))));
    const fit = () => {
      const isBoolean = this.#typeOf(column.value) === "bool";
      const shown = isBoolean ? OF_BOOLEANS : Object.keys(COMPARISONS);
      const chosen = shown.includes(comparison.value) ? comparison.value : shown.includes(type) ? type : "eq";
      comparison.replaceChildren(...shown.map((name) => make("option", { value: name }, COMPARISONS[name])));
      comparison.value = chosen;
      input.placeholder = placeholder(this.#typeOf(column.value), chosen);
    };
    column.value = key;
    fit();
    const touched = () => (fit(), this.changed());
    column.addEventListener("change", touched);
    comparison.addEventListener("change", touched);
    input.addEventListener("input", this.changed);
    const remove = make("button", { class: "quiet icon", type: "button", "aria-label": "Remove this filter", on: { click: () => this.#remove(row) } }, "×");
    const complaint = make("p", { class: "complaint", id: `complaint-${this.#number}` });
    input.setAttribute("aria-describedby", complaint.id);
    row.append(column, comparison, input, remove, offered, complaint);
    this.element.append(row);
    this.#settle();
    if (value === "") input.focus();
    else this.changed();
  }

  clear() {
    this.element.replaceChildren();
  }

  /** Return the tree of all rows that have a value, null where there is none; a row whose value does not fit its column is marked. */
  tree() {
    const leaves = this.#rows().map((row) => this.#leaf(row)).filter((leaf) => leaf !== null);
    if (leaves.length <= 1) return leaves[0] ?? null;
    return { type: this.join.value, filters: leaves };
  }

  /** Set rows and how they are joined from a tree, and say whether they are that tree: one that was not made here may hold more. */
  restore(tree) {
    this.clear();
    const isJoined = Array.isArray(tree?.filters);
    this.join.value = isJoined && tree.type === "or" ? "or" : "and";
    const leaves = isJoined ? tree.filters : tree === null ? [] : [tree];
    for (const leaf of leaves) this.add(leaf);
    const isSingle = isJoined && leaves.length === 1 && (tree.type === "and" || tree.type === "or");
    return inOrder(this.tree()) === inOrder(isSingle ? leaves[0] : tree);
  }

  #choices() {
    return this.#columns.map(({ name }) => make("option", { value: name }, name));
  }

  #rows() {
    return [...this.element.querySelectorAll(".filter")];
  }

  #typeOf(name) {
    return this.#columns.find((column) => column.name === name)?.type ?? "string";
  }

  #leaf(row) {
    const [key, type, text] = ["column", "comparison", "value"].map((name) => row.querySelector(`[name=${name}]`).value);
    const input = row.querySelector("[name=value]");
    const complaint = row.querySelector(".complaint");
    input.removeAttribute("aria-invalid");
    complaint.textContent = "";
    if (text.trim() === "") return null;
    const isList = type === "in" || type === "nin";
    const values = (isList ? text.split(",").map((part) => part.trim()).filter(Boolean) : [text.trim()]).map((part) => typed(part, this.#typeOf(key)));
    if (values.includes(undefined) || !values.length) {
      input.setAttribute("aria-invalid", "true");
      complaint.textContent = `${key} takes ${placeholder(this.#typeOf(key), type)}: left out until it fits.`;
      return null;
    }
    return { type, key, value: isList ? values : values[0] };
  }

  #remove(row) {
    row.remove();
    this.#settle();
    this.changed();
  }

  #settle() {
    if (this.#rows().length > 1) this.element.prepend(this.lead);
    else this.lead.remove();
  }
}

/** Write a tree so that equal ones are equal, whatever the order of their names. */
const inOrder = (tree) => JSON.stringify(tree, ["type", "key", "value", "filters"]);

const isInteger = (type) => /^u?int\d/.test(type);
const isNumber = (type) => isInteger(type) || /^(half_?)?float|^double/.test(type);

/** Return a value as its column has it, undefined where it cannot be one. */
function typed(text, type) {
  if (type === "bool") return { true: true, false: false }[text.toLowerCase()];
  if (!isNumber(type)) return text;
  const number = Number(text);
  return isInteger(type) ? (Number.isSafeInteger(number) ? number : undefined) : Number.isFinite(number) ? number : undefined;
}

function placeholder(type, comparison) {
  const one = type === "bool" ? "true or false" : isInteger(type) ? "a whole number" : isNumber(type) ? "a number" : /^(timestamp|date)/.test(type) ? "2026-01-31" : "a value";
  return comparison === "in" || comparison === "nin" ? `${one}, another` : one;
}
