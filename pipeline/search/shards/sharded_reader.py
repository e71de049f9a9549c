"""An index reader that asks shards, each of which has some documents of the generation.

    round   asked of all shards                                        where
    0       counts of words, added up                                  a word was not counted before
    1       nearest documents and chunks, best by BM25, their scores
    2       MaxSim of the best windows                                 token vectors judge
    3       texts, spans, matches of tokens

The process that asks reads sampled vectors when it starts, and keeps counts of words. All else is read by the
shards. A search brings the scores of what is likely to be a candidate of the whole collection. Those of
others are asked for in one more round, which few queries take.

N items
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from itertools import chain
from operator import add
from typing import Final

import numpy as np
from cairn.pipeline.ragged import ranges
from cairn.pipeline.search.fusion import LateQuery, Windows
from cairn.pipeline.search.reader import (
    Found,
    MatchesAsked,
    NearestAsked,
    Nominate,
    Nominees,
    PassagesAsked,
    PassagesRead,
    ScoresAsked,
    TokenMatches,
    WindowScores,
    WordsAsked,
    best_by_id,
    documents_of_best_chunks,
    documents_of_chunks,
    windows_of_documents,
    words_asked,
)
from cairn.pipeline.search.shards.parts import (
    BestWords,
    PartFound,
    PartScores,
    ScoredAtOnce,
    SearchAsked,
    Words,
    WordTotals,
)
from cairn.pipeline.search.shards.sharded_generation import (
    Numbers,
    Places,
    ShardedGeneration,
    gathered,
    in_order,
    joined_matches,
)
from jaxtyping import Float32, Int64


def best(
    found: Mapping[int, Found],
    kind: Numbers,
    limit: int,
    ids_of: Callable[[Places], Sequence[str]] | None = None,
) -> Found:
    """Return the best of what several shards found, best first, ties by position.

    With ``ids_of``, which gives the ids of positions, ties at the end go to the lower id.
    """
    positions = np.concatenate([kind.positions(shard, own) for shard, (own, _) in found.items()])
    scores = np.concatenate([own for _, own in found.values()])
    order = np.lexsort((positions, -scores))
    if ids_of is not None:
        order = order[best_by_id(scores[order], limit, lambda tied: ids_of(positions[order[tied]]))]
    order = order[:limit]
    return positions[order], scores[order]


KEPT_TERMS: Final = 50_000
"""About 15 MB; with more, all are counted again."""


class CorpusTotals:
    """Totals of one generation, counted by its shards; safe to share between threads."""

    def __init__(self, generation: ShardedGeneration) -> None:
        self._shards, self._languages = generation.shards, generation.query_languages
        self._held: dict[str, tuple[int, int, int]] = {}
        self._lengths: dict[int, WordTotals] = {}

    def of(self, query: str, sizes: Sequence[int]) -> WordTotals:
        """Return the totals for the words of a query, those of passages by the sizes of their windows."""
        terms = dict.fromkeys(chain.from_iterable(words_asked(query, self._languages)))
        held = {term: known for term in terms if (known := self._held.get(term)) is not None}
        unknown = [term for term in terms if term not in held]
        if unknown or any(size not in self._lengths for size in sizes):
            held |= self._count(unknown, sizes)
        text, title = self._lengths[sizes[0]].documents
        of_text, of_title, of_chunks = (
            {term: counts[kind] for term, counts in held.items()} for kind in range(3)
        )
        passages = {size: self._lengths[size].passages[size] for size in sizes}
        return WordTotals(
            documents=(replace(text, holding=of_text), replace(title, holding=of_title)),
            passages={
                size: (windows, replace(chunks, holding=of_chunks))
                for size, (windows, chunks) in passages.items()
            },
        )

    def _count(self, terms: Sequence[str], sizes: Sequence[int]) -> dict[str, tuple[int, int, int]]:
        """Count the texts, titles and chunks that hold each term; keep the lengths of passages, too."""
        asked = dict.fromkeys(self._shards.filled, (list(terms), list(sizes)))
        total: WordTotals = reduce(add, self._shards.each("count", asked).values())
        text, title = total.documents
        chunks = total.passages[sizes[0]][1]
        counts = {term: (text.holding[term], title.holding[term], chunks.holding[term]) for term in terms}
        if len(self._held) + len(counts) > KEPT_TERMS:
            self._held = {}
        self._held.update(counts)
        self._lengths.update(dict.fromkeys(total.passages, total))
        return counts


class FetchedWords:
    """:class:`~cairn.pipeline.search.reader.WordScores`; passages of ``size`` chunks rank.

    ``found`` is what the shards of a search found, None before they were asked.
    """

    def __init__(
        self, generation: ShardedGeneration, words: Words, shown_size: int, num_candidates: int
    ) -> None:
        self._generation, self.num_candidates = generation, num_candidates
        self.words, self.size, self.shown_size = words, words.size, shown_size
        self.found: Mapping[int, BestWords] | None = None

    def has_windows(self, size: int) -> bool:
        """Tell whether a word stands in any passage of a size: of those that rank, or of those shown."""
        return self.has_passages if size == self.size else self.shown_high is not None

    @property
    def documents(self) -> Places:
        return self._documents

    @property
    def nominees(self) -> Sequence[Places]:
        by_passage = documents_of_chunks(self._generation, self._passages)
        return [self.documents, by_passage] if len(by_passage) else [self.documents]

    @property
    def has_passages(self) -> bool:
        return len(self._passages) > 0

    @property
    def shown_high(self) -> float | None:
        return max(each.highs[self.shown_size] for each in self._parts.values()) or None

    @property
    def _parts(self) -> Mapping[int, BestWords]:
        assert self.found is not None, "words are looked at after the search that asks for them"
        return self.found

    @cached_property
    def _documents(self) -> Places:
        own, generation = {shard: each.documents for shard, each in self._parts.items()}, self._generation
        return best(own, generation.shards.documents, self.num_candidates, generation.ids_of)[0]

    @cached_property
    def _passages(self) -> Places:
        own, generation = {shard: each.passages for shard, each in self._parts.items()}, self._generation
        return best(
            own,
            generation.shards.chunks,
            self.num_candidates,
            lambda chunks: generation.ids_of(generation.owners_of(chunks)),
        )[0]


class FetchedScores:
    """:class:`~cairn.pipeline.search.reader.CandidateScores` of one query, from what shards have scored.

    Windows of the size asked for came with the rest; those of another size are asked for when they are
    wanted, of the few documents that they are wanted of.
    """

    def __init__(
        self,
        generation: ShardedGeneration,
        positions: Int64[np.ndarray, " N"],
        vector_V: Float32[np.ndarray, " V"],
        words: FetchedWords | None,
        size: int | None,
        scored: Sequence[tuple[int, PartScores]],
    ) -> None:
        self._generation, self._shards, self._positions = generation, generation.shards, positions
        self._vector_V, self._words, self._size = vector_V, words, size
        self._scored = [scores for _, scores in scored]
        positions_of = self._shards.documents.positions
        self._known = np.concatenate([positions_of(shard, scores.documents) for shard, scores in scored])
        order = np.argsort(self._known)
        self._places_N = order[np.searchsorted(self._known, positions, sorter=order)]

    def documents(self) -> Float32[np.ndarray, " N"]:
        return self._joined(lambda scores: scores.document_N)[self._places_N]

    def chunks(self) -> Float32[np.ndarray, " N"]:
        return self._joined(lambda scores: scores.chunk_N)[self._places_N]

    def words(self) -> Float32[np.ndarray, " N"]:
        return self._joined(lambda scores: scores.word_N)[self._places_N]

    def passages(self) -> Float32[np.ndarray, " N"]:
        return self._joined(lambda scores: scores.passage_N)[self._places_N]

    def windows(self, chosen: Int64[np.ndarray, " K"], size: int) -> WindowScores:
        if size != self._size:
            return self._fetch_windows(self._positions[chosen], size)
        sizes = windows_of_documents(self._generation, self._known, size)
        places = self._places_N[chosen]
        places_W = ranges((np.cumsum(sizes) - sizes)[places], sizes[places])
        cosines = self._joined(lambda scores: scores.windows and scores.windows.cosine_W)
        words_W = None
        if self._has_words(size):
            words_W = self._joined(lambda scores: scores.windows and scores.windows.words_W)[places_W]
        return WindowScores(cosine_W=cosines[places_W], words_W=words_W)

    def max_sim(self, query: LateQuery, windows: Windows) -> Float32[np.ndarray, " W"]:
        first_W, end_W, title_W = windows
        found: list[tuple[int, Places, Float32[np.ndarray, " _"]]] = self._shards.owners(
            self._shards.chunks,
            "max_sim",
            first_W,
            lambda places, first: (
                query,
                Windows(first, first + (end_W - first_W)[places], first - (first_W - title_W)[places]),
            ),
        )
        return in_order([each[1:] for each in found])

    def _has_words(self, size: int) -> bool:
        return self._words is not None and self._words.has_windows(size)

    def _fetch_windows(self, positions: Int64[np.ndarray, " K"], size: int) -> WindowScores:
        words = self._words.words if self._words is not None and self._has_words(size) else None
        scored: list[tuple[int, Places, PartScores]] = self._shards.owners(
            self._shards.documents,
            "score",
            positions,
            lambda _, numbers: (numbers, self._vector_V, (), words, size),
        )
        found = [(places, each.windows) for _, places, each in scored if each.windows is not None]
        sizes_K = windows_of_documents(self._generation, positions, size)
        words_W = [(places, each.words_W) for places, each in found if each.words_W is not None]
        return WindowScores(
            cosine_W=gathered(sizes_K, [(places, each.cosine_W) for places, each in found]),
            words_W=None if words is None else gathered(sizes_K, words_W),
        )

    def _joined(
        self, part_of: Callable[[PartScores], Float32[np.ndarray, " _"] | None]
    ) -> Float32[np.ndarray, " _"]:
        """Return one array of what all shards were asked for, of all documents that are known."""
        parts = [part for each in self._scored if (part := part_of(each)) is not None]
        assert len(parts) == len(self._scored), "a part that was asked for"
        return np.concatenate(parts)


def _fetched(asked: ScoresAsked) -> FetchedWords | None:
    assert asked.words is None or isinstance(asked.words, FetchedWords), "one reader reads and scores words"
    return asked.words


class ShardedReader:
    """An :class:`~cairn.pipeline.search.reader.IndexReader` over the shards of a generation."""

    def __init__(self, generation: ShardedGeneration) -> None:
        self._generation, self._shards = generation, generation.shards
        self._totals = CorpusTotals(generation)
        _ = generation.mean_chunk_vector  # asked for now, and not by the first search

    def read_words(self, asked: WordsAsked) -> FetchedWords:
        """The shards are asked with the vector."""
        assert asked.alone is None, "a search in shards that should hide word statistics is refused"
        size = asked.size
        shown = size if asked.shown_size is None else asked.shown_size
        totals = self._totals.of(asked.query, list(dict.fromkeys((size, shown))))
        words = Words(query=asked.query, totals=totals, size=size)
        return FetchedWords(self._generation, words, shown, asked.limit)

    def read_sparse(
        self, query: Mapping[int, float], size: int, allowed: Int64[np.ndarray, " A"] | None, limit: int
    ) -> Found:
        owned = self._shards.allowed(allowed)
        asked = {shard: (query, size, own, limit) for shard, own in owned.items()}
        found = self._shards.each("reader.read_sparse", asked)
        return best(found, self._shards.documents, limit, self._generation.ids_of)

    def nominate(self, vectors_QV: Float32[np.ndarray, "Q V"], asked: NearestAsked) -> Nominate:
        """The shards are asked for each query."""
        return lambda index, scored: self._search(
            vectors_QV[index], asked, scored, None if asked.ids is None else asked.ids[index]
        )

    def token_matches(self, asked: MatchesAsked) -> TokenMatches:
        """Chunks and titles are asked for together."""
        own = self._generation.own_matches(asked)
        found = self._shards.each(
            "reader.token_matches", {shard: (each,) for shard, (_, each) in own.items()}
        )
        return joined_matches([(places, found[shard]) for shard, (places, _) in own.items()])

    def read_passages(self, asked: PassagesAsked) -> PassagesRead:
        return self._generation.read_passages(asked)

    def _search(
        self,
        vector_V: Float32[np.ndarray, " V"],
        asked: NearestAsked,
        scored: ScoresAsked,
        doc_id: str | None,
    ) -> Nominees:
        words = _fetched(scored)
        wanted = None if words is None or words.found is not None else words
        counting = words if wanted is not None or (words is not None and len(words.documents)) else None
        allowed = self._shards.allowed(asked.allowed)
        others = [*scored.others, *(words.nominees if words is not None and words.found is not None else ())]
        at_once = self._scored_at_once(scored, others, allowed)
        owner = None if doc_id is None else self._generation.shard_of(doc_id)
        questions = {
            shard: SearchAsked(
                vector_V=vector_V,
                num_documents=asked.num_documents,
                num_chunks=asked.num_chunks,
                allowed=own,
                words=None if counting is None else counting.words,
                num_best=0 if wanted is None else wanted.num_candidates,
                scored=at_once[shard],
                doc_id=doc_id if shard == owner else None,
            )
            for shard, own in allowed.items()
        }
        found = self._ask(questions)
        self._generation.meet({shard: each.met for shard, each in found.items()})
        if doc_id is not None and owner in found:
            self._generation.note_named(doc_id, owner, found[owner].named)
        if wanted is not None:
            wanted.found = {shard: each.words for shard, each in found.items() if each.words is not None}
        known = {shard: each.scored for shard, each in found.items() if each.scored is not None}
        return Nominees(
            self._lists(asked, questions, found),
            lambda positions: self._score(positions, vector_V, scored, known),
        )

    def _score(
        self,
        positions: Int64[np.ndarray, " N"],
        vector_V: Float32[np.ndarray, " V"],
        asked: ScoresAsked,
        known: Mapping[int, PartScores],
    ) -> FetchedScores:
        """Return scores that came with a search; the few that no shard took for likely are asked for."""
        words, unknown = _fetched(asked), {}
        counted = words.words if words is not None and len(words.documents) else None
        for shard, _, numbers in self._shards.documents.split(positions):
            left = np.setdiff1d(numbers, known[shard].documents, assume_unique=True)
            if len(left):
                unknown[shard] = left, vector_V, asked.parts, counted, asked.size
        scored = [*known.items(), *(self._shards.each("score", unknown).items() if unknown else ())]
        return FetchedScores(self._generation, positions, vector_V, words, asked.size, scored)

    def _scored_at_once(
        self, scored: ScoresAsked, others: Sequence[Places], allowed: Mapping[int, Places | None]
    ) -> dict[int, ScoredAtOnce]:
        """Return what each shard is to score with a search, given its documents that are allowed."""
        every = np.unique(np.concatenate([np.empty(0, np.int64), *others]))
        own = {shard: numbers for shard, _, numbers in self._shards.documents.split(every)}
        counts = {
            shard: self._shards.facts[shard].num_documents if numbers is None else len(numbers)
            for shard, numbers in allowed.items()
        }
        return {
            shard: ScoredAtOnce(
                parts=scored.parts,
                size=scored.size,
                share=count / max(sum(counts.values()), 1),
                others=own.get(shard, np.empty(0, np.int64)),
            )
            for shard, count in counts.items()
        }

    def _lists(
        self, asked: NearestAsked, questions: Mapping[int, SearchAsked], found: Mapping[int, PartFound]
    ) -> list[Places]:
        """Return the documents that each index nominates; for more of them the chunks are searched again."""
        lists: list[Places] = []
        if asked.num_documents is not None:
            documents = {shard: part.documents for shard, part in found.items() if part.documents}
            lists.append(best(documents, self._shards.documents, asked.num_documents)[0])
        if asked.num_chunks is None:
            return lists
        num_asked = asked.num_chunks

        def search(num_hits: int) -> Int64[np.ndarray, "Q K"]:
            parts = found
            if num_hits > num_asked:
                wider = {
                    shard: replace(each, num_documents=None, num_chunks=num_hits, num_best=0, scored=None)
                    for shard, each in questions.items()
                }
                parts = self._ask(wider)
                self._generation.meet({shard: each.met for shard, each in parts.items()})
            chunks = {shard: part.chunks for shard, part in parts.items() if part.chunks}
            return best(chunks, self._shards.chunks, num_hits)[0][None]

        num_chunks = sum(part.num_chunks for part in found.values())
        lists += documents_of_best_chunks(
            self._generation, search, num_chunks, num_asked, asked.min_documents
        )
        return lists

    def _ask(self, questions: Mapping[int, SearchAsked]) -> dict[int, PartFound]:
        return self._shards.each("search", {shard: (each,) for shard, each in questions.items()})
