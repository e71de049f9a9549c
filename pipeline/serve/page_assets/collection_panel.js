// A panel that looks at one collection: asked for once, let go of when another is chosen.

/** Subclasses have `load(collection, signal)`, which shows it, and `clear()`, which shows nothing. */
export class CollectionPanel {
  #asked = null;
  collection = null;

  constructor(element, { fail }) {
    Object.assign(this, { element, fail });
  }

  /** Ends what is under way when the collection is let go of. */
  get signal() {
    return this.#asked?.signal;
  }

  /** Show a collection; the one that is shown is not asked for again, one that failed is. */
  async use(collection) {
    if (this.collection === collection) return;
    this.forget();
    this.collection = collection;
    this.#asked = new AbortController();
    await this.doing(this.load(collection, this.signal));
  }

  forget() {
    this.#asked?.abort();
    this.collection = null;
    this.clear();
  }

  /** Await work of this panel: what was called off is silent, what failed is told and may be asked for again. */
  async doing(work) {
    const { signal } = this;
    try {
      await work;
    } catch (error) {
      if (signal?.aborted) return;
      this.collection = null;
      this.fail(error);
    }
  }
}
