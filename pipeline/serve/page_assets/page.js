// The page: what is asked, what came back, what is open, and the keys that move between them.

import { asksTheSame, readAddress, writeAddress } from "./address.js";
import { collectionPath, documentPath, get, key, post, remove, WAITING } from "./api.js";
import { byId, make } from "./dom.js";
import { keepExcerptsFitting } from "./excerpt.js";
import { Filters } from "./filters.js";
import { count, digits } from "./formats.js";
import { Health } from "./health.js";
import { moveAmongHits, showHits } from "./hits.js";
import { KeyDialog } from "./key_dialog.js";
import { LiveSearch } from "./live_search.js";
import { CorpusMap } from "./map.js";
import { Reader } from "./reader.js";
import { term } from "./term.js";
import { ThemeButton } from "./theme_button.js";
import { Uploads } from "./uploads.js";
import { Views } from "./views.js";

const TOP_K = 20;
const RERANK_REST_MILLISECONDS = 600;
const SUGGESTIONS = 18;
const PASSAGES = 3;
const OPTIONS = [
  ["Both", "Rank documents by their own vector and by their best passage's."],
  ["Documents", "Rank by one vector for each document."],
  ["Passages", "Rank by the best passage of each document."],
  ["BM25", "Count the query's words, too, rare ones more. Finds names and codes that vectors miss."],
  ["Words", "Compare the best passages with the query word by word, and underline the words that answer."],
  ["Rerank", "Let the server's cross-encoder read the best passages together with the query: better, and slower."],
];

const [query, list, status, notice, main] = ["query", "hits", "status", "notice", "main"].map(byId);
const [collections, hybrid, words, rerank, holds] = ["collection", "hybrid", "words", "rerank", "holds"].map(byId);
const [welcome, unfilter, addFilter, warned] = ["welcome", "unfilter", "add-filter", "warnings"].map(byId);
const [complaint, again] = notice.children;

let said = "";
let beginning = new AbortController();
/** What the server says of the collection that is wanted; null before: then it may be typed and switched, and nothing is asked. */
let served = null;
/** The collection of the address or of the list, and the address's filters and document: null once they are shown. All wait for the server. */
let wanted = { collection: "", filters: null, document: null };
let answered = [];
let openedFrom = { view: "find", element: null };

const filters = new Filters(byId("filters"), () => ask());
const views = new Views(main, { shown: lookInside, chosen: () => remember() });
const keyDialog = new KeyDialog();
const reader = new Reader(byId("document"), { close: closeDocument, remove: deleteDocument, moved: () => remember(), fail });
const uploads = new Uploads(byId("uploads"), { added: refresh, create: createCollection });
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
  if (wanted.document !== null) openWanted();
}

const askNow = () => ask({ rest: 0 });

function showNothing() {
  if (list.contains(document.activeElement)) query.focus();
  list.replaceChildren();
  warned.replaceChildren();
  answered = [];
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

function show({ query: asked, hits, warnings, generation, milliseconds }) {
  notice.hidden = true;
  welcome.hidden = true;
  answered = hits;
  const focused = list.contains(document.activeElement) ? document.activeElement.closest(".hit").dataset.id : null;
  showHits(list, hits, { open: openDocument, narrow: (name, value) => filters.add({ key: name, value }), types: types() });
  list.scrollTop = 0;
  if (focused !== null) ([...list.children].find((hit) => hit.dataset.id === focused)?.querySelector(".open") ?? query).focus();
  list.dataset.query = asked;
  filters.offer(hits);
  map.light(hits);
  const isFiltered = filters.tree() !== null;
  const nothing = isFiltered ? "No document matches the filters." : "No document matches. Try other words, or fewer.";
  warned.replaceChildren(...warnings.map((sentence) => make("li", {}, sentence)));
  say(hits.length ? `${count(hits.length, "document")} in ${digits(Math.round(milliseconds))} ms` : nothing);
  unfilter.hidden = hits.length > 0 || !isFiltered;
  if (wanted.document !== null) openWanted();
  if (generation !== served.generation) describe();
}

/** The type of each column that filters take. */
const types = () => new Map(served.filter_columns.map(({ name, type }) => [name, type]));

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
  if (error.status === 401) return keyDialog.ask(key.get() ? error.message : "This server needs one.");
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
  if (views.shown !== "document") openedFrom = { view: views.shown, element: document.activeElement };
  else openedFrom.element = document.activeElement;
  read(hit, passage);
  remember({ isStep: true });
}

/** Open the document of the address, with its passages where the answer has it. */
function openWanted() {
  const { id, passage } = wanted.document;
  wanted.document = null;
  read(answered.find((hit) => hit.doc_id === id) ?? { doc_id: id, passages: [] }, passage);
}

function read(hit, passage) {
  views.show("document");
  mark(hit.doc_id);
  reader.open(served.name, types(), hit, passage);
}

function closeDocument() {
  leaveDocument(openedFrom.view);
  remember({ isStep: true });
}

function leaveDocument(view) {
  reader.reset();
  mark(null);
  views.show(view);
  (openedFrom.element?.isConnected ? openedFrom.element : query).focus();
}

async function deleteDocument(id, title) {
  const { name } = served;
  if (!confirm(`Delete “${title}” from ${name}? Searches will not find it any more.`)) return;
  try {
    await remove(`${documentPath(name, id)}?wait=searchable`);
    if (reader.place?.id === id) closeDocument();
    refresh(name);
  } catch (error) {
    fail(error);
  }
}

/** Show a collection as it is now, after a change of its documents. */
function refresh(name) {
  if (served === null) loadCollections();
  if (served?.name !== name) return;
  describe();
  if (query.value.trim()) askNow();
}

function mark(id) {
  for (const item of list.children) item.classList.toggle("opened", item.dataset.id === id);
}

/** Load what is looked at, and the map in any case: it knows what the clusters speak of. */
function lookInside() {
  if (served === null) return;
  map.use(served.name);
  if (views.shown === "health") health.use(served.name);
}

/** Offer what the clusters speak of to who does not know what to ask. */
function suggest(names) {
  const offer = (name) => make("button", { class: "chip", type: "button", dir: "auto", on: { click: () => ((query.value = name), query.focus(), askNow()) } }, name);
  byId("suggestions").replaceChildren(...[...new Set(names)].slice(0, SUGGESTIONS).map((name) => make("li", {}, offer(name))));
}

function pointAt(id) {
  for (const item of list.children) item.classList.toggle("pointed", item.dataset.id === id);
}

const lookAt = (event) => map.lookAt(event.target.closest(".hit")?.dataset.id ?? null);
for (const event of ["focusin", "focusout", "pointerover", "pointerleave"]) list.addEventListener(event, lookAt);
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
    const { collections: found, is_writable: isWritable } = await get("collections", signal);
    showCollections(found, isWritable);
    if (!collections.length && isWritable) uploads.use(found.find(({ status: state }) => state === "empty")?.name ?? "");
  } catch (error) {
    if (!signal.aborted) fail(error);
  }
}

function showCollections(found, isWritable) {
  const ready = found.filter((collection) => collection.status === "ready").map(({ name }) => name);
  collections.replaceChildren(...ready.map((name) => make("option", { value: name }, name)));
  notice.hidden = ready.length > 0;
  again.hidden = false;
  const others = found.map((collection) => `${collection.name} ${whyUnready(collection)}`);
  const none = ["There is no collection to search yet: ", make("code", {}, "ingest SOURCE --collection NAME"), ` makes one${isWritable ? ", and so do files that are dropped here" : ""}.`];
  complaint.replaceChildren(...(others.length ? [`Nothing can be searched yet: ${others.join(", ")}.`] : none));
  if (!ready.length) return;
  if (!wanted.collection || ready.includes(wanted.collection)) return useCollection(wanted.collection || ready[0]);
  collections.value = "";
  const unready = found.find(({ name }) => name === wanted.collection);
  tell(`The collection “${wanted.collection}” ${unready ? whyUnready(unready) : "is not here"}: choose another one.`);
}

const WHY_UNREADY = { building: "is being built", empty: "has no documents yet", unfinished: "was not ingested to its end", damaged: "is damaged" };
const whyUnready = ({ status: state }) => WHY_UNREADY[state];

/** Make a collection for files that are added where there is none; give its name, null where that is not wanted or refused. */
async function createCollection() {
  const name = prompt("There is no collection yet. Name of the new one:", "documents")?.trim().toLowerCase().replace(/\s+/g, "-");
  if (!name) return null;
  try {
    return (await post("collections", { name })).name;
  } catch (error) {
    fail(error);
    return null;
  }
}

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
  uploads.use(null);
  for (const panel of [map, health]) panel.forget();
  if (views.shown === "document") views.show("find");
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
  reader.canDelete = described.is_writable;
  uploads.use(described.is_writable ? described.name : null);
  addFilter.disabled = false;
  lookInside();
  filters.use(described.filter_columns);
  const generation = term(`generation ${digits(described.generation)}`, "A generation is one complete state of the collection. Each ingest that changes something publishes the next.");
  holds.replaceChildren(`${count(described.documents, "document")} · `, generation);
  rerank.parentElement.hidden = !described.reranks;
  const isAskedInVain = rerank.checked && !described.reranks;
  if (isAskedInVain) rerank.checked = false;
  if (wanted.filters !== null && !restoreFilters()) {
    search.cancel();
    return tell("The filters of this address cannot be shown here. Try again without them.");
  }
  if (before === null || isAskedInVain) askNow();
}

// ---- what is asked and open, in the address

/** What waits for the server stays as the address has it. `isStep` makes it a step that Back undoes. */
function remember(options) {
  const state = {
    collection: wanted.collection,
    query: query.value,
    granularity: granularity(),
    hybrid: hybrid.checked,
    words: words.checked,
    rerank: rerank.checked,
    filters: wanted.filters ?? JSON.stringify(filters.tree()),
    view: views.address,
    document: wanted.document ?? reader.place,
  };
  writeAddress(state, options);
  document.title = [reader.title, served?.name, "Cairn"].filter(Boolean).join(" · ");
}

/** Set what needs no server. Text typed before this script loaded, or later, is kept. */
function restore(state, typed = "") {
  query.value = typed || state.query;
  hybrid.checked = state.hybrid;
  words.checked = state.words;
  rerank.checked = state.rerank;
  const choices = [...document.getElementsByName("granularity")];
  const chosen = choices.find((choice) => choice.value === state.granularity) ?? choices.find((choice) => choice.value === "both");
  chosen.checked = true;
  wanted = { collection: state.collection || wanted.collection, filters: state.filters, document: state.document };
  views.show(state.view);
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

/** Follow Back, Forward and an address that was changed by hand; the list of collections may be another one by now. */
function follow({ oldURL, newURL }) {
  const [before, now] = [oldURL, newURL].map((url) => readAddress(new URL(url).hash));
  if (served === null || !asksTheSame(before, now)) {
    letGo();
    restore(now);
    loadCollections();
  } else if (now.document !== null) {
    wanted.document = now.document;
    openWanted();
  } else if (reader.isOpen) {
    leaveDocument(now.view);
  } else {
    views.show(now.view);
  }
}

// ---- keys

const isTyping = (element) => element.matches("input:not([type=radio], [type=checkbox]), select, textarea");

document.addEventListener("keydown", (event) => {
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || keyDialog.isOpen || document.querySelector(":popover-open")) return;
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
keepExcerptsFitting(list);
collections.addEventListener("change", () => ((wanted.document = null), useCollection(collections.value), remember()));
byId("options-help").append(term("?", ...OPTIONS.map(([name, meaning]) => make("span", {}, make("strong", {}, name), ` ${meaning}`))));
byId("options-help").querySelector("button").setAttribute("aria-label", "What these options mean");
new ThemeButton(byId("theme"), () => map.redraw());
restore(readAddress(location.hash), query.value);
loadCollections();
