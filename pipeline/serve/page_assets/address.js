// What is asked and what is open, in the address behind #, which no server sees.

/** Return the state an address stands for; `filters` is JSON, "null" for none. */
export function readAddress(hash) {
  const found = new URLSearchParams(hash.slice(1));
  return {
    collection: found.get("collection") ?? "",
    query: found.get("q") ?? "",
    granularity: found.get("granularity") ?? "both",
    hybrid: found.get("bm25") !== "off",
    words: found.get("words") !== "off",
    rerank: found.get("rerank") === "on",
    filters: found.get("filters") ?? "null",
    view: found.get("view") ?? "find",
    document: found.has("doc") ? { id: found.get("doc"), passage: Math.max(1, Number.parseInt(found.get("passage"), 10) || 1) - 1 } : null,
  };
}

/** Set the address; `isStep` makes it a step that Back undoes. */
export function writeAddress(state, { isStep = false } = {}) {
  const written = new URLSearchParams({ collection: state.collection, q: state.query });
  if (state.granularity !== "both") written.set("granularity", state.granularity);
  if (!state.hybrid) written.set("bm25", "off");
  if (!state.words) written.set("words", "off");
  if (state.rerank) written.set("rerank", "on");
  if (state.filters !== "null") written.set("filters", state.filters);
  if (state.view !== "find") written.set("view", state.view);
  if (state.document) written.set("doc", state.document.id);
  if (state.document?.passage) written.set("passage", state.document.passage + 1);
  if (isStep) history.pushState(null, "", `#${written}`);
  else history.replaceState(null, "", `#${written}`);
}

/** Whether two states ask the same, whatever is open beside the answer. */
export function asksTheSame(one, other) {
  const question = ({ view, document, ...asked }) => JSON.stringify(asked);
  return question(one) === question(other);
}
