// Which words of a passage answered the question, and where a passage is begun to be shown.
//
// Spans count code points, as Python does; JavaScript's strings count UTF-16 units.

import { make } from "./dom.js";

/** Words that say nothing of what was found; those of `pipeline/index/words.py`. */
export const STOP_WORDS = new Set(
  "a an and are as at be but by for if in into is it no not of on or such that the their then there these they this to was will with".split(" "),
);
const WORD = /[\p{L}\p{N}_]+/gu;
/** How much of a passage may be passed over to begin with a sentence. */
const MAX_SHARE_BEFORE_SENTENCE = 0.5;
const MID_SENTENCE = /^\s*(?:[\p{Ps}\p{Pi}"'`*_]*\p{Ll}|[\p{Pe}\p{Pf},;:.!?])/u;
const sentences = new Intl.Segmenter("en", { granularity: "sentence" });

const isTelling = (word) => !STOP_WORDS.has(word.toLowerCase());
const points = (text) => [...text].length;

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

/** Return the words of a passage that answered words of the query, in order: those that the server names, else those that both have. */
export function tellingWords(passage, query) {
  if (passage.highlights?.length) {
    const telling = passage.highlights.map((each) => ({ ...each, query_words: each.query_words.filter(isTelling) }));
    const wordOf = wordsOf(passage);
    return telling.filter((each) => each.query_words.length && isTelling(wordOf(each)));
  }
  const asked = new Map((query.match(WORD) ?? []).filter(isTelling).map((word) => [word.toLowerCase(), word]));
  return [...passage.text.matchAll(WORD)]
    .filter(([word]) => asked.has(word.toLowerCase()))
    .map(({ 0: word, index }) => {
      const start = passage.start_char + points(passage.text.slice(0, index));
      return { start_char: start, end_char: start + points(word), weight: 0, query_words: [asked.get(word.toLowerCase())] };
    });
}

/** Name the words of a passage that were found, strongest first, each once and with the query's own where they differ. */
export function foundBy(passage) {
  const wordOf = wordsOf(passage);
  const named = new Map();
  for (const each of passage.highlights.toSorted((a, b) => b.weight - a.weight)) {
    const word = wordOf(each);
    const others = each.query_words.filter((asked) => asked.toLowerCase() !== word.toLowerCase());
    if (!named.has(word.toLowerCase())) named.set(word.toLowerCase(), others.length ? `${word} (${others.join(", ")})` : word);
  }
  return [...named.values()];
}

function wordsOf({ text, start_char: start }) {
  const characters = [...text];
  return ({ start_char: first, end_char: end }) => characters.slice(first - start, end - start).join("");
}

/**
 * Return how many units of a passage to pass over so that what is shown begins with a sentence: 0 where it seems to begin with one, or
 * where none begins in its first half. A line break alone ends no sentence, as texts come wrapped; an empty line does.
 */
export function unitsBeforeSentence({ text, start_char: start }) {
  if (start === 0 || !MID_SENTENCE.test(text)) return 0;
  const unwrapped = text.replace(/(?<!\n)\n(?!\n)/g, " ");
  for (const { index } of sentences.segment(unwrapped)) {
    if (index > MAX_SHARE_BEFORE_SENTENCE * text.length) return 0;
    if (index > 0 && !MID_SENTENCE.test(text.slice(index))) return index;
  }
  return 0;
}
