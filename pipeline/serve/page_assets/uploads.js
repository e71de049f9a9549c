// Files that are added here: each is sent, put into the collection, and followed until searches find it.

import { get, post, sendFile } from "./api.js";
import { make } from "./dom.js";

const SENT_AT_A_TIME = 3;
const LOOK_MILLISECONDS = 300;
const MAX_FILE_BYTES = 128 << 20;
/** As many as one look shows. */
const FILES_TOGETHER = 100;

export class Uploads {
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
    const collection = (this.#collection ||= await this.create());
    if (!collection) return;
    const lines = files.map((file) => new Line(file));
    for (const line of lines) this.#list.prepend(line.element);
    for (let start = 0; start < lines.length; start += FILES_TOGETHER) {
      const together = lines.slice(start, start + FILES_TOGETHER);
      const waiting = [...together];
      const send = async () => {
        while (waiting.length) await waiting.shift().send();
      };
      await Promise.all(Array.from({ length: SENT_AT_A_TIME }, send));
      const sent = together.filter((line) => line.id);
      if (sent.length) await this.#add(sent, collection);
    }
  }

  /** Add sent files as the documents of their names, in the place of those that are there: in one publication. */
  async #add(sent, collection) {
    const store = `vector_stores/${encodeURIComponent(collection)}`;
    const following = new Map(sent.map((line) => [line.id, line]));
    try {
      const batch = await post(`${store}/file_batches`, { files: sent.map(({ id, file }) => ({ file_id: id, doc_id: file.name })) });
      while (following.size) {
        await new Promise((resolve) => setTimeout(resolve, LOOK_MILLISECONDS));
        const { data } = await get(`${store}/file_batches/${batch.id}/files?limit=${FILES_TOGETHER}`);
        const found = new Map(data.map((file) => [file.id, file]));
        const settled = [...following].filter(([id]) => found.get(id)?.status !== "in_progress");
        for (const [id, line] of settled) {
          following.delete(id);
          line.settle(found.get(id));
        }
        if (settled.some(([id]) => found.get(id)?.status === "completed")) this.added(collection);
      }
    } catch (error) {
      for (const line of following.values()) line.complain(error.message);
    }
  }
}

/** A file, and how far it is. */
class Line {
  #state = make("span", {}, "waiting");

  constructor(file) {
    this.file = file;
    this.element = make("li", {}, make("bdi", {}, file.name), " ", this.#state);
  }

  /** Send it; it has an `id` then, or says why not. */
  async send() {
    const refused = this.file.size ? this.file.size > MAX_FILE_BYTES && "It is larger than 128 MiB." : "It is empty.";
    if (refused) return this.complain(refused);
    const bar = make("progress", { max: 1, value: 0, "aria-label": `Sending ${this.file.name}` });
    this.#state.replaceChildren(bar);
    try {
      ({ id: this.id } = await sendFile(this.file, (share) => (bar.value = share)));
      this.#state.textContent = "being read";
    } catch (error) {
      this.complain(error.message);
    }
  }

  settle(found) {
    if (found?.status === "completed") this.#state.textContent = ["added", ...found.warnings].join("; ");
    else this.complain(found?.last_error?.message ?? "It was taken out again.");
  }

  complain(told) {
    this.#state.className = "complaint";
    this.#state.textContent = told;
  }
}
