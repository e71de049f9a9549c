// Files that are added here: each is sent, put into the collection, and followed until searches find it.

import { get, post, sendFile } from "./api.js";
import { make } from "./dom.js";

const FILES_AT_A_TIME = 3;
const LOOK_MILLISECONDS = 300;
const MAX_FILE_BYTES = 128 << 20;

export class Uploads {
  #waiting = [];
  #running = 0;
  #collection = null;
  #list;

  /** `added(collection)` is called when searches find another file, `create()` to make a collection where there is none. */
  constructor(element, { added, create }) {
    Object.assign(this, { element, added, create });
    this.#list = element.querySelector("ul");
    const input = element.querySelector("input");
    input.addEventListener("change", () => {
      this.#take([...input.files]);
      input.value = "";
    });
    for (const kind of ["dragover", "dragleave", "drop"]) document.addEventListener(kind, (event) => this.#drag(event));
  }

  /** Take files for a collection; "" makes one first, null takes none. */
  use(collection) {
    if (collection !== null && collection !== this.#collection) this.#list.replaceChildren();
    this.#collection = collection ?? this.#collection;
    this.element.hidden = collection === null;
  }

  #drag(event) {
    if (this.element.hidden || !event.dataTransfer?.types.includes("Files")) return;
    event.preventDefault();
    this.element.classList.toggle("over", event.type === "dragover");
    if (event.type === "drop") this.#take([...event.dataTransfer.files]);
  }

  async #take(files) {
    this.#collection ||= await this.create();
    if (!this.#collection) return;
    for (const file of files) {
      const state = make("span", {}, "waiting");
      this.#list.prepend(make("li", {}, make("bdi", {}, file.name), " ", state));
      this.#waiting.push({ file, state, collection: this.#collection });
    }
    while (this.#running < FILES_AT_A_TIME && this.#waiting.length) this.#work();
  }

  async #work() {
    this.#running += 1;
    while (this.#waiting.length) {
      const { file, state, collection } = this.#waiting.shift();
      try {
        const warnings = await add(file, collection, (...shown) => state.replaceChildren(...shown));
        state.textContent = ["added", ...warnings].join("; ");
        this.added(collection);
      } catch (error) {
        state.className = "complaint";
        state.textContent = error.message;
      }
    }
    this.#running -= 1;
  }
}

/** Add a file as the document of its name, in the place of one that is there; give the warnings of its reading. */
async function add(file, collection, show) {
  if (file.size > MAX_FILE_BYTES) throw new Error("It is larger than 128 MiB.");
  const bar = make("progress", { max: 1, value: 0, "aria-label": `Sending ${file.name}` });
  show(bar);
  const { id } = await sendFile(file, (share) => (bar.value = share));
  show("being read");
  const files = `vector_stores/${encodeURIComponent(collection)}/files`;
  let found = await post(files, { file_id: id, doc_id: file.name });
  while (found.status === "in_progress") {
    await new Promise((resolve) => setTimeout(resolve, LOOK_MILLISECONDS));
    found = await get(`${files}/${id}`);
  }
  if (found.status === "completed") return found.warnings;
  throw new Error(found.last_error?.message ?? "It was taken out again.");
}
