// The clusters as a list beside the map: colour, name, size. One that is pressed stands out on the map until it is pressed again.

import { make } from "./dom.js";
import { count, digits } from "./formats.js";

export class Legend {
  #buttons = new Map();

  /** `choose(cluster)` is called with the cluster that is to stand out, or null. `toggle` is the button that shows the list. */
  constructor({ choose }) {
    this.choose = choose;
    this.list = make("ul", { class: "legend", id: "legend", "aria-label": "Clusters", hidden: true });
    this.toggle = make("button", { class: "quiet", id: "legend-toggle", type: "button", "aria-controls": "legend", hidden: true, on: { click: () => this.#open(this.list.hidden) } }, "Clusters");
    this.#open(false);
  }

  #open(isOpen) {
    this.list.hidden = !isOpen;
    this.toggle.setAttribute("aria-expanded", isOpen);
  }

  /** Show clusters, largest first. */
  show(clusters, names) {
    this.toggle.hidden = clusters.length < 2;
    if (this.toggle.hidden) this.#open(false);
    this.#buttons = new Map(
      clusters.map(({ cluster, documents }) => {
        const swatch = make("svg:svg", { viewBox: "0 0 10 10", "aria-hidden": "true", data: { cluster } }, make("svg:circle", { cx: 5, cy: 5, r: 5 }));
        const size = make("span", { class: "size", title: count(documents, "document") }, digits(documents));
        const click = () => this.choose(this.#buttons.get(cluster).getAttribute("aria-pressed") === "true" ? null : cluster);
        return [cluster, make("button", { type: "button", "aria-pressed": "false", on: { click } }, swatch, make("bdi", {}, names.get(cluster)), size)];
      }),
    );
    this.list.replaceChildren(...[...this.#buttons.values()].map((button) => make("li", {}, button)));
  }

  /** Say which cluster stands out. */
  press(chosen) {
    for (const [cluster, button] of this.#buttons) button.setAttribute("aria-pressed", String(cluster === chosen));
  }

  paint(colourOf) {
    for (const [cluster, button] of this.#buttons) button.querySelector("circle").setAttribute("fill", colourOf(cluster));
  }
}
