// The answer as a list: each document with its best passage, the words that were found, and, on request, what its score is made of.

import { make } from "./dom.js";
import { excerpt, fitExcerpts } from "./excerpt.js";
import { digits, score, valueOf } from "./formats.js";
import { term } from "./term.js";
import { foundBy, markedWords, titleHighlights } from "./words.js";

const PARTS = [
  ["document", "document", "How near the document's vector is to the query's: their cosine, 1 at most."],
  ["chunk", "passage", "How near the best passage's vector is to the query's: their cosine, 1 at most."],
  ["bm25", "BM25", "How well the query's words are found in the whole document, rare words counting more. The longest bar is the best of this answer."],
  ["passage_bm25", "passage BM25", "How well the query's words are found in the best passage, rare words counting more. The longest bar is the best of this answer."],
  ["sparse", "sparse", "How well the best passage answers by the words that the sparse encoder reads into it and into the query. The longest bar is the best of this answer."],
  ["late", "words", "How well single words of the best passage, or of the title, answer those of the query (MaxSim)."],
  ["rerank", "rerank", "The cross-encoder's score of the best passage, which decides the order. Bars reach from the lowest of this answer to the best."],
];
const MAX_CHIPS = 4;
const MAX_VALUE_CHARACTERS = 60;

/** Fill the list; `open(hit, passage)` opens a document, `narrow(key, value)` asks for a filter; `types` has the columns that filters take. */
export function showHits(list, hits, { open, narrow, types }) {
  const spans = Object.fromEntries(PARTS.map(([part]) => [part, spanOf(part, hits.map((hit) => hit.scores[part]).filter((score) => score !== undefined))]));
  list.replaceChildren(...hits.map((hit, index) => hitItem(hit, index + 1, spans, { open, narrow, types })));
  fitExcerpts(list);
}

/** What the empty and the full bar of a part stand for: cosines have a scale of their own, other scores that of their answer. */
function spanOf(part, scores) {
  if (part === "rerank") return [Math.min(...scores), Math.max(...scores)];
  return [0, isSum(part) ? Math.max(...scores, 1e-9) : 1];
}

const isSum = (part) => part.endsWith("bm25") || part === "sparse";

function hitItem(hit, rank, spans, { open, narrow, types }) {
  const heading = make("button", { class: "open", type: "button", dir: "auto", title: hit.title, on: { click: () => open(hit, 0) } }, ...titleOf(hit));
  const chips = metadata(hit.metadata, narrow, types);
  const [best, ...others] = hit.passages.map((passage, index) => passageItem(passage, hit.title, () => open(hit, index)));
  const details = make("div", { class: "details", id: `details-${rank}`, hidden: true }, scoreBars(hit.scores, spans), chipList(chips.slice(MAX_CHIPS)));
  const more = make("ol", { class: "passages more", id: `more-${rank}`, "aria-label": "Further passages", hidden: true }, ...others);
  const total = [make("span", { class: "unseen" }, "Score "), score(hit.score)];
  return make(
    "li",
    { class: "hit", data: { id: hit.doc_id } },
    make("div", { class: "hit-head" }, make("span", { class: "rank", "aria-hidden": "true" }, rank), make("h2", {}, heading), unfolds(details, "total", "What the score is made of", ...total)),
    make("div", { class: "id", title: hit.doc_id }, hit.doc_id),
    details,
    best ? make("ol", { class: "passages", "aria-label": "Best passage" }, best) : null,
    more,
    chips.length || others.length ? make("div", { class: "hit-foot" }, others.length ? unfolds(more, "chip", null, `${others.length} more`) : null, chipList(chips.slice(0, MAX_CHIPS))) : null,
  );
}

const titleOf = (hit) => (hit.title ? markedWords(hit.title, 0, Infinity, titleHighlights(hit)) : [hit.doc_id]);

/** A button that shows an element and hides it again. */
function unfolds(element, className, title, ...label) {
  const button = make("button", { class: `${className} unfold`, type: "button", title, "aria-expanded": "false", "aria-controls": element.id }, ...label);
  button.addEventListener("click", () => {
    element.hidden = !element.hidden;
    button.setAttribute("aria-expanded", !element.hidden);
    fitExcerpts(element);
  });
  return button;
}

function scoreBars(scores, spans) {
  const bars = PARTS.filter(([part]) => part in scores).map(([part, name, meaning]) => {
    const [empty, full] = spans[part];
    const share = full > empty ? Math.min(1, Math.max(0, (scores[part] - empty) / (full - empty))) : 1;
    const value = isSum(part) ? scores[part].toFixed(1) : score(scores[part], 2);
    const fill = make("svg:rect", { width: (100 * share).toFixed(1), height: 6, rx: 3 });
    const bar = make("svg:svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", "aria-hidden": "true" }, fill);
    return make("div", { class: "part", data: { part } }, make("dt", {}, term(name, meaning)), make("dd", {}, bar, make("span", {}, value)));
  });
  return make("dl", { class: "parts", "aria-label": "Parts of the score" }, ...bars);
}

function metadata(values, narrow, types) {
  const shown = Object.entries(values).filter(([, value]) => value !== null && value !== "" && typeof value !== "object");
  return shown.map(([name, value]) => {
    const label = [make("span", { class: "name" }, name), " ", make("bdi", {}, valueOf(value, types.get(name)).slice(0, MAX_VALUE_CHARACTERS))];
    if (!types.has(name)) return make("li", {}, make("span", { class: "chip" }, ...label));
    const click = () => narrow(name, value);
    return make("li", {}, make("button", { class: "chip", type: "button", title: `Only documents with this ${name}`, on: { click } }, ...label));
  });
}

const chipList = (chips) => (chips.length ? make("ul", { class: "metadata", "aria-label": "Metadata" }, ...chips) : null);

function passageItem(passage, title, open) {
  const words = foundBy(passage, title);
  const place = `${passage.page ? `${passage.page} · ` : ""}characters ${digits(passage.start_char)}–${digits(passage.end_char)} · score ${score(passage.score)}`;
  return make(
    "li",
    {},
    make(
      "button",
      { class: "passage", type: "button", title: `Read it in its document: ${place}`, on: { click: open } },
      excerpt(passage),
      passage.page ? make("span", { class: "place" }, make("bdi", {}, passage.page)) : null,
      words.length ? make("span", { class: "found" }, "found by ", make("bdi", {}, words.join(", "))) : null,
    ),
  );
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
