// How a collection is: counts, drift from its context, and the curve of length collapse.

import { collectionPath, get } from "./api.js";
import { CollectionPanel } from "./collection_panel.js";
import { count, digits, make, score } from "./dom.js";

const d3 = globalThis.d3;
const WORDS = { none: "is in step with its context", slight: "has drifted a little", "re-contextualise": "has drifted: give it a new context" };
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
    const tile = (value, name) => make("div", { class: "tile" }, make("dd", {}, value), make("dt", {}, name));
    this.element.replaceChildren(
      ...(health.is_outdated ? [make("p", { class: "notice" }, "A newer generation was published but is damaged; this older one answers.")] : []),
      make("h2", {}, "What it holds"),
      make(
        "dl",
        { class: "tiles" },
        tile(digits(health.documents), "documents"),
        tile(digits(health.chunks), "chunks"),
        tile(digits(health.tokens), "tokens"),
        tile(digits(health.clusters), "clusters"),
        tile(digits(health.vector_dim), "dimensions"),
        tile(digits(health.generation), "generation"),
      ),
      make("p", { class: "note" }, `Published ${when(health.created_at)}.`),
      ...drift(health),
      ...collapse(health.lengths, this.#width()),
    );
  }
}

const when = (text) => {
  const date = new Date(text);
  return Number.isNaN(date.valueOf()) ? text : date.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
};

const percent = (share) => `${(100 * share).toFixed(share && share < 0.1 ? 1 : 0)} %`;

function drift({ drift: found, uses_context: isRead, context_documents: drawn }) {
  if (!found) return [];
  const gauge = (share, name, meaning) =>
    make(
      "div",
      { class: "gauge", title: meaning },
      make("dt", {}, name),
      make("dd", {}, make("meter", { min: 0, max: 1, low: 0.05, high: 0.2, optimum: 0, value: share, "aria-label": name }), make("span", {}, percent(share))),
    );
  return [
    make("h2", {}, "Drift"),
    make("p", { class: `verdict ${found.verdict}` }, make("strong", {}, `The corpus ${WORDS[found.verdict]}.`)),
    make(
      "dl",
      { class: "gauges" },
      gauge(found.total_variation, "documents in other clusters", "Total variation between the clusters' sizes then and now"),
      gauge(found.added_share, "documents added since", "Net of deletions"),
    ),
    make("p", { class: "note" }, `The context is ${count(drawn, "document")}${isRead ? ", read with every text" : "; this encoder does not read it"}.`),
  ];
}

function collapse(lengths, width) {
  const measured = lengths.filter((bin) => bin.cosine !== null);
  const heading = make("h2", {}, "Length collapse");
  if (!measured.length) return [heading, make("p", { class: "note" }, "There are too few documents of any length to compare.")];
  return [
    heading,
    make("p", { class: "note" }, "Mean cosine between documents of a length. A line that climbs says that long documents look alike and are told apart badly; grey bars are how many there are."),
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
