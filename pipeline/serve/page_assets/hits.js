// The answer as a list: each document with what its score is made of, its metadata and its best passages.

import { make, score } from "./dom.js";
import { markedWords } from "./words.js";

const PARTS = [
  ["document", "document", "Cosine of the query and the document's vector"],
  ["chunk", "passage", "Cosine of the query and the best passage's vector"],
  ["bm25", "BM25", "BM25 of the whole document: the longest bar is the best of this answer"],
  ["passage_bm25", "passage BM25", "BM25 of its best passage: the longest bar is the best of this answer"],
  ["late", "words", "MaxSim: how well the words of the best passage, or of the title, answer those of the query"],
  ["rerank", "rerank", "The cross-encoder's score of the best passage, which ranks; bars reach from the least of this answer to the best"],
];

/** Fill the list; `open(hit, passage)` opens a document, `narrow(key, value)` asks for a filter. */
export function showHits(list, hits, { open, narrow, filterable }) {
  const spans = Object.fromEntries(PARTS.map(([part]) => [part, spanOf(part, hits.map((hit) => hit.scores[part]).filter((score) => score !== undefined))]));
  list.replaceChildren(...hits.map((hit, index) => hitItem(hit, index + 1, spans, { open, narrow, filterable })));
}

/** What the empty and the full bar of a part stand for: cosines have a scale of their own, other scores that of their answer. */
function spanOf(part, scores) {
  if (part === "rerank") return [Math.min(...scores), Math.max(...scores)];
  return [0, part.endsWith("bm25") ? Math.max(...scores, 1e-9) : 1];
}

function hitItem(hit, rank, spans, { open, narrow, filterable }) {
  const heading = make("button", { class: "open", type: "button", dir: "auto", title: hit.title, on: { click: () => open(hit, 0) } }, hit.title || hit.doc_id);
  return make(
    "li",
    { class: "hit", data: { id: hit.doc_id } },
    make(
      "div",
      { class: "hit-head" },
      make("span", { class: "rank", "aria-hidden": "true" }, rank),
      make("h2", {}, heading),
      make("span", { class: "total", title: "Score: ranks within this answer" }, make("span", { class: "unseen" }, "score "), score(hit.score)),
    ),
    make("div", { class: "id", title: hit.doc_id }, hit.doc_id),
    scoreBars(hit.scores, spans),
    metadata(hit.metadata, narrow, filterable),
    passageList(hit, open),
  );
}

function scoreBars(scores, spans) {
  const bars = PARTS.filter(([part]) => part in scores).map(([part, name, meaning]) => {
    const [empty, full] = spans[part];
    const share = full > empty ? Math.min(1, Math.max(0, (scores[part] - empty) / (full - empty))) : 1;
    const value = part.endsWith("bm25") ? scores[part].toFixed(1) : score(scores[part], 2);
    const fill = make("svg:rect", { width: (100 * share).toFixed(1), height: 6, rx: 3 });
    const bar = make("svg:svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" }, fill);
    return make("div", { class: "part", data: { part }, title: meaning }, make("dt", {}, name), make("dd", {}, bar, make("span", {}, value)));
  });
  return make("dl", { class: "parts", "aria-label": "Parts of the score" }, ...bars);
}

function metadata(values, narrow, filterable) {
  const shown = Object.entries(values).filter(([, value]) => value !== null && value !== "" && typeof value !== "object");
  if (!shown.length) return null;
  return make(
    "ul",
    { class: "metadata", "aria-label": "Metadata" },
    ...shown.map(([name, value]) => {
      const label = [make("span", { class: "name" }, name), " ", make("bdi", {}, String(value).slice(0, 60))];
      if (!filterable.has(name)) return make("li", {}, make("span", { class: "chip" }, ...label));
      const click = () => narrow(name, value);
      return make("li", {}, make("button", { class: "chip", type: "button", title: `Only documents with this ${name}`, on: { click } }, ...label));
    }),
  );
}

function passageList(hit, open) {
  if (!hit.passages.length) return null;
  return make(
    "ol",
    { class: "passages", "aria-label": "Passages" },
    ...hit.passages.map((passage, index) =>
      make(
        "li",
        {},
        make(
          "button",
          { class: "passage", type: "button", title: "Read it in its document", on: { click: () => open(hit, index) } },
          make("q", { dir: "auto" }, ...passageWords(passage)),
          make("span", { class: "place" }, `${passage.start_char}–${passage.end_char} · ${score(passage.score)}`),
        ),
      ),
    ),
  );
}

const onOneLine = (text) => text.replace(/\s+/gu, " ");

function passageWords({ text, start_char: start, end_char: end, highlights }) {
  const [first, ...others] = markedWords(text, start, end, highlights ?? [], onOneLine);
  return [typeof first === "string" ? first.trimStart() : first, ...others];
}

/** Move the focus among the hits' headings; returns false where there is none to move to. */
export function moveAmongHits(list, step) {
  const headings = [...list.querySelectorAll(".open")];
  const here = headings.indexOf(document.activeElement.closest?.(".hit")?.querySelector(".open"));
  const next = headings[here === -1 ? (step > 0 ? 0 : -1) : here + step];
  next?.focus();
  next?.closest(".hit").scrollIntoView({ block: "nearest" });
  return Boolean(next);
}
