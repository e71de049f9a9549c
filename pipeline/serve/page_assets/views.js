// The tabs: results, map, document, health. Where there is room for two, the results stay and the map stands beside them.

import { byId } from "./dom.js";

const VIEWS = ["find", "map", "document", "health"];

export class Views {
  #isWide = matchMedia("(min-width: 900px)");

  /** `shown()` is called when a view is shown, `chosen()` when one was chosen by its tab. */
  constructor(main, { shown, chosen }) {
    Object.assign(this, { main, told: shown, chosen });
    for (const name of VIEWS) byId(`tab-${name}`).addEventListener("click", () => this.#choose(name));
    byId("tabs").addEventListener("keydown", (event) => this.#press(event));
    this.#isWide.addEventListener("change", () => this.show(this.shown));
  }

  get shown() {
    return this.main.dataset.view;
  }

  /** The view as an address names it: "find" for what is shown without being chosen, and beside a document. */
  get address() {
    return this.shown === "document" || this.shown === this.#first ? "find" : this.shown;
  }

  get #first() {
    return this.#isWide.matches ? "map" : "find";
  }

  /** Show a view; one that there is not, and the results where they are shown anyway, is the first. */
  show(view) {
    this.main.dataset.view = VIEWS.includes(view) && view !== "find" ? view : this.#first;
    for (const name of VIEWS) {
      byId(`tab-${name}`).setAttribute("aria-selected", name === this.shown);
      byId(`tab-${name}`).tabIndex = name === this.shown ? 0 : -1;
    }
    this.told();
  }

  #choose(view) {
    this.show(view);
    this.chosen();
  }

  #press({ key }) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[key];
    if (!step) return;
    const tabs = VIEWS.filter((name) => byId(`tab-${name}`).offsetParent !== null);
    const next = tabs[(tabs.indexOf(this.shown) + step + tabs.length) % tabs.length];
    this.#choose(next);
    byId(`tab-${next}`).focus();
  }
}
