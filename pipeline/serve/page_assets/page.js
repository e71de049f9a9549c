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
const [collections, hybrid, words, rerank, holds, dialog, keyValue] = ["collection", "hybrid", "words", "rerank", "holds", "ask-key", "key-value"].map(byId);
const [welcome, unfilter, addFilter] = ["welcome", "unfilter", "add-filter"].map(byId);
const [complaint, again] = notice.children;

let said = "";
let beginning = new AbortController();
/** What the server says of the collection that is wanted; null before: then it may be typed and switched, and nothing is asked. */
let served = null;
/** The collection of the address or of the list, and the filters of the address: null once they are rows. Both wait for the server. */
let wanted = { collection: "", filters: null };
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
  if (served === null) return;
  if (query.value.trim()) return search.ask(rerank.checked ? { rest: RERANK_REST_MILLISECONDS, ...options } : options);
  search.cancel();
  showNothing();
  notice.hidden = true;
  welcome.hidden = false;
}

const askNow = () => ask({ rest: 0 });

function showNothing() {
  if (list.contains(document.activeElement)) query.focus();
  list.replaceChildren();
  delete list.dataset.query;
  map.light([]);
  say("");
}

async function send(signal) {
  const body = { query: query.value, top_k: TOP_K, passages: PASSAGES, granularity: granularity(), hybrid: hybrid.checked, late: words.checked, filters: filters.tree() };
  if (rerank.checked) {
    body.rerank = true;
    say("Reranking…");
  }
  const began = performance.now();
  const answer = await post(collectionPath(served.name, "/search"), body, signal);
  return { ...answer, query: body.query, milliseconds: performance.now() - began };
}

function show({ query: asked, hits, generation, milliseconds }) {
  notice.hidden = true;
  welcome.hidden = true;
  const filterable = new Set(served.filter_columns.map((column) => column.name));
  const focused = list.contains(document.activeElement) ? document.activeElement.closest(".hit").dataset.id : null;
  showHits(list, hits, { open: openDocument, narrow: (name, value) => filters.add({ key: name, value }), filterable });
  list.scrollTop = 0;
  if (focused !== null) ([...list.children].find((hit) => hit.dataset.id === focused)?.querySelector(".open") ?? query).focus();
  list.dataset.query = asked;
  filters.offer(hits);
  map.light(hits);
  const isFiltered = filters.tree() !== null;
  const nothing = isFiltered ? "No document matches the filters." : "No document matches.";
  say(hits.length ? `${count(hits.length, "document")} in ${Math.round(milliseconds)} ms · generation ${generation}` : nothing);
  unfilter.hidden = hits.length > 0 || !isFiltered;
  if (generation !== served.generation) describe();
}

function say(sentence) {
  said = sentence;
  status.textContent = sentence;
  unfilter.hidden = true;
}

/** Say why an answer is waited for in the place of what was said, which comes back. */
function sayWaiting({ detail }) {
  if (status.textContent !== (detail || said)) status.textContent = detail || said;
}

function fail(error) {
  if (error.status === 401) return askForKey(key.get() ? error.message : "This server needs one.");
  tell(error.message);
}

function tell(sentence) {
  notice.hidden = false;
  complaint.textContent = sentence;
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
  reader.open(served.name, hit, passage);
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
  lookInside();
}

/** Load what is looked at, and the map in any case: it knows what the clusters speak of. */
function lookInside() {
  if (served === null) return;
  map.use(served.name);
  if (main.dataset.view === "health") health.use(served.name);
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

/** Call off what was asked of the list or of a collection before: whatever comes of it is late. */
function begin() {
  beginning.abort();
  beginning = new AbortController();
  return beginning.signal;
}

async function loadCollections() {
  const signal = begin();
  try {
    showCollections((await get("collections", signal)).collections);
  } catch (error) {
    if (!signal.aborted) fail(error);
  }
}

function showCollections(found) {
  const ready = found.filter((collection) => collection.status === "ready").map(({ name }) => name);
  collections.replaceChildren(...ready.map((name) => make("option", { value: name }, name)));
  notice.hidden = ready.length > 0;
  again.hidden = false;
  const others = found.map((collection) => `${collection.name} ${whyUnready(collection)}`);
  const none = ["There is no collection to search yet: ", make("code", {}, "ingest SOURCE --collection NAME"), " makes one."];
  complaint.replaceChildren(...(others.length ? [`Nothing can be searched yet: ${others.join(", ")}.`] : none));
  if (!ready.length) return;
  if (!wanted.collection || ready.includes(wanted.collection)) return useCollection(wanted.collection || ready[0]);
  collections.value = "";
  const unready = found.find(({ name }) => name === wanted.collection);
  tell(`The collection “${wanted.collection}” ${unready ? whyUnready(unready) : "is not here"}: choose another one.`);
}

const whyUnready = ({ status: state }) => (state === "building" ? "is being built" : "is damaged");

function useCollection(name) {
  letGo();
  collections.value = wanted.collection = name;
  describe();
}

/** Show nothing of the collection any more: what is still asked of it is called off, and nothing is asked until one is described. */
function letGo() {
  beginning.abort();
  search.cancel();
  served = null;
  showNothing();
  suggest([]);
  reader.reset();
  for (const panel of [map, health]) panel.forget();
  if (main.dataset.view === "document") look("find");
  holds.textContent = "";
  addFilter.disabled = true;
}

/** Show what the collection holds and can be asked; called again when an answer is of another generation. */
async function describe() {
  const signal = begin();
  try {
    take(await get(collectionPath(wanted.collection), signal));
  } catch (error) {
    if (!signal.aborted) fail(error);
  }
}

function take(described) {
  const before = served;
  if (before !== null && before.generation !== described.generation) for (const panel of [map, health]) panel.forget();
  served = described;
  addFilter.disabled = false;
  lookInside();
  filters.use(described.filter_columns);
  holds.textContent = `${count(described.documents, "document")} · generation ${described.generation}`;
  document.title = `${described.name} · Cairn`;
  rerank.parentElement.hidden = !described.reranks;
  const isAskedInVain = rerank.checked && !described.reranks;
  if (isAskedInVain) rerank.checked = false;
  if (wanted.filters !== null && !restoreFilters()) {
    search.cancel();
    return tell("The filters of this address cannot be shown here. Try again without them.");
  }
  if (before === null || isAskedInVain) askNow();
}

function askForKey(sentence) {
  byId("key-complaint").textContent = sentence;
  if (dialog.open) return;
  keyValue.value = "";
  byId("key-forget").hidden = !key.get();
  dialog.returnValue = "";
  dialog.showModal();
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

/** What waits for the server stays as the address has it. */
function remember() {
  const state = new URLSearchParams({ collection: wanted.collection, q: query.value });
  if (granularity() !== "both") state.set("granularity", granularity());
  if (!hybrid.checked) state.set("bm25", "off");
  if (!words.checked) state.set("words", "off");
  if (rerank.checked) state.set("rerank", "on");
  const tree = wanted.filters ?? JSON.stringify(filters.tree());
  if (tree !== "null") state.set("filters", tree);
  history.replaceState(null, "", `#${state}`);
}

/** Set what needs no server. Text typed before this script loaded, or later, is kept. */
function restore(hash, typed = "") {
  const state = new URLSearchParams(hash.slice(1));
  query.value = typed || (state.get("q") ?? query.value);
  hybrid.checked = state.get("bm25") !== "off";
  words.checked = state.get("words") !== "off";
  rerank.checked = state.get("rerank") === "on";
  const choices = [...document.getElementsByName("granularity")];
  const chosen = choices.find((choice) => choice.value === state.get("granularity")) ?? choices.find((choice) => choice.value === "both");
  chosen.checked = true;
  wanted = { collection: state.get("collection") ?? wanted.collection, filters: state.get("filters") ?? "null" };
}

/** Make rows of the address's filters and say whether they mean the same: an answer to less than was asked would be another answer. */
function restoreFilters() {
  const text = wanted.filters;
  wanted.filters = null;
  try {
    if (filters.restore(JSON.parse(text))) return true;
  } catch {
    // a mistyped address
  }
  filters.clear();
  return false;
}

/** Follow an address that was changed by hand; the list of collections may be another one by now. */
function follow({ newURL }) {
  letGo();
  restore(new URL(newURL).hash);
  loadCollections();
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
for (const choice of [hybrid, words, rerank, byId("granularity")]) choice.addEventListener("change", askNow);
addFilter.addEventListener("click", () => filters.add());
unfilter.addEventListener("click", () => (filters.clear(), query.focus(), askNow()));
again.addEventListener("click", () => (query.focus(), served === null ? loadCollections() : (lookInside(), askNow())));
byId("search").addEventListener("submit", (event) => {
  event.preventDefault();
  askNow();
});
document.addEventListener(WAITING, sayWaiting);
addEventListener("hashchange", follow);
collections.addEventListener("change", () => (useCollection(collections.value), remember()));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => map.redraw());
showTheme();
look("find");
restore(location.hash, query.value);
loadCollections();
