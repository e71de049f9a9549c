// The page: what is asked, what came back, and the keys that move between them. Its state lies in the address behind #, which no server sees.

import { collectionPath, get, key, post, WAITING } from "./api.js";
import { byId, count, make } from "./dom.js";
import { Filters } from "./filters.js";
import { Health } from "./health.js";
import { moveAmongHits, showHits } from "./hits.js";
import { LiveSearch } from "./live_search.js";
import { CorpusMap } from "./map.js";
import { Reader } from "./reader.js";

const TOP_K = 20;
const RERANK_REST_MILLISECONDS = 600;
const SUGGESTIONS = 18;
const PASSAGES = 3;
const VIEWS = ["find", "map", "document", "health"];

const [query, list, status, notice, main] = ["query", "hits", "status", "notice", "main"].map(byId);
const [collections, hybrid, rerank, holds, dialog, keyValue] = ["collection", "hybrid", "rerank", "holds", "ask-key", "key-value"].map(byId);
const [welcome, unfilter] = ["welcome", "unfilter"].map(byId);
const [complaint, again] = notice.children;

let filterable = new Set();
let served = { generation: null };
let openedFrom = { view: "find", element: null };
const isWide = matchMedia("(min-width: 900px)");

const filters = new Filters(byId("filters"), () => ask());
const reader = new Reader(byId("document"), { close: closeDocument, fail });
const map = new CorpusMap(byId("map"), { open: (hit) => openDocument(hit, 0), point: pointAt, name: suggest, fail });
const health = new Health(byId("health"), { fail });
const search = new LiveSearch({ send, show, fail: failSearch, wait: (isWaiting) => list.toggleAttribute("aria-busy", isWaiting) });

// ---- asking

const granularity = () => document.querySelector("[name=granularity]:checked").value;

function ask(options) {
  remember();
  if (query.value.trim() && collections.value) return search.ask(rerank.checked ? { rest: RERANK_REST_MILLISECONDS, ...options } : options);
  search.cancel();
  showNothing();
  notice.hidden = true;
  welcome.hidden = false;
}

const askNow = () => ask({ rest: 0 });

function showNothing() {
  list.replaceChildren();
  delete list.dataset.query;
  map.light([]);
  say("");
}

async function send(signal) {
  const body = { query: query.value, top_k: TOP_K, passages: PASSAGES, granularity: granularity(), hybrid: hybrid.checked, filters: filters.tree() };
  if (rerank.checked) {
    body.rerank = true;
    say("Reranking…");
  }
  const began = performance.now();
  const answer = await post(collectionPath(collections.value, "/search"), body, signal);
  return { ...answer, query: body.query, milliseconds: performance.now() - began };
}

function show({ query: asked, hits, generation, milliseconds }) {
  notice.hidden = true;
  welcome.hidden = true;
  showHits(list, hits, { open: openDocument, narrow: (name, value) => filters.add({ key: name, value }), filterable });
  list.scrollTop = 0;
  list.dataset.query = asked;
  filters.offer(hits);
  map.light(hits);
  const isFiltered = filters.tree() !== null;
  const nothing = isFiltered ? "No document matches the filters." : "No document matches.";
  say(hits.length ? `${count(hits.length, "document")} in ${Math.round(milliseconds)} ms · generation ${generation}` : nothing);
  unfilter.hidden = hits.length > 0 || !isFiltered;
  if (generation !== served.generation) describe().catch(fail);
}

function say(sentence) {
  status.textContent = sentence;
  unfilter.hidden = true;
}

function fail(error) {
  if (error.status === 401) return askForKey(key.get() ? error.message : "This server needs one.");
  notice.hidden = false;
  complaint.textContent = error.message;
  again.hidden = false;
}

/** What was found before is not an answer to what is asked now. */
function failSearch(error) {
  showNothing();
  welcome.hidden = true;
  fail(error);
}

// ---- a document

function openDocument(hit, passage) {
  if (main.dataset.view !== "document") openedFrom = { view: main.dataset.view, element: document.activeElement };
  else openedFrom.element = document.activeElement;
  look("document");
  mark(hit.doc_id);
  reader.open(collections.value, hit, passage);
}

function closeDocument() {
  reader.reset();
  mark(null);
  look(openedFrom.view);
  (openedFrom.element?.isConnected ? openedFrom.element : query).focus();
}

function mark(id) {
  for (const item of list.children) item.classList.toggle("opened", item.dataset.id === id);
}

/** Show one of the views; where there is room for two, the list stays and the map stands beside it. */
function look(view) {
  main.dataset.view = view === "find" && isWide.matches ? "map" : view;
  for (const name of VIEWS) {
    const isShown = name === main.dataset.view;
    byId(`tab-${name}`).setAttribute("aria-selected", isShown);
    byId(`tab-${name}`).tabIndex = isShown ? 0 : -1;
  }
  if (!collections.value) return;
  if (main.dataset.view === "map") map.use(collections.value);
  if (main.dataset.view === "health") health.use(collections.value);
}

/** Offer what the clusters speak of to who does not know what to ask. */
function suggest(names) {
  const offer = (name) => make("button", { class: "chip", type: "button", dir: "auto", on: { click: () => ((query.value = name), query.focus(), askNow()) } }, name);
  byId("suggestions").replaceChildren(...names.slice(0, SUGGESTIONS).map((name) => make("li", {}, offer(name))));
}

function pointAt(id) {
  for (const item of list.children) item.classList.toggle("pointed", item.dataset.id === id);
}

const lookAt = (event) => map.lookAt(event.target.closest(".hit")?.dataset.id ?? null);
for (const event of ["focusin", "focusout", "pointerover", "pointerleave"]) list.addEventListener(event, lookAt);
for (const name of VIEWS) byId(`tab-${name}`).addEventListener("click", () => look(name));
byId("tabs").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const shown = VIEWS.filter((name) => byId(`tab-${name}`).offsetParent !== null);
  const next = shown[(shown.indexOf(main.dataset.view) + step + shown.length) % shown.length];
  look(next);
  byId(`tab-${next}`).focus();
});
isWide.addEventListener("change", () => look(main.dataset.view));

// ---- collections and keys

async function loadCollections() {
  try {
    const { collections: found } = await get("collections");
    const ready = found.filter((collection) => collection.status === "ready");
    collections.replaceChildren(...ready.map(({ name }) => make("option", { value: name }, name)));
    notice.hidden = ready.length > 0;
    again.hidden = false;
    const others = found.map(({ name, status: state }) => `${name} is ${state === "building" ? "being built" : "damaged"}`);
    const none = ["There is no collection to search yet: ", make("code", {}, "ingest SOURCE --collection NAME"), " makes one."];
    complaint.replaceChildren(...(others.length ? [`Nothing can be searched yet: ${others.join(", ")}.`] : none));
    if (ready.length) await restore();
  } catch (error) {
    fail(error);
  }
}

async function useCollection() {
  reader.reset();
  map.forget();
  health.forget();
  look("find");
  holds.textContent = "";
  await describe();
}

/** Show what a collection holds and can be asked; called again when an answer is of another generation. */
async function describe() {
  const name = collections.value;
  const described = await get(collectionPath(name));
  if (name !== collections.value) return;
  if (served.name === name && served.generation !== described.generation) [map, health].forEach((panel) => panel.forget());
  served = described;
  if (main.dataset.view === "health") health.use(name);
  map.use(name);
  filterable = new Set(described.filter_columns.map((column) => column.name));
  filters.use(described.filter_columns);
  holds.textContent = `${count(described.documents, "document")} · generation ${described.generation}`;
  document.title = `${name} · Cairn`;
  rerank.parentElement.hidden = !described.reranks;
  if (!described.reranks) rerank.checked = false;
}

function askForKey(sentence) {
  byId("key-complaint").textContent = sentence;
  keyValue.value = "";
  byId("key-forget").hidden = !key.get();
  if (!dialog.open) dialog.showModal();
}

dialog.addEventListener("close", () => {
  if (dialog.returnValue === "use" && keyValue.value.trim()) key.set(keyValue.value.trim());
  else if (dialog.returnValue === "forget") key.set("");
  else return;
  location.reload();
});
for (const way of ["forget", "cancel"]) byId(`key-${way}`).addEventListener("click", () => dialog.close(way));
byId("key").addEventListener("click", () => askForKey(""));

// ---- what was asked, in the address

const inAddress = () => new URLSearchParams(location.hash.slice(1));

/** What waits for the server, the collection and its filters, stays as the address has it until it is there. */
function remember() {
  const before = inAddress();
  const state = new URLSearchParams({ collection: collections.value || (before.get("collection") ?? ""), q: query.value });
  if (granularity() !== "both") state.set("granularity", granularity());
  if (!hybrid.checked) state.set("bm25", "off");
  if (rerank.checked) state.set("rerank", "on");
  const tree = collections.value ? JSON.stringify(filters.tree()) : before.get("filters");
  if (tree && tree !== "null") state.set("filters", tree);
  history.replaceState(null, "", `#${state}`);
}

/** Set what needs no server; what somebody types from then on is kept. */
function restoreControls() {
  const state = inAddress();
  query.value = state.get("q") ?? query.value;
  hybrid.checked = state.get("bm25") !== "off";
  rerank.checked = state.get("rerank") === "on";
  for (const choice of document.getElementsByName("granularity")) choice.checked = choice.value === (state.get("granularity") ?? "both");
}

async function restore() {
  const state = inAddress();
  if ([...collections.options].some((option) => option.value === state.get("collection"))) collections.value = state.get("collection");
  await useCollection();
  try {
    filters.restore(JSON.parse(state.get("filters") ?? "null"));
  } catch {
    filters.clear(); // an address somebody mistyped
  }
  askNow();
}

// ---- colours

const THEMES = { auto: "as the system has them", light: "light", dark: "dark" };

function showTheme() {
  const theme = document.documentElement.dataset.theme ?? "auto";
  const button = byId("theme");
  button.textContent = { auto: "◐", light: "☀", dark: "☾" }[theme];
  button.setAttribute("aria-label", `Colours: ${THEMES[theme]}`);
  button.title = `Colours: ${THEMES[theme]}`;
}

byId("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  const next = names[(names.indexOf(document.documentElement.dataset.theme ?? "auto") + 1) % names.length];
  if (next === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = next;
  localStorage.setItem("cairn-theme", next);
  showTheme();
  map.redraw();
});

// ---- keys

const isTyping = (element) => element.matches("input:not([type=radio], [type=checkbox]), select, textarea");

document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
  const handled = reactTo(event.key, event.target);
  if (handled) event.preventDefault();
});

function reactTo(pressed, target) {
  const typing = isTyping(target);
  if (pressed === "/" && !typing) return query.focus(), query.select(), true;
  if (pressed === "Escape") return stepBack(target);
  if (reader.isOpen && !typing && (pressed === "n" || pressed === "p")) return reader.step(pressed === "n" ? 1 : -1), true;
  const isAmongHits = target === query || target.closest(".hit") !== null;
  if (!isAmongHits || (pressed !== "ArrowDown" && pressed !== "ArrowUp")) return false;
  if (moveAmongHits(list, pressed === "ArrowDown" ? 1 : -1)) return true;
  if (pressed === "ArrowUp" && target !== query) query.focus();
  return true;
}

function stepBack(target) {
  if (reader.isOpen) return closeDocument(), true;
  if (target === query) {
    query.value = "";
    ask();
  } else {
    query.focus();
  }
  return true;
}

// ---- begin

query.addEventListener("input", () => ask());
for (const choice of [hybrid, rerank, byId("granularity")]) choice.addEventListener("change", askNow);
byId("add-filter").addEventListener("click", () => filters.add());
unfilter.addEventListener("click", () => (filters.clear(), query.focus(), askNow()));
again.addEventListener("click", () => (collections.value ? (query.focus(), askNow()) : loadCollections()));
byId("search").addEventListener("submit", (event) => {
  event.preventDefault();
  askNow();
});
document.addEventListener(WAITING, (event) => say(event.detail));
addEventListener("hashchange", () => (restoreControls(), restore().catch(fail)));
collections.addEventListener("change", () => useCollection().then(askNow, fail));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => map.redraw());
showTheme();
look("find");
restoreControls();
loadCollections();
