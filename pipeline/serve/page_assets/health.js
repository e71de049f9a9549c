// How a collection is: its counts and its drift from its context.

import { collectionPath, get } from "./api.js";
import { CollectionPanel } from "./collection_panel.js";
import { make } from "./dom.js";
import { count, digits, moment } from "./formats.js";
import { term } from "./term.js";

const WORDS = { none: "is in step with its context", slight: "has drifted a little", "re-contextualise": "has drifted: give it a new context" };
const TILES = [
  ["documents", "documents", "What was ingested: rows of a table, or files."],
  ["chunks", "chunks", "Stretches of documents with a vector each. A search shows them as passages."],
  ["tokens", "tokens", "Pieces of words, as the model reads them: about four letters of English each."],
  ["clusters", "clusters", "Groups of documents whose vectors are alike. Only those that hold documents are counted."],
  ["vector_dim", "dimensions", "The length of a vector. More tell texts apart more finely and take more memory."],
  ["generation", "generation", "One complete state of the collection. Each ingest that changes something publishes the next."],
];

export class Health extends CollectionPanel {
  async load(collection, signal) {
    this.#show(await get(collectionPath(collection, "/health"), signal));
  }

  clear() {
    this.element.replaceChildren();
  }

  #show(health) {
    const tile = ([field, name, meaning]) => make("div", { class: "tile" }, make("dd", {}, digits(health[field])), make("dt", {}, term(name, meaning)));
    this.element.replaceChildren(
      ...(health.is_outdated ? [make("p", { class: "notice" }, "A newer generation was published but is damaged; this older one answers.")] : []),
      make("h2", {}, "What it holds"),
      make("dl", { class: "tiles" }, ...TILES.map(tile)),
      make("p", { class: "note" }, `Published ${moment(health.created_at)}.`),
      ...drift(health),
    );
  }
}

const percent = (share) => `${(100 * share).toFixed(share && share < 0.1 ? 1 : 0)} %`;

function drift({ drift: found, uses_context: isRead, context_documents: drawn }) {
  if (!found) return [];
  const gauge = (share, name, meaning) =>
    make(
      "div",
      { class: "gauge" },
      make("dt", {}, term(name, meaning)),
      make("dd", {}, make("meter", { min: 0, max: 1, low: 0.05, high: 0.2, optimum: 0, value: share, "aria-label": name }), make("span", {}, percent(share))),
    );
  return [
    make("h2", {}, term("Drift", "How far the documents of today are from those that the context and the clusters were made of.")),
    make("p", { class: `verdict ${found.verdict}` }, make("strong", {}, `The corpus ${WORDS[found.verdict]}.`)),
    make(
      "dl",
      { class: "gauges" },
      gauge(found.total_variation, "documents in other clusters", "The share of documents that would have to change their cluster to restore the sizes of then (total variation)."),
      gauge(found.added_share, "documents added since", "Documents gained since the context was made, less those deleted, as a share of those of today."),
    ),
    make("p", { class: "note" }, "The ", term("context", "Documents that stand for the whole collection. The encoder reads them with each text, so that a vector says what sets the text apart here."), ` is ${count(drawn, "document")}${isRead ? ", read with every text" : "; this encoder does not read it"}.`),
  ];
}
