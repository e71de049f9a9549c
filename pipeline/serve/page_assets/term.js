// A word that is explained where it stands: a button that opens a sentence, by pointer, finger or key; Esc closes it.

import { make } from "./dom.js";

const GAP_PIXELS = 6;
let number = 0;

/** Make a word, or several, that open what they mean: a sentence, or elements. */
export function term(word, ...meaning) {
  number += 1;
  const bubble = make("span", { class: "meaning", id: `meaning-${number}`, popover: "auto" }, ...meaning);
  const button = make("button", { class: "term", type: "button", popovertarget: bubble.id }, word);
  const place = () => {
    const { left, top, bottom } = button.getBoundingClientRect();
    const below = bottom + GAP_PIXELS;
    bubble.style.left = `${Math.max(GAP_PIXELS, Math.min(left, innerWidth - bubble.offsetWidth - GAP_PIXELS))}px`;
    bubble.style.top = `${below + bubble.offsetHeight > innerHeight ? Math.max(GAP_PIXELS, top - bubble.offsetHeight - GAP_PIXELS) : below}px`;
  };
  bubble.addEventListener("beforetoggle", place); // at once, while its size is still 0
  bubble.addEventListener("toggle", place);
  return make("span", { class: "explained" }, button, bubble);
}
