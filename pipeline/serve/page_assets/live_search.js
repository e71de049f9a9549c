// Searches while the user types: one request at a time, after a pause; outdated requests are aborted and never shown.

const REST_MILLISECONDS = 160;

export class LiveSearch {
  #timer = 0;
  #request = null;

  /** `send(signal)` gives a promise; `show(value)`, `fail(error)` and `wait(isWaiting)` are told of the newest request only. */
  constructor({ send, show, fail, wait }) {
    Object.assign(this, { send, show, fail, wait });
  }

  /** Ask once nothing else is asked for so long. */
  ask({ rest = REST_MILLISECONDS } = {}) {
    this.cancel();
    this.#timer = setTimeout(() => this.#run(), rest);
  }

  cancel() {
    clearTimeout(this.#timer);
    this.#request?.abort();
    this.#request = null;
    this.wait(false);
  }

  async #run() {
    const request = (this.#request = new AbortController());
    this.wait(true);
    try {
      const value = await this.send(request.signal);
      if (this.#request === request) this.show(value);
    } catch (error) {
      if (this.#request === request && error.name !== "AbortError") this.fail(error);
    } finally {
      if (this.#request === request) this.wait(false);
    }
  }
}
