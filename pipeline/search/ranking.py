"""From query vectors to ranked documents: nominate, score exactly, fuse.

``document`` ranks by the cosine of the document vector, ``chunk`` by that of the best stored chunk, ``both``
by their weighted mean. ``hybrid`` combines that dense score with BM25 (``fusion`` says how): that of
title and text, and that of its best passage. A query none of whose words is indexed is answered by the dense
score alone. Scores are cosines in dense answers; in hybrid ones the best possible is 1. A text is read only
where a budget of characters passes over copies.

    document                                       passage
    ¼ cosine ┐                                     cosine ┐
             ├─ dense ─┐                                  ├─ own, and half of its neighbours' ─┐
    ¾ best chunk ┘     ├─ score  ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ BM25 ┘              ½ of that, ½ its document's score
    ½ BM25 ┐           │       └───────────────────────────────────────────────────────────────┘
           ├─ lexical ─┘
    ½ best passage's BM25 ┘

The chunk part is the best single landmark whatever the size of the passages: the nominating index ranks by
just that, and it finds more. nDCG@10 of ``both`` with the best landmark / the best sliding pair
(all-MiniLM-L6-v2, landmarks of 64 tokens): SQuAD articles .960 / .958, QMSum, 50 meetings, .510 / .498,
Cranfield .476 / .435, SQuAD passages .817 / .790; hybrid, mean of the four, .762 / .757.

Passages are windows of k neighbouring landmarks, their size chosen at query time:

    passages = 3             each document's best windows, none touching another
    max_characters = 2,000   windows of all candidates, best first; each adds what no better one holds;
                             neighbours become one passage; what repeats another document is passed over

With a budget, the text around the best place is read before the next place. The reasons are in
docs/design/decisions/reading-on.md. Copies cost a budget nothing: see :class:`ShownTexts`. A window never
crosses into another document, and a document with fewer than k chunks is one window.

Windows slide because the passage a query asks for rarely starts where a fixed group would. Share of the
evidence within the best 2,000 characters of a collection (all-MiniLM-L6-v2, landmarks of 64 tokens, 20 whole
articles of SQuAD, 600 questions): single landmarks .559, fixed pairs .586, sliding pairs .612.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import numpy as np
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.index.generation import Generation, table_errors
from cairn.pipeline.ragged import ranges
from cairn.pipeline.search.diversity import chosen_places, group_codes, groups_of, still_allowed
from cairn.pipeline.search.fusion import (
    COSINES_OF,
    Fusion,
    JudgedWindows,
    LateFusion,
    LateQuery,
    at_least_nth,
    best_first,
    best_places,
    document_scores,
    judge_windows,
    passage_scores,
)
from cairn.pipeline.search.reader import (
    Alone,
    CandidateScores,
    Found,
    IndexReader,
    NearestAsked,
    Nominate,
    Nominees,
    ScoredWindows,
    ScoresAsked,
    WordsAsked,
    WordScores,
    merge_nominees,
    score_windows,
)
from cairn.pipeline.search_options import SearchOptions
from cairn.pipeline.types import RESERVED_COLUMNS
from cairn.pipeline.vector_index.faiss_index import one_faiss_thread
from jaxtyping import Float, Float32, Float64, Int64

LEXICAL_PARTS = ("bm25", "passage_bm25", "sparse")
MAX_GROUP_SEARCHES: Final = 8
"""Searches after the first, each without the groups that are full; each finds one more group at least."""
BY_VECTORS_ALONE = "no word of the query carries weight: ranked by vectors alone"

NO_WORD = "no word of the query stands in a document, and nothing encodes queries here: nothing was ranked"


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedSearch:
    """One call: its generation and how it is read, its checked options and what they resolve to.

    ``queries`` is None where only vectors are known, ``sparse`` where the collection has no sparse encoder or
    it has no say. ``window`` is the number of chunks in a passage,
    ``ranking_window`` that of the passages whose BM25 ranks documents, whatever size is asked for.
    ``allowed`` are the documents that may be found, ascending; None: all. With ``alone`` scores are made
    of what these documents have, and not of what the corpus has. ``unknown`` are the queries, by their
    places, of which the model knows no word.
    """

    generation: Generation
    reader: IndexReader
    options: SearchOptions
    queries: Sequence[str] | None
    window: int
    ranking_window: int
    allowed: Int64[np.ndarray, " A"] | None = None
    sparse: Sequence[Mapping[int, float]] | None = None
    alone: Alone | None = None
    unknown: Collection[int] = ()

    @property
    def languages(self) -> tuple[str, ...]:
        """The languages that queries are read in."""
        return self.generation.query_languages if self.alone is None else self.alone.languages

    @property
    def num_allowed(self) -> int:
        """Count the documents that may be found."""
        return self.generation.num_documents if self.allowed is None else len(self.allowed)

    def read_words(self, index: int) -> WordScores | None:
        """Return the BM25 of a query; None where BM25 has no say."""
        options = self.options
        if self.queries is None or not options.hybrid or options.weight("bm25") <= 0.0:
            return None
        is_shown = bool(options.passages) and self.window != self.ranking_window
        shown = self.window if is_shown else None
        limit, query = options.num_candidates, self.queries[index]
        asked = WordsAsked(query, self.ranking_window, shown, self.allowed, limit, self.alone)
        return self.reader.read_words(asked)

    def read_sparse(self, index: int) -> Found | None:
        """Return the best documents by a query's weights; None where they have no say or find nothing."""
        if self.sparse is None:
            return None
        found = self.reader.read_sparse(
            self.sparse[index], self.ranking_window, self.allowed, self.options.num_candidates
        )
        return found if len(found[0]) else None

    def named_document(self, index: int) -> int | None:
        """Return the position of the document whose id a query is; None where there is none."""
        if self.queries is None:
            return None
        position = self.generation.position_of(_as_id(self.queries[index]))
        is_allowed = position is not None and (self.allowed is None or position in self.allowed)
        return position if is_allowed else None


def _as_id(query: str) -> str:
    return query.strip()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """The returned documents of one query, best first: everything a hit needs but its columns.

    ``parts`` are the scores a document's score was made of; ``passages`` is empty where none were asked for.
    ``warnings`` are sentences on what the answer lacks.
    """

    positions: Int64[np.ndarray, " K"]
    scores: Float64[np.ndarray, " K"]
    parts: Sequence[Mapping[str, float]]
    passages: Sequence[Sequence[ChosenPassage]]
    warnings: Sequence[str] = ()


NOTHING = Ranking(positions=np.empty(0, dtype=np.int64), scores=np.empty(0), parts=(), passages=())


def rank_queries(
    search: PreparedSearch,
    query_vectors: Float32[np.ndarray, "Q V"],
    late: Sequence[LateQuery | None] | None = None,
) -> list[Ranking]:
    """Rank documents for each L2-normalised query vector, with BM25 in hybrid searches of known texts.

    A query with ``late`` is judged by token vectors, too.
    A document whose id is the query comes first.
    """
    if not search.num_allowed:
        return [NOTHING] * len(query_vectors)
    # Threads that share one query wait for each other, spinning: they are for several.
    with one_faiss_thread() if len(query_vectors) == 1 else nullcontext():
        nominate = _nominate(search, query_vectors, search.queries)
    with one_faiss_thread():
        return [
            _ranking(search, index, vector_V, nominate, late) for index, vector_V in enumerate(query_vectors)
        ]


def _ranking(
    search: PreparedSearch,
    index: int,
    vector_V: Float32[np.ndarray, " V"],
    nominate: Nominate,
    late: Sequence[LateQuery | None] | None,
) -> Ranking:
    """Rank documents for the query with this index."""
    late_query = None if late is None else late[index]
    is_known = index not in search.unknown
    words, sparse = search.read_words(index), search.read_sparse(index)
    asked = _scores_asked(search, words, sparse, is_judged=late_query is not None)
    nominees = nominate(index, asked)  # a reader of shards asks them for words, id and scores, too
    named = search.named_document(index)
    found_by_words = sparse is not None or any(map(len, words.nominees if words else ()))
    if not vector_V.any() and named is None and not found_by_words:
        return replace(NOTHING, warnings=[NO_WORD])
    candidates = _score(search, vector_V, asked, nominees, sparse, late_query, named, is_known)
    chosen = _chosen(search, candidates)
    narrower: PreparedSearch | None = search
    for _ in range(MAX_GROUP_SEARCHES):
        narrower = _without_full_groups(narrower, candidates, chosen)
        if narrower is None:
            break
        words_left, sparse_left = narrower.read_words(index), narrower.read_sparse(index)
        asked = _scores_asked(narrower, words_left, sparse_left, is_judged=late_query is not None)
        nominees = _nominate(narrower, vector_V[None])(0, asked)
        candidates = _score(narrower, vector_V, asked, nominees, sparse_left, late_query, named, is_known)
        chosen = _chosen(narrower, candidates)
    ranking = _rank(search, candidates, chosen)
    by_words = words.nominees if words else ()
    is_unjudged = late is not None and late_query is None
    if is_unjudged and sparse is None and not any(map(len, by_words)):
        ranking = replace(ranking, warnings=[*ranking.warnings, BY_VECTORS_ALONE])
    return ranking


def _with_named(candidates: _Candidates, named: int | None) -> _Candidates:
    """Score the document that a query names above all others."""
    if named is None:
        return candidates
    scores_N = candidates.scores.copy()
    scores_N[np.searchsorted(candidates.positions, named)] = np.nextafter(max(1.0, scores_N.max()), 2.0)
    return replace(candidates, scores=scores_N)


def _nominate(
    search: PreparedSearch,
    query_vectors: Float32[np.ndarray, "Q V"],
    queries: Sequence[str] | None = None,
) -> Nominate:
    options = search.options
    # Where nothing encodes queries, words alone nominate.
    cosines = COSINES_OF[options.granularity] if query_vectors.any() else ()
    num_documents = min(options.num_candidates, search.num_allowed)
    return search.reader.nominate(
        query_vectors,
        NearestAsked(
            num_documents=num_documents if "document" in cosines else None,
            num_chunks=options.num_candidates if "chunk" in cosines else None,
            min_documents=min(options.min_documents, search.num_allowed),
            allowed=search.allowed,
            ids=None if queries is None else [_as_id(query) for query in queries],
        ),
    )


def _scores_asked(
    search: PreparedSearch, words: WordScores | None, sparse: Found | None, *, is_judged: bool
) -> ScoresAsked:
    """Return what is asked of candidates; ``is_judged`` says that token vectors will judge their windows."""
    options, size = search.options, None
    if is_judged:
        size = search.ranking_window
    elif options.passages or options.max_characters is not None:
        size = search.window
    others = () if sparse is None else sparse[:1]
    return ScoresAsked(parts=COSINES_OF[options.granularity], words=words, size=size, others=others)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidates:
    """One query and its candidates with their scores.

    ``fusion`` is None where BM25 has no say. ``late`` is what token vectors said, and how it was fused.
    """

    words: WordScores | None
    positions: Int64[np.ndarray, " N"]
    stored: CandidateScores
    scores: Float64[np.ndarray, " N"]
    parts: Mapping[str, Float32[np.ndarray, " N"]]
    fusion: Fusion | None
    average_chunk: float
    late: _Late | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Late:
    query: LateQuery
    judged: JudgedWindows
    fusion: LateFusion


def _score(
    search: PreparedSearch,
    vector_V: Float32[np.ndarray, " V"],
    asked: ScoresAsked,
    nominees: Nominees,
    sparse: Found | None,
    late_query: LateQuery | None,
    named: int | None,
    is_known: bool,
) -> _Candidates:
    """Score every nominated document; token vectors judge where there is a ``late_query``.

    ``named`` is the document whose id the query is; ``is_known`` says whether the model knows a word of it.
    """
    generation, options, words = search.generation, search.options, asked.words
    by_words = [*(words.nominees if words else ()), *asked.others]
    by_id = () if named is None else (np.array([named]),)
    positions = merge_nominees(generation, [*by_id, *nominees.lists, *by_words], options.min_documents)
    stored = nominees.score(positions)
    parts: dict[str, Float32[np.ndarray, " N"]] = {}
    if "document" in asked.parts:
        parts["document"] = stored.documents()
    if "chunk" in asked.parts:
        parts["chunk"] = stored.chunks()
    if words is not None and len(words.documents):
        parts["bm25"] = stored.words()
    if words is not None and words.has_passages:
        parts["passage_bm25"] = stored.passages()
    if sparse is not None:
        parts["sparse"] = _spread(positions, *sparse)
    alone = search.alone
    mean_chunk_V = generation.mean_chunk_vector if alone is None else alone.mean_chunk_V
    average_chunk = float(mean_chunk_V @ vector_V)
    scores, fusion = document_scores(
        options,
        parts,
        bm25_N=parts.get("bm25"),
        passage_bm25_N=parts.get("passage_bm25"),
        sparse_N=parts.get("sparse"),
        average_chunk=average_chunk,
        is_known=is_known,
    )
    candidates = _Candidates(
        words=words,
        positions=positions,
        stored=stored,
        scores=scores,
        parts=parts,
        fusion=fusion,
        average_chunk=average_chunk,
    )
    if late_query is not None:
        candidates = _with_late(search, candidates, late_query)
    return _with_named(candidates, named)


def _with_late(search: PreparedSearch, candidates: _Candidates, query: LateQuery) -> _Candidates:
    """Add to every document's score the MaxSim of its best window, 0 where none was judged."""
    every = np.arange(len(candidates.positions))
    windows = _score_windows(search, candidates, every, search.ranking_window)
    max_sim = partial(candidates.stored.max_sim, query)
    judged = judge_windows(max_sim, windows.scores, windows.places)
    fusion = LateFusion.of(candidates.scores, candidates.fusion, candidates.average_chunk)
    document_J = search.generation.owners_of(judged.first_J)
    max_sim_N = np.full(len(candidates.positions), judged.low, np.float32)
    np.maximum.at(max_sim_N, np.searchsorted(candidates.positions, document_J), judged.max_sim_J)
    return replace(
        candidates,
        scores=fusion.documents(candidates.scores, judged.scaled(max_sim_N)),
        parts={**candidates.parts, "late": max_sim_N},
        late=_Late(query=query, judged=judged, fusion=fusion),
    )


def _chosen(search: PreparedSearch, candidates: _Candidates) -> Int64[np.ndarray, " K"]:
    """Return the candidates that an answer has, in its order; those of all pages where it is diversified."""
    options, generation = search.options, search.generation
    if not options.is_diversified:
        last = options.offset + options.top_k
        return _best_first(search, candidates, at_least_nth(candidates.scores, last))[:last]
    ranked = _best_first(search, candidates, np.arange(len(candidates.positions)))
    if options.mmr is not None:
        ranked = ranked[: options.num_candidates]
    positions = candidates.positions[ranked]
    places = chosen_places(
        candidates.scores[ranked],
        options.min_documents,
        groups_N=None if options.group_by is None else groups_of(generation, options.group_by, positions),
        group_size=options.group_size,
        vectors_NV=None if options.mmr is None else generation.documents.reconstruct(positions),
        mmr=1.0 if options.mmr is None else options.mmr,
    )
    return ranked[places]


def _without_full_groups(
    search: PreparedSearch, candidates: _Candidates, chosen: Int64[np.ndarray, " K"]
) -> PreparedSearch | None:
    """Return a search that passes over further documents of groups that are full.

    None where enough documents were found, or there are no others.
    """
    options = search.options
    if options.group_by is None or len(chosen) >= options.min_documents:
        return None
    groups = group_codes(search.generation, options.group_by)
    found = candidates.positions[chosen]
    allowed = still_allowed(groups, options.group_size, found, search.allowed)
    return None if len(allowed) in (len(found), search.num_allowed) else replace(search, allowed=allowed)


def _rank(search: PreparedSearch, candidates: _Candidates, chosen: Int64[np.ndarray, " K"]) -> Ranking:
    """Choose the passages of what is returned, and within a budget of characters the documents, too."""
    options, generation = search.options, search.generation
    warnings: list[str] = []
    if options.max_characters is None:
        best = chosen[options.offset : options.offset + options.top_k]
        passages: Sequence[Sequence[ChosenPassage]] = [()] * len(best)
        if options.passages:
            windows = _score_windows(search, candidates, best, search.window)
            passages = best_of_each(windows, len(best), search.window, options.passages)
    else:
        among = np.arange(len(candidates.positions))
        if options.is_diversified:
            among = np.sort(chosen[: options.top_k])
        windows = _score_windows(search, candidates, among, search.window)
        span_of, limits = _span_of(generation, windows), (options.max_characters, options.top_k)
        found = best_within(windows, span_of, *limits)
        if len(found) > 1:
            text_of = _texts_of(search, candidates.positions[among], list(found))
            found = best_within(windows, span_of, *limits, text_of)
        best = _best_first(search, candidates, among[sorted(found)])
        passages = [found[place] for place in np.searchsorted(among, best).tolist()]
        if not found:
            most = int(windows.scores.argmax())
            start, end = span_of(int(windows.places.first_W[most]), int(windows.places.end_W[most]))
            warnings.append(budget_warning(options.max_characters, end - start))
    return Ranking(
        positions=candidates.positions[best],
        scores=candidates.scores[best],
        parts=[_parts_of(candidates.parts, index) for index in best.tolist()],
        passages=passages,
        warnings=warnings,
    )


def _span_of(generation: Generation, windows: ScoredWindows) -> Callable[[int, int], tuple[int, int]]:
    """Return what gives start and end, in characters, of a run of chunks within a window."""
    first_W, end_W, _ = windows.places
    chunk_C = np.unique(ranges(first_W, end_W - first_W))
    start_C, end_C = generation.spans_of(chunk_C, chunk_C + 1)

    def span_of(first: int, end: int) -> tuple[int, int]:
        return int(start_C[np.searchsorted(chunk_C, first)]), int(end_C[np.searchsorted(chunk_C, end - 1)])

    return span_of


def columns_shown(search: PreparedSearch) -> list[str]:
    """Return the columns of documents that an answer shows."""
    metadata = [name for name in search.generation.document_schema.names if name not in RESERVED_COLUMNS]
    return ["doc_id", "title", *(["text", "source_file"] if search.options.passages else []), *metadata]


def _texts_of(
    search: PreparedSearch, positions: Int64[np.ndarray, " N"], likely: Sequence[int]
) -> Callable[[int], str]:
    """Return what gives a document's text; the likely ones are read in one look, as the answer reads them."""
    generation, columns, texts = search.generation, columns_shown(search), dict[int, str]()

    def read(places: Sequence[int]) -> None:
        with table_errors("reading the answer's documents", generation.layout):
            rows = generation.fetch_documents(positions[list(places)], columns)
        texts.update(zip(places, rows.column("text").to_pylist(), strict=True))

    def text_of(place: int) -> str:
        if place not in texts:
            read([place])
        return texts[place]

    read(likely)
    return text_of


def _best_first(
    search: PreparedSearch, candidates: _Candidates, few: Int64[np.ndarray, " A"]
) -> Int64[np.ndarray, " A"]:
    """Order some candidates by score, ties by id, which is read only where there are any."""
    scores = candidates.scores[few]
    if len(np.unique(scores)) == len(few):
        return few[np.argsort(-scores)]
    doc_ids = search.generation.ids_of(candidates.positions[few])
    return few[best_first(scores, doc_ids, len(few))]


def _parts_of(parts: Mapping[str, Float32[np.ndarray, " N"]], index: int) -> dict[str, float]:
    """Return one document's parts; without those of BM25 where no word was found."""
    return {
        part: float(scores[index])
        for part, scores in parts.items()
        if part not in LEXICAL_PARTS or scores[index] > 0.0
    }


def _score_windows(
    search: PreparedSearch, candidates: _Candidates, chosen: Int64[np.ndarray, " K"], size: int
) -> ScoredWindows:
    """Score all windows of ``size`` chunks of some candidates."""
    stored = candidates.stored.windows(chosen, size)
    windows = score_windows(search.generation, candidates.positions[chosen], size, stored.cosine_W)
    parts, own, fusion, words = dict(windows.parts), windows.scores, candidates.fusion, candidates.words
    document_W = candidates.scores[chosen][windows.owner]
    if fusion is not None:
        if size != search.ranking_window:
            fusion = fusion.with_windows(None if words is None else words.shown_high)
        if stored.words_W is not None:
            parts["bm25"] = stored.words_W
        own = fusion.passages(parts["chunk"], parts.get("bm25"))
    if candidates.late is not None:
        scores = passage_scores(search.options, own, windows.owner, document_W)
        max_sim = _late_of_windows(search, candidates, windows, scores, size)
        parts["late"] = max_sim
        own = candidates.late.fusion.passages(own, candidates.late.judged.scaled(max_sim))
    scores = passage_scores(search.options, own, windows.owner, document_W)
    return replace(windows, scores=scores, parts=parts)


def _late_of_windows(
    search: PreparedSearch,
    candidates: _Candidates,
    windows: ScoredWindows,
    scores_W: Float[np.ndarray, " W"],
    size: int,
) -> Float32[np.ndarray, " W"]:
    """Return MaxSim of windows: what was judged, or the best of another size judged now."""
    late = candidates.late
    assert late is not None, "only judged candidates have windows that were judged"
    if size == search.ranking_window:
        return late.judged.spread(windows.places.first_W)
    max_sim = partial(candidates.stored.max_sim, late.query)
    judged = judge_windows(max_sim, scores_W, windows.places)
    return np.maximum(judged.spread(windows.places.first_W), np.float32(late.judged.low))


def _spread(
    positions: Int64[np.ndarray, " N"], found: Int64[np.ndarray, " A"], scores: Float32[np.ndarray, " A"]
) -> Float32[np.ndarray, " N"]:
    """Lay the scores of some documents over ascending ``positions``; 0 where there is none."""
    spread = np.zeros(len(positions), dtype=np.float32)
    places = np.minimum(np.searchsorted(positions, found), len(positions) - 1)
    is_kept = positions[places] == found
    spread[places[is_kept]] = scores[is_kept]
    return spread


DEFAULT_CHUNK_TOKENS = 128
"""About a paragraph: long enough to be read alone, short enough to quote."""
COPIED_CHARACTERS = 32
"""Length of the stretches by which texts are compared, about five words; a shorter text may be said twice."""
FIRST_LOOK = 256
"""Windows sorted at first; all are when these are read to the end."""


def window_size(chunk_tokens: int | None, settings: Mapping[str, Any]) -> int:
    """Return how many landmarks make a passage of ``chunk_tokens``; ``settings`` are the manifest's.

    ``chunk_tokens`` must be a multiple of the stored landmark interval. None takes
    :data:`DEFAULT_CHUNK_TOKENS` where the interval divides it, else the interval itself.
    """
    interval = int(settings["encoder"]["landmark_interval"])
    default = interval * default_window(interval)
    wanted = default if chunk_tokens is None else chunk_tokens
    if wanted < interval or wanted % interval:
        allowed = f"{interval}, {2 * interval}, {3 * interval}, …; left out, it is {default}"
        raise ConfigError(
            f"chunk_tokens must be a multiple of this collection's {interval} ({allowed}), got {wanted}"
        )
    return wanted // interval


def default_window(interval: int) -> int:
    """Return how many landmarks make a passage where nothing else is asked for."""
    return 1 if DEFAULT_CHUNK_TOKENS % interval else DEFAULT_CHUNK_TOKENS // interval


def choose_windows(scores_W: Float[np.ndarray, " W"], size: int, limit: int) -> list[int]:
    """Return up to ``limit`` windows that share no landmark, best first, ties by place.

    What lies between two chosen windows and is shorter than ``size`` is in none.
    """
    left_W = scores_W.copy()
    chosen: list[int] = []
    while len(chosen) < limit:
        best = int(np.argmax(left_W))
        if left_W[best] == -np.inf:
            break
        chosen.append(best)
        left_W[max(best - size + 1, 0) : best + size] = -np.inf
    return chosen


def new_pieces(
    scores_W: Float[np.ndarray, " W"], first_W: Int64[np.ndarray, " W"], end_W: Int64[np.ndarray, " W"]
) -> Iterator[tuple[int, int, int]]:
    """Yield (window, first chunk, end chunk): of each window, best first, what no better one holds.

    So a good place grows by its neighbours, a landmark at a time, and nothing is read twice. A window held
    whole by better ones, and one that scores minus infinity, is left out. ``first_W`` and ``end_W`` are
    chunks of the whole collection; windows of a document are equally long.
    """
    taken: set[int] = set()
    for window in _windows_best_first(scores_W):
        if scores_W[window] == -np.inf:
            return
        new = [chunk for chunk in range(int(first_W[window]), int(end_W[window])) if chunk not in taken]
        # Neighbours: better windows hold stretches at least as long as this one, so never just its middle.
        if new:
            taken.update(new)
            yield window, new[0], new[-1] + 1


def _windows_best_first(scores_W: Float[np.ndarray, " W"]) -> Iterator[int]:
    """Yield windows by falling score, ties by place; sorting them all only where the best few do not do."""
    few = best_places(scores_W, FIRST_LOOK)
    yield from few.tolist()
    if len(few) < len(scores_W):
        yield from np.argsort(-scores_W, kind="stable")[len(few) :].tolist()


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenPassage:
    """Chunks ``first`` to ``end`` of the collection, read as one.

    Score and parts are those of its best window.
    """

    first: int
    end: int
    score: float
    parts: Mapping[str, float]


def best_of_each(
    scored: ScoredWindows, num_documents: int, size: int, limit: int
) -> list[list[ChosenPassage]]:
    """Return each document's best windows that share no chunk, best first, ties by place.

    A window that scores minus infinity is left out.
    """
    bounds = np.searchsorted(scored.owner, np.arange(num_documents + 1))
    first_W, end_W, _ = scored.places
    chosen: list[list[ChosenPassage]] = []
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        own = [start + window for window in choose_windows(scored.scores[start:stop], size, limit)]
        chosen.append([_passage(scored, window, int(first_W[window]), int(end_W[window])) for window in own])
    return chosen


class ShownTexts:
    """The stretches of text that an answer shows, white space aside, each with the document that has it."""

    def __init__(self) -> None:
        self._owners: dict[str, int] = {}

    def takes(self, owner: int, text: str) -> bool:
        """Take a passage in, unless other documents show half of it or more; a few words are no copy."""
        plain = " ".join(text.split())
        starts = range(len(plain) - COPIED_CHARACTERS + 1)
        stretches = {plain[start : start + COPIED_CHARACTERS] for start in starts}
        copied = sum(self._owners.get(stretch, owner) != owner for stretch in stretches)
        if stretches and 2 * copied >= len(stretches):
            return False
        for stretch in stretches:
            self._owners.setdefault(stretch, owner)
        return True


def best_within(
    scored: ScoredWindows,
    span_of: Callable[[int, int], tuple[int, int]],
    max_characters: int,
    max_documents: int,
    text_of: Callable[[int], str] | None = None,
) -> dict[int, list[ChosenPassage]]:
    """Return the pieces of all documents that are read within the budget, by document and best first.

    The first one that does not fit ends the selection. Once ``max_documents`` have a
    passage, those of others are passed over. ``span_of`` gives the characters of chunks from one to another.
    With the text of a document, what repeats others is passed over, too.
    """
    chosen: dict[int, list[ChosenPassage]] = {}
    characters, shown = 0, ShownTexts()
    for window, first, end in new_pieces(scored.scores, *scored.places[:2]):
        owner = int(scored.owner[window])
        if owner not in chosen and len(chosen) == max_documents:
            continue
        start_char, end_char = span_of(first, end)
        if text_of is not None and not shown.takes(owner, text_of(owner)[start_char:end_char]):
            continue
        characters += end_char - start_char
        if characters > max_characters:
            break
        chosen.setdefault(owner, []).append(_passage(scored, window, first, end))
    return chosen


def budget_warning(max_characters: int, smallest: int) -> str:
    """Say that no passage fits a budget, and the smallest that gives one."""
    return f"no passage fits in {max_characters:,} characters; ask for at least {smallest:,}"


def joined(pieces: Sequence[ChosenPassage]) -> list[ChosenPassage]:
    """Join pieces that stand side by side; the best one's score and parts stand for all."""
    merged: list[ChosenPassage] = []
    for piece in sorted(pieces, key=lambda piece: piece.first):
        if merged and merged[-1].end == piece.first:
            before = merged.pop()
            merged.append(
                replace(max(before, piece, key=lambda one: one.score), first=before.first, end=piece.end)
            )
        else:
            merged.append(piece)
    return sorted(merged, key=lambda piece: (-piece.score, piece.first))


def _passage(scored: ScoredWindows, window: int, first: int, end: int) -> ChosenPassage:
    parts = {
        part: float(scores[window])
        for part, scores in scored.parts.items()
        if part != "bm25" or scores[window] > 0.0
    }
    return ChosenPassage(first=first, end=end, score=float(scored.scores[window]), parts=parts)
