// A passage in a few lines that show all its marked words: whole where they fit, else the sentences with these words,
// else parts of these sentences.
//
// How much fits is measured on the page. CSS cuts off what comes after the last line.

import { make } from "./dom.js";
import { markedWords, unitsOf } from "./words.js";

/** Units kept on both sides of a word where whole sentences do not fit, tried in this order. */
const REACHES = [80, 50, 35, 24, 16, 12, 8, 4, 0];
/** How much of a passage without marked words may be passed over to begin with a sentence. */
const MAX_SHARE_BEFORE_SENTENCE = 0.5;
const ELLIPSIS_PIXELS = 20;
const MID_SENTENCE = /^\s*(?:[\p{Ps}\p{Pi}"'`*_]*\p{Ll}|[\p{Pe}\p{Pf},;:.!?])/u;
/** A full stop that ends no sentence, by the rule of pipeline/encode/sentences.py: a letter, a short number or a word before it. */
const INSIDE_WORD = String.raw`\p{L}\p{M}\p{N}\p{Pd}'’`;
const SHORT_WORD = String.raw`\p{Lu}\p{Ll}{1,3}|\p{Ll}{2,3}`;
const SHORT_WORDS = new RegExp(String.raw`(?<![${INSIDE_WORD}])(?:${SHORT_WORD})(?:\.|(?![${INSIDE_WORD}]))`, "gu");
const ABBREVIATION = new RegExp(
  String.raw`(?<![${INSIDE_WORD}])(?:[\p{Lu}\p{Ll}]|(?<![.,])[0-9]{1,2}|(?<word>${SHORT_WORD}))\.(?!\s*?\n\s*?\n)\s+$`,
  "u",
);
const sentences = new Intl.Segmenter("en", { granularity: "sentence" });
const words = new Intl.Segmenter("en", { granularity: "word" });
const passages = new WeakMap();

/** Make the element of a passage, which `fitExcerpts` fills. */
export function excerpt(passage) {
  const element = make("q", { dir: "auto" });
  passages.set(element, passage);
  return element;
}

/** Fill the excerpts of an element. Those on the screen are shortened until their marked words can be seen. */
export function fitExcerpts(element) {
  let quotes = [...element.querySelectorAll("q")];
  const ways = new Map(quotes.map((quote) => [quote, waysToShow(passages.get(quote))]));
  while (quotes.length) {
    quotes = quotes.filter((quote) => show(quote, ways.get(quote).next())).filter(hidesWords);
  }
}

/** Fill the excerpts of an element again whenever its width changes, or it is shown again. */
export function keepExcerptsFitting(element) {
  let width = 0;
  const observer = new ResizeObserver(() => {
    if (element.clientWidth === width) return;
    width = element.clientWidth;
    requestAnimationFrame(() => fitExcerpts(element));
  });
  observer.observe(element);
}

function show(quote, { value: way, done }) {
  if (done) return false;
  const { text, start_char: start, highlights } = passages.get(quote);
  const charAt = (unit) => start + [...text.slice(0, unit)].length;
  const pieces = way.stretches.flatMap(({ first, last, ellipsis }) => [
    ellipsis,
    ...markedWords(text.slice(first, last), charAt(first), charAt(last), highlights, way.spaced),
  ]);
  quote.replaceChildren(...pieces);
  return true;
}

const asLines = (piece) => piece.replace(/[^\S\n]*\n(\s*\n)?/g, "\n");
const inOneLine = (piece) => piece.replace(/\s+/g, " ");

function hidesWords(quote) {
  const lines = [...quote.querySelectorAll("b")].at(-1)?.getClientRects() ?? [];
  if (!lines.length) return false;
  const word = lines[lines.length - 1];
  const box = quote.getBoundingClientRect();
  if (word.bottom > box.bottom + 1) return true;
  const isOnLastLine = word.bottom > box.bottom - word.height;
  const after = quote.matches(":dir(rtl)") ? word.left - box.left : box.right - word.right;
  return isOnLastLine && quote.scrollHeight > quote.clientHeight + 1 && after < ELLIPSIS_PIXELS;
}

/**
 * Give ways to show a passage, from all of it to little more than its marked words.
 *
 * A way is {stretches: [{first, last, ellipsis}], spaced}: places in UTF-16 units, and what sets the white space.
 */
function* waysToShow({ text, start_char: start, highlights }) {
  const starts = sentenceStarts(text, start);
  const begin = (unit) => starts.findLast((each) => each <= unit) ?? 0;
  const end = (unit) => starts.find((each) => each >= unit) ?? text.length;
  const way = (spaced, ends) => ({ stretches: joined(ends, text, starts), spaced });
  const units = unitsOf(text, highlights.flatMap((each) => [each.start_char - start, each.end_char - start]));
  const marked = highlights.map((_, index) => units.slice(2 * index, 2 * index + 2));
  const firstMarked = marked[0]?.[0] ?? MAX_SHARE_BEFORE_SENTENCE * text.length;
  yield way(asLines, [[starts[0] <= firstMarked ? starts[0] : 0, text.length]]);
  if (!marked.length) return;
  yield way(asLines, [[begin(firstMarked), text.length]]);
  yield way(inOneLine, marked.map(([first, last]) => [begin(first), end(last)]));
  const breaks = [...words.segment(text)].map(({ index }) => index);
  const before = (unit) => breaks.findLast((each) => each <= unit) ?? 0;
  const after = (unit) => breaks.find((each) => each >= unit) ?? text.length;
  for (const reach of REACHES) {
    const around = ([first, last]) => [
      Math.max(begin(first), before(first - reach)),
      Math.min(end(last), after(last + reach)),
    ];
    yield way(inOneLine, marked.map(around));
  }
}

/** Where sentences seem to begin. A line break alone ends no sentence, as texts come wrapped; an empty line does. */
function sentenceStarts(text, start) {
  const unwrapped = text.replace(/(?<!\n)\n(?!\n)/g, " ");
  const short = text.match(SHORT_WORDS) ?? [];
  const count = (word) => short.filter((each) => each === word).length;
  const isAfterAbbreviation = (index) => {
    const found = ABBREVIATION.exec(text.slice(0, index));
    const word = found?.groups.word;
    const mayEndSentence = word === word?.toLowerCase() && !/^\d/.test(text.slice(index));
    return found && (!word || count(`${word}.`) > count(word) + mayEndSentence);
  };
  const begins = ({ index }) =>
    (index === 0 && start === 0) || !(MID_SENTENCE.test(text.slice(index)) || isAfterAbbreviation(index));
  return [...sentences.segment(unwrapped)].filter(begins).map(({ index }) => index);
}

/** Join stretches with only white space between them, and trim all; the last one goes to the end of the text. */
function joined(ends, text, starts) {
  const apart = [];
  for (const [first, last] of ends) {
    const before = apart.at(-1);
    if (before && !text.slice(before.last, first).trim()) before.last = Math.max(before.last, last);
    else apart.push({ first, last, ellipsis: apart.length ? " … " : starts.includes(first) ? "" : "… " });
  }
  apart.at(-1).last = text.length;
  return apart.map(({ first, last, ellipsis }) => {
    const shown = text.slice(first, last);
    const from = first + shown.length - shown.trimStart().length;
    return { first: from, last: from + shown.trim().length, ellipsis };
  });
}
