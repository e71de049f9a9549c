// The dialog that takes an API key for this tab.

import { key } from "./api.js";
import { byId } from "./dom.js";

export class KeyDialog {
  #dialog = byId("ask-key");
  #value = byId("key-value");

  constructor() {
    this.#dialog.addEventListener("close", () => this.#close());
    for (const way of ["forget", "cancel"]) byId(`key-${way}`).addEventListener("click", () => this.#dialog.close(way));
    byId("key").addEventListener("click", () => this.ask(""));
  }

  get isOpen() {
    return this.#dialog.open;
  }

  /** Ask for a key and say why. */
  ask(sentence) {
    byId("key-complaint").textContent = sentence;
    if (this.isOpen) return;
    this.#value.value = "";
    byId("key-forget").hidden = !key.get();
    this.#dialog.returnValue = "";
    this.#dialog.showModal();
  }

  #close() {
    const { returnValue } = this.#dialog;
    const given = this.#value.value.trim();
    if (returnValue === "use" && given) key.set(given);
    else if (returnValue === "forget") key.set("");
    else return;
    location.reload();
  }
}
