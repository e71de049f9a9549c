// The collection as a map: a point a document, coloured by cluster, the answer's documents lit up. Drawn on a 2-D canvas, so that it needs
// no graphics card; d3 keeps zoom and finds what lies under the pointer.

import { collectionPath, get } from "./api.js";
import { CollectionPanel } from "./collection_panel.js";
import { make } from "./dom.js";
import { count } from "./formats.js";
import { orderClusters } from "./map_colours.js";
import { coloursOf, drawMap, scaleOf } from "./map_drawing.js";
import { askedBy, KEYS_OF_MAP, neighbour } from "./map_keys.js";
import { Legend } from "./map_legend.js";
import { term } from "./term.js";

const d3 = globalThis.d3;
/** The server itself waits a second for a map before it answers. */
const ASK_AGAIN_MILLISECONDS = 200;
const CLUSTER = "Documents whose vectors are alike form a cluster. It is named by two words that are frequent in it and rare in others.";
const NEAR_PIXELS = 14;
const EDGE_PIXELS = 40;
const MAX_ZOOM = 40;

export class CorpusMap extends CollectionPanel {
  #points = [];
  #clusters = [];
  #hits = [];
  #places = new Map();
  #order = new Map();
  #names = new Map();
  #tree = null;
  #zoom = d3.zoomIdentity;
  #looked = null;
  #rested = null;
  #lit = null;
  #chosen = null;
  #frame = 0;

  /** `open(hit)` is called for a point that is opened, `point(id)` for the one that is looked at, or null, `name(names)` with what the
   * largest clusters speak of, once they are known. */
  constructor(element, { open, point, name, fail }) {
    super(element, { fail });
    Object.assign(this, { open, point, name });
    this.canvas = make("canvas", { role: "application", tabindex: "0", "aria-label": "Map of the collection", "aria-describedby": "map-keys" });
    this.label = make("div", { class: "map-label", hidden: true, "aria-hidden": "true" });
    this.caption = make("p", { class: "map-caption" });
    this.numFound = make("span", { class: "map-caption", role: "status" });
    this.bar = make("progress", { max: 1, "aria-labelledby": "map-drawing" });
    this.drawing = make("div", { class: "map-drawing", hidden: true }, make("p", { id: "map-drawing", role: "status" }), this.bar);
    this.spoken = make("p", { class: "unseen", "aria-live": "polite" });
    this.whole = make("button", { class: "quiet", type: "button", hidden: true, on: { click: () => this.#showAll() } }, "Show all");
    this.legend = new Legend({ choose: (cluster) => this.#choose(cluster) });
    const keys = make("p", { class: "map-keys", id: "map-keys" }, KEYS_OF_MAP);
    const area = make("div", { class: "map-area" }, this.canvas, this.label, keys, this.drawing, this.spoken);
    const head = make("div", { class: "map-head" }, this.caption, this.numFound, this.whole, this.legend.toggle);
    element.replaceChildren(head, make("div", { class: "map-body" }, area, this.legend.list));
    this.behaviour = d3.zoom().scaleExtent([1, MAX_ZOOM]).on("zoom", (event) => this.#move(event));
    d3.select(this.canvas).call(this.behaviour).on("dblclick.zoom", null);
    this.canvas.addEventListener("pointermove", (event) => this.#lookAtPoint(event.buttons ? null : this.#nearest(event)));
    this.canvas.addEventListener("pointerleave", () => this.#lookAtPoint(null));
    this.canvas.addEventListener("click", (event) => this.#open(this.#nearest(event)));
    this.canvas.addEventListener("keydown", (event) => this.#press(event));
    this.canvas.addEventListener("focus", () => this.canvas.matches(":focus-visible") && this.#goTo(this.#here()));
    this.canvas.addEventListener("blur", () => this.#lookAtPoint(null));
    new ResizeObserver(() => this.redraw()).observe(area);
  }

  async load(collection, signal) {
    this.#take(await this.#whenDrawn(collectionPath(collection, "/map"), signal));
    await this.#placeHits();
  }

  clear() {
    this.#points = [];
    this.#clusters = [];
    this.#chosen = null;
    this.#rested = null;
    this.#tree = null;
    this.#places.clear();
    this.legend.show([], this.#names);
    this.caption.replaceChildren();
    this.numFound.textContent = "";
    this.drawing.hidden = true;
    this.#lookAtPoint(null);
    this.#showAll();
  }

  /** Light up the documents of an answer, best first. */
  async light(hits) {
    this.#hits = hits;
    this.#rested = null;
    this.redraw();
    await this.doing(this.#placeHits());
  }

  /** Show which hit is looked at in the list. */
  lookAt(id) {
    this.#lit = id;
    this.redraw();
  }

  redraw() {
    cancelAnimationFrame(this.#frame);
    this.#frame = requestAnimationFrame(() => this.#draw());
  }

  async #whenDrawn(path, signal) {
    try {
      for (;;) {
        const map = await get(path, signal);
        if (map.status === "ready") return map;
        this.drawing.hidden = false;
        this.drawing.firstChild.textContent = `Drawing a map of ${count(map.documents, "document")}…`;
        this.bar.value = map.progress;
        await new Promise((resolve) => setTimeout(resolve, ASK_AGAIN_MILLISECONDS));
        signal.throwIfAborted();
      }
    } finally {
      if (!signal.aborted) this.drawing.hidden = true;
    }
  }

  #take({ points, clusters, documents, generation }) {
    this.#points = rows(points);
    this.#names = new Map(clusters.map(({ cluster, name }) => [cluster, name.split(" ").join(", ") || `cluster ${cluster}`]));
    this.#clusters = clusters.map((each) => ({ ...each, label: this.#names.get(each.cluster) })).sort((a, b) => b.documents - a.documents);
    this.#order = orderClusters(clusters);
    for (const point of this.#points) this.#places.set(point.id, point);
    this.#tree = d3.quadtree(this.#points, (point) => point.x, (point) => point.y);
    this.legend.show(this.#clusters, this.#names);
    this.name(this.#clusters.map(({ name }) => name).filter(Boolean));
    const shown = this.#points.length;
    const what = shown < documents ? `${count(shown, "document")} of ${count(documents, "document")}` : count(documents, "document");
    const groups = count(clusters.length, "cluster");
    this.caption.replaceChildren(`${what} in `, term(groups, CLUSTER));
    this.canvas.dataset.generation = generation;
    this.canvas.setAttribute("aria-label", `Map of the collection: ${what} in ${groups}. The documents found are in the list, too.`);
    this.redraw();
  }

  async #placeHits() {
    if (!this.#points.length || !this.collection) return;
    const missing = this.#hits.map((hit) => hit.doc_id).filter((id) => !this.#places.has(id));
    if (missing.length) {
      const wanted = new URLSearchParams(missing.map((id) => ["doc_id", id]));
      const { points } = await get(`${collectionPath(this.collection, "/map/places")}?${wanted}`, this.signal);
      for (const point of points ? rows(points) : []) this.#places.set(point.id, point);
    }
    this.redraw();
  }

  /** The places of the answer's documents, best first. */
  #found() {
    return this.#hits.map((hit) => this.#places.get(hit.doc_id)).filter(Boolean);
  }

  #draw() {
    if (!this.canvas.clientWidth) return;
    const found = this.#found();
    const colours = coloursOf(this.element, this.#order);
    const looked = this.#looked ?? found.find((point) => point.id === this.#lit) ?? null;
    drawMap(this.canvas, { points: this.#points, clusters: this.#clusters, found, zoom: this.#zoom, looked, chosen: this.#chosen, colours });
    this.legend.paint(colours.of);
    this.canvas.dataset.points = this.#points.length;
    this.canvas.dataset.hits = found.length;
    this.numFound.textContent = found.length ? `${found.length} found` : "";
  }

  // ---- moving

  #move({ transform, sourceEvent }) {
    this.#zoom = transform;
    this.whole.hidden = this.#chosen === null && transform.k === 1 && transform.x === 0 && transform.y === 0;
    if (sourceEvent) this.#lookAtPoint(null);
    else this.#label();
    this.redraw();
  }

  #showAll() {
    this.#chosen = null;
    this.legend.press(null);
    d3.select(this.canvas).call(this.behaviour.transform, d3.zoomIdentity);
  }

  /** Let a cluster stand out, and bring most of it near. */
  #choose(cluster) {
    if (cluster === null) return this.#showAll();
    this.#chosen = cluster;
    this.legend.press(cluster);
    const { plain, width, height } = scaleOf(this.canvas, d3.zoomIdentity);
    const members = this.#points.filter((point) => point.cluster === cluster).map(plain);
    const [left, right] = spread(members.map(([x]) => x));
    const [top, bottom] = spread(members.map(([, y]) => y));
    const scale = Math.min(8, Math.max(1, 0.6 * Math.min(width / (right - left + 1), height / (bottom - top + 1))));
    const middle = d3.zoomIdentity.translate(width / 2, height / 2).scale(scale).translate(-(left + right) / 2, -(top + bottom) / 2);
    d3.select(this.canvas).call(this.behaviour.transform, middle);
  }

  #press(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const asked = askedBy(event.key);
    if (!asked || !this.#points.length) return;
    event.preventDefault();
    const found = this.#found();
    const here = this.#here();
    if (asked.open) return this.#open(here);
    if (asked.all) return this.#showAll();
    if (asked.zoom) return d3.select(this.canvas).call(this.behaviour.scaleBy, asked.zoom, scaleOf(this.canvas, this.#zoom).at(here));
    if (asked.direction) return this.#goTo(neighbour(this.#everywhere(), here, scaleOf(this.canvas, this.#zoom).at, asked.direction) ?? here);
    const next = found.indexOf(here) === -1 ? (asked.hit === 1 ? 0 : -1) : found.indexOf(here) + asked.hit;
    if (found.length) this.#goTo(found.at(next % found.length));
  }

  /** All points, and documents of the answer that are not among them. */
  #everywhere() {
    return [...this.#places.values()];
  }

  /** Where the keyboard is: the point that is looked at, the one it was at last, the best hit, or what lies in the middle. */
  #here() {
    const middle = [this.canvas.clientWidth / 2, this.canvas.clientHeight / 2];
    return this.#looked ?? this.#rested ?? this.#found()[0] ?? this.#tree?.find(...this.#inverse(middle)) ?? null;
  }

  /** Look at a point by keyboard: it is brought into view, and said. */
  #goTo(point) {
    if (!point) return;
    this.#rested = point;
    this.#lookAtPoint(point);
    const { at, plain, width, height } = scaleOf(this.canvas, this.#zoom);
    const [left, top] = at(point);
    const isSeen = left > EDGE_PIXELS && left < width - EDGE_PIXELS && top > EDGE_PIXELS && top < height - EDGE_PIXELS;
    if (!isSeen && this.#zoom.k > 1) d3.select(this.canvas).call(this.behaviour.translateTo, ...plain(point));
    this.spoken.textContent = [point.title || point.id, this.#clusterOf(point), this.#rankOf(point)].filter(Boolean).join(", ");
  }

  // ---- pointing

  #clusterOf(point) {
    const name = this.#names.get(point.cluster) ?? `cluster ${point.cluster}`;
    return name.startsWith("cluster ") ? name : `cluster ${name}`;
  }

  #rankOf(point) {
    const rank = this.#hits.findIndex((hit) => hit.doc_id === point.id) + 1;
    return rank ? `number ${rank} of the answer` : "";
  }

  #inverse([left, top]) {
    const { across, up, width, height } = scaleOf(this.canvas, this.#zoom);
    return [(this.#zoom.invertX(left) - width / 2) / across, (height / 2 - this.#zoom.invertY(top)) / up];
  }

  #nearest({ offsetX: left, offsetY: top }) {
    const { across, up, at } = scaleOf(this.canvas, this.#zoom);
    const distance = (point) => Math.hypot(at(point)[0] - left, at(point)[1] - top);
    const lit = d3.least(this.#found(), distance);
    if (lit && distance(lit) < NEAR_PIXELS) return lit;
    const near = this.#tree?.find(...this.#inverse([left, top]), NEAR_PIXELS / (this.#zoom.k * Math.min(across, up)));
    return near && distance(near) < NEAR_PIXELS ? near : null;
  }

  #lookAtPoint(point) {
    if (this.#looked === point) return;
    this.#looked = point;
    this.canvas.classList.toggle("over", point !== null);
    this.point(point?.id ?? null);
    this.#label();
    this.redraw();
  }

  /** Say beside the point that is looked at what it is. */
  #label() {
    const point = this.#looked;
    this.label.hidden = point === null;
    if (!point) return;
    const { at, width, height } = scaleOf(this.canvas, this.#zoom);
    const [left, top] = at(point);
    const swatch = make("svg:svg", { viewBox: "0 0 10 10" }, make("svg:circle", { cx: 5, cy: 5, r: 5, fill: coloursOf(this.element, this.#order).of(point.cluster) }));
    const under = [this.#clusterOf(point), this.#rankOf(point)].filter(Boolean).join(" · ");
    this.label.replaceChildren(
      make("strong", { dir: "auto" }, point.title || point.id),
      ...(point.title ? [make("span", {}, point.id)] : []),
      make("span", { class: "map-cluster" }, swatch, under),
    );
    this.label.classList.toggle("leftwards", left > width / 2);
    this.label.classList.toggle("upwards", top > height / 2);
    this.label.style.left = `${left}px`;
    this.label.style.top = `${top}px`;
  }

  #open(point) {
    if (!point) return;
    if (document.activeElement !== this.canvas) this.#lookAtPoint(null);
    this.open(this.#hits.find((hit) => hit.doc_id === point.id) ?? { doc_id: point.id, passages: [] });
  }
}

/** Where most of some numbers lie. */
function spread(numbers) {
  const sorted = d3.sort(numbers);
  return [d3.quantileSorted(sorted, 0.1), d3.quantileSorted(sorted, 0.9)];
}

function rows({ doc_id: ids, title, x, y, cluster }) {
  return ids.map((id, index) => ({ id, title: title[index], x: x[index], y: y[index], cluster: cluster[index] }));
}
