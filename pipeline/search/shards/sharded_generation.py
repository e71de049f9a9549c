"""A generation whose partitions other processes hold: what a search reads by position is asked of them.

    opening   manifest and side files of the collection       read here
              documents and chunks of each shard, columns     asked of all shards, which open their partitions
    later     chunks, owners, spans, ids, rows, vectors       asked of the shards that have them

Nothing is kept here for each document or chunk, but for the places of the :data:`MAX_KNOWN` documents that
were met last: what answers a search needs as much memory for a billion chunks as for a thousand.
"""

# pyright: reportIncompatibleVariableOverride=false
# Columns that a generation in this process keeps are asked for each time.

from __future__ import annotations

import copy
import datetime as dt
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa
from cairn.pipeline.errors import CairnError, DamageError, IntegrityError
from cairn.pipeline.index.generation import Elsewhere, WatchedFiles
from cairn.pipeline.index.layout import Checks, CollectionLayout, check_generation_files, read_manifest
from cairn.pipeline.index.names import SIDE_FILES, partition_of
from cairn.pipeline.index.segments.segment import CodeColumn, SegmentRows, TokenVectors
from cairn.pipeline.manifest import Manifest
from cairn.pipeline.ragged import ranges
from cairn.pipeline.search.reader import MatchesAsked, PassagesAsked, PassagesRead, TokenMatches
from cairn.pipeline.search.shards.parts import (
    Ask,
    MetDocuments,
    PartFacts,
    PartKey,
    Question,
    ShardUnreachableError,
)
from cairn.pipeline.token_vectors.codebook import load_token_coder
from cairn.pipeline.token_vectors.projection import LATE_NAME
from jaxtyping import Float32, Int32, Int64, Shaped
from typing_extensions import override

Places = Int64[np.ndarray, " _"]
MAX_KNOWN: Final = 16_384
"""Documents whose chunks are known here, 24 bytes each; with more, those met before are forgotten."""
Arguments = Callable[[Places, Places], tuple[Any, ...]]
"""A question's arguments, given where a shard's items stand among those asked for, and its own numbers."""


def cut_partitions(num_partitions: int, num_shards: int) -> list[range]:
    """Return the partitions of each shard, none without any; a collection without partitions is one."""
    bounds = np.linspace(0, max(1, num_partitions), num_shards + 1).astype(np.int64)
    return [range(first, end) for first, end in pairwise(np.unique(bounds).tolist())]


class Numbers:
    """How shards number documents, or chunks: each its own from 0, in the order of the collection.

    So ties within a shard are ties of the collection. ``firsts`` are the positions of each shard's first.
    """

    def __init__(self, firsts: Places) -> None:
        self._firsts = firsts

    def split(self, positions: Places) -> Iterator[tuple[int, Places, Places]]:
        """Yield each shard that has some of these, where they stand among them, and its own numbers."""
        owners = np.searchsorted(self._firsts, positions, side="right") - 1
        for owner in np.flatnonzero(np.bincount(owners)).tolist():
            places = np.flatnonzero(owners == owner)
            yield owner, places, positions[places] - self._firsts[owner]

    def positions(self, shard: int, numbers: Places) -> Places:
        """Return the positions of what a shard has, by its own numbers."""
        return numbers + self._firsts[shard]


class FanOut:
    """Asks the shards of one generation, each for what it has: whole partitions, one after another."""

    def __init__(self, keys: Sequence[PartKey], ask: Ask, facts: Sequence[PartFacts]) -> None:
        self.keys, self.facts, self.ask = keys, facts, ask
        counts = [(each.num_documents, each.num_chunks) for each in facts]
        self.documents, self.chunks = map(Numbers, np.cumsum([(0, 0), *counts], axis=0)[:-1].T)
        self.filled = [shard for shard, (num_documents, _) in enumerate(counts) if num_documents]
        """The shards that have documents."""
        self.damage: IntegrityError | None = None
        """What a shard found damaged."""

    def each(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Ask some shards at once, each with its own arguments; return their answers in their order."""
        questions = [
            Question(shard, self.keys[shard], method, own) for shard, own in sorted(arguments.items())
        ]
        try:
            return dict(zip(sorted(arguments), self.ask(questions), strict=True))
        except IntegrityError as error:
            self.damage = error
            raise

    def owners(
        self, kind: Numbers, method: str, positions: Places, arguments: Arguments
    ) -> list[tuple[int, Places, Any]]:
        """Ask the shards that have some documents or chunks.

        Return each with where those that it has stand among all, and its answer.
        """
        split = list(kind.split(positions))
        answers = self.each(method, {shard: arguments(places, numbers) for shard, places, numbers in split})
        return [(shard, places, answers[shard]) for shard, places, _ in split]

    def allowed(self, documents: Int64[np.ndarray, " A"] | None) -> dict[int, Places | None]:
        """Return which of some ascending documents each shard has, by its own numbers; None allows all."""
        if documents is None:
            return dict.fromkeys(self.filled)
        return {shard: numbers for shard, _, numbers in self.documents.split(documents)}


def gathered(
    sizes_N: Places, pieces: Sequence[tuple[Places, Shaped[np.ndarray, ...]]]
) -> Shaped[np.ndarray, ...]:
    """Return the rows of N items in their order; each piece has those of the items at some places."""
    start_N = np.empty(len(sizes_N), np.int64)
    num_rows = 0
    for places, rows in pieces:
        ends = np.cumsum(sizes_N[places])
        start_N[places] = num_rows + ends - sizes_N[places]
        num_rows += len(rows)
    return np.concatenate([rows for _, rows in pieces])[ranges(start_N, sizes_N)]


def in_order(pieces: Sequence[tuple[Places, Shaped[np.ndarray, ...]]]) -> Shaped[np.ndarray, ...]:
    """Return rows, one an item, in the order of the items; each piece has those at some places."""
    if not pieces:
        return np.empty(0, np.int64)
    return np.concatenate([rows for _, rows in pieces])[
        np.argsort(np.concatenate([own for own, _ in pieces]))
    ]


_NOTHING: Final = MetDocuments(*(np.empty(0, np.int64) for _ in range(3)))


class ShardedGeneration(Elsewhere):
    """A generation over shards; opening it opens their partitions, and raises what ``ask`` does."""

    def __init__(self, layout: CollectionLayout, manifest: Manifest, shards: FanOut) -> None:
        folder = layout.generation_folder(manifest.generation)
        names = _side_files(manifest)
        files = WatchedFiles(folder, {name: manifest.files[name] for name in names}, are_mapped=True)
        has_tokens = LATE_NAME in names and all(each.has_tokens for each in shards.facts)
        vars(self).update(
            layout=layout,
            manifest=replace(
                manifest,
                documents=sum(each.num_documents for each in shards.facts),
                chunks=sum(each.num_chunks for each in shards.facts),
            ),
            segments=(),
            documents=_Vectors(shards, "documents", manifest.vector_dim),
            chunks=_Vectors(shards, "chunks", manifest.vector_dim),
            token_vectors=_codebook_alone(folder) if has_tokens else None,
            files=files,
            lance_files=(),
            parts=(),
            warning=None,
            missing={
                **manifest.lost,
                **{name: why for each in shards.facts for name, why in each.missing.items()},
            },
            has_sparse=all(each.has_sparse for each in shards.facts),
            document_schema=shards.facts[0].rows.schema,
            shards=shards,
            _met=_NOTHING,
            _named=("", None),
            _lock=threading.Lock(),
        )

    shards: FanOut
    _met: MetDocuments
    _named: tuple[str, int | None]
    _lock: threading.Lock

    @override
    def warned(self, warning: str) -> ShardedGeneration:
        found = copy.copy(self)
        vars(found)["warning"] = warning
        return found

    def reachable(self) -> ShardedGeneration:
        """Return it without shards that do not answer now, each replica of which is asked once."""
        shards = self.shards
        facts, errors = _facts_of(self.manifest, shards.keys, shards.ask)
        damage = (error for error in errors if isinstance(error, IntegrityError))
        shards.damage = next(damage, shards.damage)
        if not errors:
            return self
        return ShardedGeneration(self.layout, self.manifest, FanOut(shards.keys, shards.ask, facts))

    @override
    def segment_rows(self) -> Sequence[SegmentRows]:
        raise AssertionError("shards have the segments")

    @override
    def require_whole(self) -> None:
        super().require_whole()
        if self.shards.damage is not None:
            raise self.shards.damage.with_traceback(None)

    def meet(self, found: Mapping[int, MetDocuments]) -> None:
        """Note the chunks of documents that shards named."""
        shards = self.shards
        own = [
            (
                shards.documents.positions(shard, each.documents),
                shards.chunks.positions(shard, each.firsts),
                shards.chunks.positions(shard, each.ends),
            )
            for shard, each in found.items()
        ]
        met = MetDocuments(*(np.concatenate(columns) for columns in zip(*own, strict=True)))
        with self._lock:
            known = self._met if len(self._met.documents) + len(met.documents) <= MAX_KNOWN else _NOTHING
            places, is_known = known.places_of(met.documents)
            new = np.flatnonzero(~is_known)
            if len(new):
                new = new[np.unique(met.documents[new], return_index=True)[1]]
                columns = zip(known, met, strict=True)
                vars(self)["_met"] = MetDocuments(
                    *(np.insert(old, places[new], add[new]) for old, add in columns)
                )

    @override
    def chunks_of(self, documents: Places) -> tuple[Places, Places]:
        known = self._met
        places, is_known = known.places_of(documents)
        if np.all(is_known):
            return known.firsts[places], known.ends[places]
        shards = self.shards
        found: list[tuple[int, Places, MetDocuments]] = shards.owners(
            shards.documents, "chunks_of", documents, lambda _, numbers: (numbers,)
        )
        if len(documents) < MAX_KNOWN:
            self.meet({shard: each for shard, _, each in found})
        firsts, ends = (
            in_order([(own, shards.chunks.positions(shard, each[side])) for shard, own, each in found])
            for side in (1, 2)
        )
        return firsts, ends

    @override
    def owners_of(self, chunks: Places) -> Places:
        known = self._met
        places = np.searchsorted(known.firsts, chunks, side="right") - 1
        if len(known.ends) and np.all((places >= 0) & (chunks < known.ends[places])):
            return known.documents[places]
        shards = self.shards
        found = shards.owners(shards.chunks, "part.owners_of", chunks, lambda _, numbers: (numbers,))
        return in_order([(own, shards.documents.positions(shard, each)) for shard, own, each in found])

    @override
    def spans_of(self, first_n: Places, end_n: Places) -> tuple[Places, Places]:
        size_n, shards = end_n - first_n, self.shards
        found = shards.owners(
            shards.chunks, "part.spans_of", first_n, lambda own, first: (first, first + size_n[own])
        )
        start, end = (in_order([(own, spans[side]) for _, own, spans in found]) for side in (0, 1))
        return start, end

    @override
    def ids_of(self, documents: Places) -> list[str]:
        return self.fetch_documents(documents, ["doc_id"]).column("doc_id").to_pylist()

    def shard_of(self, doc_id: str) -> int | None:
        """Return the shard that has a document if there is one of this id; None where there is none."""
        records = self.manifest.partitions
        own = partition_of(doc_id, len(records)) if records else 0
        if records and not records[own].generation:
            return None
        place = sum(1 for each in records[:own] if each.generation)
        shard = next(shard for shard, key in enumerate(self.shards.keys) if place < key.end)
        return shard if shard in self.shards.filled else None

    def note_named(self, doc_id: str, shard: int, number: int | None) -> None:
        """Note which document of a shard has an id, which is about to be asked for."""
        vars(self)["_named"] = doc_id, self._position(shard, number)

    def _position(self, shard: int, number: int | None) -> int | None:
        return None if number is None else int(self.shards.documents.positions(shard, np.array(number)))

    @override
    def position_of(self, doc_id: str) -> int | None:
        known, position = self._named
        if known == doc_id:
            return position
        shard = self.shard_of(doc_id)
        if shard is None:
            return None
        (found,) = self.shards.each("part.position_of", {shard: (doc_id,)}).values()
        return self._position(shard, found)

    @property
    @override
    def doc_ids(self) -> pa.LargeStringArray:
        return self.read_column("doc_id").cast(pa.large_string()).combine_chunks()

    @property
    @override
    def cluster_ids(self) -> Int32[np.ndarray, " N"]:
        return self.read_column("cluster_id").to_numpy()

    @property
    @override
    def num_tokens(self) -> Int32[np.ndarray, " N"]:
        return self.read_column("num_tokens").to_numpy()

    @override
    def read_column(self, name: str) -> pa.ChunkedArray:
        tables = self.shards.each("read_column", dict.fromkeys(self.shards.filled, (name,))).values()
        chunks = [chunk for table in tables for chunk in table.column(name).chunks]
        return pa.chunked_array(chunks, self.document_schema.field(name).type)

    @override
    def fetch_documents(self, positions: Sequence[int] | np.ndarray, columns: Sequence[str]) -> pa.Table:
        nothing = np.empty(0, np.int64)
        asked = PassagesAsked(np.asarray(positions, np.int64), columns, nothing, nothing)
        return self.read_passages(asked).table

    def read_passages(self, asked: PassagesAsked) -> PassagesRead:
        """Read columns and passages; a shard that has a passage has its document, so each is asked once."""
        unique, inverse = np.unique(asked.positions, return_inverse=True)
        size_n, nothing, shards = asked.end_n - asked.first_n, np.empty(0, np.int64), self.shards
        documents = {shard: numbers for shard, _, numbers in shards.documents.split(unique)}
        passages = {shard: (own, first) for shard, own, first in shards.chunks.split(asked.first_n)}
        matches = {} if asked.matches is None else self.own_matches(asked.matches)
        questions: dict[int, tuple[PassagesAsked]] = {}
        for shard in sorted({*documents, *passages} or {*shards.filled[:1]} or {0}):
            own, first = passages.get(shard, (nothing, nothing))
            bounds = first, first + size_n[own]
            _, matched = matches.get(shard, (nothing, None))
            own_documents = documents.get(shard, nothing)
            questions[shard] = (PassagesAsked(own_documents, list(asked.columns), *bounds, matched),)
        found: dict[int, PassagesRead] = shards.each("reader.read_passages", questions)
        rows = pa.concat_tables([each.table for each in found.values()]).take(pa.array(inverse))
        spans = [(passages.get(shard, (nothing,))[0], each) for shard, each in found.items()]
        lists = [
            (own, part) for shard, (own, _) in matches.items() if (part := found[shard].matches) is not None
        ]
        return PassagesRead(
            rows,
            in_order([(own, each.start_n) for own, each in spans]),
            in_order([(own, each.end_n) for own, each in spans]),
            joined_matches(lists) if lists else None,
        )

    def own_matches(self, asked: MatchesAsked) -> dict[int, tuple[Places, MatchesAsked]]:
        """Return where the chunks and titles of each shard stand among all, and what it is asked."""
        chunk_C, num_chunks = np.concatenate([asked.chunk_M, asked.title_N]), len(asked.chunk_M)
        own: dict[int, tuple[Places, MatchesAsked]] = {}
        for shard, places, numbers in self.shards.chunks.split(chunk_C):
            first_title = int(np.searchsorted(places, num_chunks))
            chunks, titles = numbers[:first_title], numbers[first_title:]
            own[shard] = places, MatchesAsked(chunk_M=chunks, title_N=titles, query=asked.query)
        return own

    @override
    def matching(
        self,
        filters: Mapping[str, Any] | None,
        restriction: Mapping[str, Any] | None,
        timeout: dt.timedelta | None,
    ) -> Places:
        seconds = None if timeout is None else timeout.total_seconds()
        asked = dict.fromkeys(self.shards.filled, (filters, restriction, seconds))
        found = self.shards.each("matching", asked)
        own = (self.shards.documents.positions(shard, numbers) for shard, numbers in found.items())
        return np.concatenate([np.empty(0, np.int64), *own])


def joined_matches(found: Sequence[tuple[Places, TokenMatches]]) -> TokenMatches:
    """Return what shards matched, in the order asked; each with the places of its chunks and titles."""
    size_C = in_order([(places, each.size_C) for places, each in found])
    return TokenMatches(
        size_C=size_C,
        cosine_Tq=gathered(size_C, [(places, each.cosine_Tq) for places, each in found]),
        step_T=gathered(size_C, [(places, each.step_T) for places, each in found]),
        start_C=in_order([(places, each.start_C) for places, each in found]),
    )


class _Vectors:
    """A vector index that shards have: its vectors are read, and searches ask for other things with them."""

    def __init__(self, shards: FanOut, name: Literal["documents", "chunks"], vector_dim: int) -> None:
        self._shards, self._name, self.vector_dim = shards, name, vector_dim

    def reconstruct(self, positions: Places) -> Float32[np.ndarray, "A V"]:
        if not len(positions):
            return np.empty((0, self.vector_dim), np.float32)
        kind: Numbers = getattr(self._shards, self._name)
        method = f"part.{self._name}.reconstruct"
        found = self._shards.owners(kind, method, positions, lambda _, numbers: (numbers,))
        return in_order([each[1:] for each in found])


def _facts_of(
    manifest: Manifest, keys: Sequence[PartKey], ask: Ask
) -> tuple[list[PartFacts], list[CairnError]]:
    """Ask shards once what they have; of those that do not answer, return nothing, and why.

    Raises that where none answers.
    """
    found, lost = dict[int, PartFacts](), dict[int, CairnError]()
    for shard, key in enumerate(keys):
        try:
            (found[shard],) = ask([Question(shard, key, "facts", (), waits=False)])
        except (IntegrityError, ShardUnreachableError) as error:
            lost[shard] = error
    if not found:
        raise lost[0]
    nothing = next(iter(found.values()))
    for shard, error in lost.items():
        names = [record.name for record in manifest.filled[keys[shard].first : keys[shard].end]]
        missing = dict.fromkeys(names, str(error))
        found[shard] = replace(nothing, num_documents=0, num_chunks=0, missing=missing)
    return [found[shard] for shard in range(len(keys))], [*lost.values()]


def _side_files(manifest: Manifest) -> list[str]:
    """Return the files of a generation that are not of a segment."""
    return [name for name in manifest.files if name in SIDE_FILES]


def _codebook_alone(folder: Any) -> TokenVectors:
    codebook = load_token_coder(folder)
    nothing = CodeColumn(
        rows=np.empty((0, codebook.vector_bytes + 1), np.uint8), offsets_M1=np.zeros(1, np.int64)
    )
    return TokenVectors(codebook=codebook, chunks=nothing, titles=nothing)


def open_on_shards(
    layout: CollectionLayout,
    number: int,
    checks: Checks,
    num_shards: int,
    ask: Ask,
    prepare: Callable[[Sequence[PartKey]], None] = lambda _: None,
) -> ShardedGeneration:
    """Open a generation on so many shards, after ``prepare``; damage raises :class:`IntegrityError`."""
    with layout.naming_damage():
        manifest = read_manifest(layout, number)
        problems = check_generation_files(
            layout, manifest, checks.hashes, names=_side_files(manifest), believes_notes=not checks.verify
        )
        for name, problem in problems:
            raise DamageError(f"{name} of generation {number} {problem}")
        sha256 = layout.hash_of_manifest(number)
        cuts = cut_partitions(len(manifest.filled), num_shards)
        skips = checks.skips_lost
        keys = [PartKey(layout.name, number, sha256, each.start, each.stop, skips) for each in cuts]
        prepare(keys)
        facts: Sequence[PartFacts]
        if skips:
            facts, _ = _facts_of(manifest, keys, ask)
        else:
            facts = ask([Question(*each, "facts", ()) for each in enumerate(keys)])
        return ShardedGeneration(layout, manifest, FanOut(keys, ask, facts))
