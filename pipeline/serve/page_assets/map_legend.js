// The clusters as a list: colour, name, size. One that is pressed stands out on the map until it is pressed again.

import { count, digits, make } from "./dom.js";

export class Legend {
  #buttons = new Map();

  /** `choose(cluster)` is called with the cluster that is to stand out, or null. */
  constructor({ choose }) {
    this.choose = choose;
    this.list = make("ul", {});
    this.summary = make("summary", {}, "Clusters");
    this.element = make("details", { class: "legend", hidden: true }, this.summary, this.list);
  }

  /** Show clusters, largest first. */
  show(clusters, names) {
    this.element.hidden = clusters.length < 2;
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
