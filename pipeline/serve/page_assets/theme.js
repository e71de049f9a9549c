// Light, dark, or as the system has it: set before the first paint, so that nothing flashes.
"use strict";
(() => {
  const kept = localStorage.getItem("cairn-theme");
  if (kept === "light" || kept === "dark") document.documentElement.dataset.theme = kept;
})();
