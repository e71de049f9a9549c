// A document with the passages of a hit marked where they stand.
//
// Spans count code points, as Python does; JavaScript's strings count UTF-16 units. Of a long text one stretch is read at a time.

import { documentPath, get } from "./api.js";
import { make } from "./dom.js";
import { count, digits, score, valueOf } from "./formats.js";
import { markedWords, titleHighlights, unitsOf } from "./words.js";

const STRETCH = 200_000;
const LEAD = 20_000;
const LINES_ABOVE_PIXELS = 60;

/** Cut a text at its passages' ends; `first` is the offset of its first character. Gives [{text, start, end, passages}] in order. */
export function segmentsOf(text, first, last, passages) {
  const inside = (offset) => Math.min(Math.max(offset, first), last);
  const ends = passages.flatMap((passage) => [inside(passage.start_char), inside(passage.end_char)]);
  const cuts = [...new Set([first, ...ends, last])].sort((a, b) => a - b);
  const units = unitsOf(text, cuts.map((cut) => cut - first));
  return cuts.slice(1).map((end, index) => {
    const start = cuts[index];
    const covering = passages.flatMap((passage, rank) => (passage.start_char <= start && end <= passage.end_char ? [rank] : []));
    return { text: text.slice(units[index], units[index + 1]), start, end, passages: covering };
  });
}

export class Reader {
  #request = null;
  #hit = null;
  #active = 0;
  #types = new Map();

  /** Whether documents may be deleted. */
  canDelete = false;

  /** `close()` is called to leave, `remove(id, title)` to delete, `moved()` when another document or passage is shown, `fail(error)` when none can be. */
  constructor(element, { close, remove, moved, fail }) {
    Object.assign(this, { element, close, remove, moved, fail });
    this.reset();
  }

  get isOpen() {
    return this.#hit !== null;
  }

  /** The document that is open and the number of its passage, null where none is. */
  get place() {
    return this.#hit && { id: this.#hit.doc_id, passage: this.#active };
  }

  reset() {
    this.#request?.abort();
    this.#hit = null;
    this.title = "";
    this.shown = null;
    this.element.replaceChildren(make("p", { class: "empty" }, "Open a document to read it here, with the passages that were found marked in its text."));
  }

  /** Read a hit's document and go to one of its passages; `types` has the types of columns. */
  async open(collection, types, hit, active) {
    this.#types = types;
    this.#active = Math.max(0, Math.min(active, hit.passages.length - 1));
    const first = hit.passages[this.#active]?.start_char ?? 0;
    await this.#read(collection, hit, first + LEAD < STRETCH ? 0 : first - LEAD);
  }

  /** Go to the next passage, or the one before, of the text that is shown. */
  step(by) {
    const found = this.#hit?.passages.length ?? 0;
    if (!found || this.shown === null) return;
    this.#active = (this.#active + by + found) % found;
    const { collection, start, end } = this.shown;
    const passage = this.#hit.passages[this.#active];
    this.moved();
    if (passage.start_char >= start && passage.start_char < end) this.#goToPassage();
    else this.#read(collection, this.#hit, passage.start_char - LEAD);
  }

  async #read(collection, hit, start) {
    this.#request?.abort();
    const request = (this.#request = new AbortController());
    this.#hit = hit;
    this.shown = null;
    this.element.setAttribute("aria-busy", "true");
    const asked = document.activeElement;
    try {
      const text = await get(`${documentPath(collection, hit.doc_id)}?start_char=${Math.max(0, start)}&max_characters=${STRETCH}`, request.signal);
      const isElsewhere = asked.matches("input, select") || (![asked, document.body].includes(document.activeElement) && !this.element.contains(document.activeElement));
      this.#show(collection, hit, text);
      this.moved();
      if (!isElsewhere) this.element.querySelector("h2").focus({ preventScroll: true });
    } catch (error) {
      if (request.signal.aborted) return;
      this.reset();
      this.moved();
      this.fail(error);
    } finally {
      if (this.#request === request) this.element.removeAttribute("aria-busy");
    }
  }

  #show(collection, hit, found) {
    this.shown = { collection, start: found.start_char, end: found.end_char };
    this.title = found.title || found.doc_id;
    const segments = segmentsOf(found.text, found.start_char, found.end_char, hit.passages);
    const text = make(
      "div",
      { class: "text", role: "region", tabindex: "0", "aria-label": "Text" },
      ...segments.map(({ text: piece, start, end, passages }) =>
        passages.length ? make("mark", { data: { start, end, passages: passages.join(" ") } }, ...markedWords(piece, start, end, highlightsOf(hit, passages))) : piece,
      ),
    );
    this.element.replaceChildren(
      make(
        "div",
        { class: "reader-head" },
        make("button", { class: "quiet icon", type: "button", "aria-label": "Close the document", on: { click: () => this.close() } }, "×"),
        this.canDelete ? make("button", { class: "quiet delete", type: "button", on: { click: () => this.remove(found.doc_id, found.title || found.doc_id) } }, "Delete") : null,
        make("h2", { tabindex: "-1", dir: "auto", title: this.title }, ...markedWords(this.title, 0, Infinity, found.title ? titleHighlights(hit) : [])),
        make("p", { class: "id", title: found.doc_id }, found.doc_id),
        make("p", { class: "facts", title: facts(found, this.#types) }, facts(found, this.#types)),
        this.#passageSteps(hit),
      ),
      ...this.#stretchNotice(collection, hit, found),
      text,
    );
    if (!this.#goToPassage()) this.element.scrollTop = 0;
  }

  #passageSteps(hit) {
    if (!hit.passages.length) return null;
    const step = (by, label, sign) => make("button", { class: "quiet icon", type: "button", "aria-label": label, on: { click: () => this.step(by) } }, sign);
    this.where = make("span", { role: "status" });
    return make("div", { class: "steps" }, step(-1, "Passage before", "↑"), this.where, step(1, "Next passage", "↓"));
  }

  #stretchNotice(collection, hit, found) {
    if (found.start_char === 0 && found.end_char === found.num_characters) return [];
    const turn = (start, label) => make("button", { class: "quiet", type: "button", on: { click: () => this.#read(collection, hit, start) } }, label);
    return [
      make(
        "p",
        { class: "stretch" },
        `Characters ${digits(found.start_char)} to ${digits(found.end_char)} of ${digits(found.num_characters)} `,
        found.start_char > 0 ? turn(found.start_char - STRETCH, "Earlier") : null,
        found.end_char < found.num_characters ? turn(found.end_char, "Later") : null,
      ),
    ];
  }

  #goToPassage() {
    const passage = this.#hit.passages[this.#active];
    if (!passage) return false;
    this.where.textContent = `passage ${this.#active + 1} of ${this.#hit.passages.length} · ${passage.page ? `${passage.page} · ` : ""}score ${score(passage.score)}`;
    const marks = [...this.element.querySelectorAll("mark")];
    for (const mark of marks) mark.classList.toggle("active", mark.dataset.passages.split(" ").includes(String(this.#active)));
    const first = marks.find((mark) => mark.classList.contains("active"));
    this.element.style.scrollPaddingTop = `${this.element.querySelector(".reader-head").offsetHeight + LINES_ABOVE_PIXELS}px`;
    first?.scrollIntoView({ block: "start" });
    return first !== undefined;
  }
}

/** The highlights of some of a hit's passages, in the order of the text. */
function highlightsOf(hit, passages) {
  return passages.flatMap((rank) => hit.passages[rank].highlights).sort((a, b) => a.start_char - b.start_char);
}

function facts({ metadata, num_tokens: tokens, num_characters: characters }, types) {
  const known = Object.entries(metadata).filter(([, value]) => value !== null && value !== "");
  const said = known.map(([name, value]) => `${name} ${valueOf(value, types.get(name))}`);
  return [count(tokens, "token"), count(characters, "character"), ...said].join(" · ");
}
