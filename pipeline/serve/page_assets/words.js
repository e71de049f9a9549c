// Words of a passage that answered words of the query, marked where they stand.

import { make } from "./dom.js";

/** Return where in `text` each of the ascending code point offsets lies, in UTF-16 units: JavaScript counts those, Python code points. */
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
