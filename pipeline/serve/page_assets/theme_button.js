// The button that goes from the system's colours to light, to dark and back; theme.js has set the chosen ones before the first paint.

const THEMES = { auto: ["◐", "as the system has them"], light: ["☀", "light"], dark: ["☾", "dark"] };

export class ThemeButton {
  /** `changed()` is called when colours are others. */
  constructor(button, changed) {
    Object.assign(this, { button, changed });
    button.addEventListener("click", () => this.#next());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
    this.#show();
  }

  get #theme() {
    return document.documentElement.dataset.theme ?? "auto";
  }

  #next() {
    const names = Object.keys(THEMES);
    const next = names[(names.indexOf(this.#theme) + 1) % names.length];
    if (next === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    localStorage.setItem("cairn-theme", next);
    this.#show();
    this.changed();
  }

  #show() {
    const [sign, colours] = THEMES[this.#theme];
    this.button.textContent = sign;
    this.button.title = `Colours: ${colours}`;
    this.button.setAttribute("aria-label", this.button.title);
  }
}
