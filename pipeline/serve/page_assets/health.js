// How a collection is: counts, drift from its context, and the curve of length collapse.

import { collectionPath, get } from "./api.js";
import { CollectionPanel } from "./collection_panel.js";
import { make } from "./dom.js";
import { count, digits, moment, score } from "./formats.js";
import { term } from "./term.js";

const d3 = globalThis.d3;
const WORDS = { none: "is in step with its context", slight: "has drifted a little", "re-contextualise": "has drifted: give it a new context" };
const TILES = [
  ["documents", "documents", "What was ingested: rows of a table, or files."],
  ["chunks", "chunks", "Stretches of documents with a vector each. A search shows them as passages."],
  ["tokens", "tokens", "Pieces of words, as the model reads them: about four letters of English each."],
  ["clusters", "clusters", "Groups of documents whose vectors are alike. Only those that hold documents are counted."],
  ["vector_dim", "dimensions", "The length of a vector. More tell texts apart more finely and take more memory."],
  ["generation", "generation", "One complete state of the collection. Each ingest that changes something publishes the next."],
];
const LABEL_PIXELS = 30;
const [WIDEST, HEIGHT, LEFT, BOTTOM, TOP] = [600, 240, 40, 44, 14];

export class Health extends CollectionPanel {
  async load(collection, signal) {
    this.#show(await get(collectionPath(collection, "/health"), signal));
  }

  clear() {
    this.element.replaceChildren();
  }

  /** How wide a chart may be: text in it then has the size of other text, on a phone too. */
  #width() {
    const inside = this.element.clientWidth - 2 * parseFloat(getComputedStyle(this.element).paddingLeft);
    return inside > 0 ? Math.min(WIDEST, inside) : WIDEST;
  }

  #show(health) {
    const tile = ([field, name, meaning]) => make("div", { class: "tile" }, make("dd", {}, digits(health[field])), make("dt", {}, term(name, meaning)));
    this.element.replaceChildren(
      ...(health.is_outdated ? [make("p", { class: "notice" }, "A newer generation was published but is damaged; this older one answers.")] : []),
      make("h2", {}, "What it holds"),
      make("dl", { class: "tiles" }, ...TILES.map(tile)),
      make("p", { class: "note" }, `Published ${moment(health.created_at)}.`),
      ...drift(health),
      ...collapse(health.lengths, this.#width()),
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

function collapse(lengths, width) {
  const measured = lengths.filter((bin) => bin.cosine !== null);
  const heading = make("h2", {}, term("Length collapse", "Vectors of long documents tend to be alike, which makes them hard to tell apart in a search."));
  if (!measured.length) return [heading, make("p", { class: "note" }, "There are too few documents of any length to compare.")];
  return [
    heading,
    make("p", { class: "note" }, "The line is the mean cosine between two documents of a length. Where it climbs, long documents look alike. The bars show how many there are."),
    chart(lengths, measured, width),
    table(lengths),
  ];
}

function chart(lengths, measured, width) {
  const barWidth = Math.min(26, (0.7 * (width - LEFT)) / lengths.length);
  const x = d3.scalePoint(lengths.map((bin) => bin.min_tokens), [LEFT + 18, width - 18]);
  const highest = Math.max(0.5, Math.ceil(d3.max(measured, (bin) => bin.cosine) * 10) / 10);
  const y = d3.scaleLinear([Math.min(0, d3.min(measured, (bin) => bin.cosine)), highest], [HEIGHT - BOTTOM, TOP]);
  const bar = d3.scaleLinear([0, d3.max(lengths, (bin) => bin.documents)], [0, (HEIGHT - BOTTOM - TOP) * 0.7]);
  const s = (tag, attributes, ...children) => make(`svg:${tag}`, attributes, ...children);
  const lines = y.ticks(5).flatMap((tick) => [
    s("line", { class: "grid", x1: LEFT, x2: width, y1: y(tick), y2: y(tick) }),
    s("text", { class: "tick", x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" }, score(tick, 1)),
  ]);
  const bars = lengths.map((bin) => {
    const title = s("title", {}, `${span(bin)} tokens: ${count(bin.documents, "document")}`);
    return s("rect", { class: "bin", x: x(bin.min_tokens) - barWidth / 2, width: barWidth, y: y.range()[0] - bar(bin.documents), height: bar(bin.documents), rx: 3 }, title);
  });
  const every = x.step() < LABEL_PIXELS ? 2 : 1;
  const labels = lengths.filter((_, index) => index % every === 0).map((bin) => s("text", { class: "tick", x: x(bin.min_tokens), y: HEIGHT - BOTTOM + 18, "text-anchor": "middle" }, short(bin.min_tokens)));
  const path = d3.line((bin) => x(bin.min_tokens), (bin) => y(bin.cosine)).curve(d3.curveMonotoneX)(measured);
  const dots = measured.map((bin) => s("circle", { class: "dot", cx: x(bin.min_tokens), cy: y(bin.cosine), r: 4 }, s("title", {}, `${span(bin)} tokens: ${score(bin.cosine)}`)));
  const axis = s("text", { class: "tick", x: (LEFT + width) / 2, y: HEIGHT - 8, "text-anchor": "middle" }, "tokens of a document, at least");
  return s("svg", { class: "curve", viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true" }, ...lines, ...bars, s("path", { class: "line", d: path }), ...dots, ...labels, axis);
}

/** The same for those who do not see the picture. */
function table(lengths) {
  const row = (bin) => make("tr", {}, make("th", { scope: "row" }, span(bin)), make("td", {}, digits(bin.documents)), make("td", {}, bin.cosine === null ? "–" : score(bin.cosine)));
  const head = make("tr", {}, ...["tokens", "documents", "mean cosine"].map((name) => make("th", { scope: "col" }, name)));
  return make("details", { class: "figures" }, make("summary", {}, "Figures"), make("table", {}, make("thead", {}, head), make("tbody", {}, ...lengths.map(row))));
}

const short = (tokens) => (tokens < 1024 ? String(tokens) : `${tokens / 1024}k`);
const span = (bin) => `${digits(bin.min_tokens)}–${digits(bin.max_tokens)}`;
