// Which words of a passage and a title answered the question, as the answer names them.
//
// Spans count code points, as Python does; JavaScript's strings count UTF-16 units.

import { make } from "./dom.js";

/** Return where in `text` each of the ascending code point offsets lies, in UTF-16 units. */
export function unitsOf(text, offsets) {
  const units = [];
  let unit = 0;
  let point = 0;
  for (const offset of offsets) {
    for (; point < offset && unit < text.length; point += 1) unit += text.codePointAt(unit) > 0xffff ? 2 : 1;
    units.push(unit);
  }
  return units;
}

/** Return a stretch of a document, from its character `first` to `last`, as text and marked words in order. */
export function markedWords(text, first, last, highlights, shown = (piece) => piece) {
  const inside = highlights.filter((each) => first <= each.start_char && each.end_char <= last);
  const units = unitsOf(text, inside.flatMap((each) => [each.start_char - first, each.end_char - first]));
  const pieces = [];
  let done = 0;
  for (const [index, { query_words: words }] of inside.entries()) {
    const [start, end] = units.slice(2 * index, 2 * index + 2);
    if (start < done) continue;
    pieces.push(shown(text.slice(done, start)), make("b", { class: "word", title: `Answers: ${words.join(", ")}` }, text.slice(start, end)));
    done = end;
  }
  return [...pieces, shown(text.slice(done))];
}

/** Name the words of a passage and its document's title that were found, strongest first, each once and with the query's own where they differ. */
export function foundBy({ text, start_char: first, highlights, title_highlights: ofTitle }, title) {
  const found = [
    ...highlights.map((each) => ({ ...each, word: wordAt(text, first, each), place: "" })),
    ...ofTitle.map((each) => ({ ...each, word: wordAt(title, 0, each), place: "title" })),
  ];
  const named = new Map();
  for (const { word, query_words: asked, place } of found.sort((a, b) => b.weight - a.weight)) {
    const name = word.toLowerCase();
    const others = asked.filter((each) => each.toLowerCase() !== name).join(", ");
    const notes = [others, place].filter(Boolean).join("; ");
    if (!named.has(name)) named.set(name, notes ? `${word} (${notes})` : word);
  }
  return [...named.values()];
}

const wordAt = (text, first, { start_char: start, end_char: end }) => [...text].slice(start - first, end - first).join("");

/** The words of a title that were found by any of a document's passages, in order. */
export const titleHighlights = ({ passages }) =>
  passages.flatMap((passage) => passage.title_highlights).sort((a, b) => a.start_char - b.start_char);
