"""One collection: search it, read its documents, add and delete some. What ``import cairn`` gives.

    notes = cairn.Collection.create("notes")
    report = notes.add([{"id": "1", "text": "a first note"}, {"id": "2", "text": "a second one"}])
    notes.search("note")

Ties the searcher, which knows vectors only, to the query encoder the collection's manifest describes. The
encoder is loaded by the first search for a text: reading needs no model.

Every call that writes is the same line as ``ingest``: one writer at a time, others get
:class:`CollectionBusyError`; rows that cannot be indexed are quarantined and counted in the report; readers
see the generation before or the next one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypedDict, Unpack

import numpy as np
from cairn.pipeline.config import DEFAULT_ROOT, MAX_DELETED, ContextConfig, CorpusConfig, Precision
from cairn.pipeline.context.drift import measure_drift
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.counted import counted
from cairn.pipeline.errors import (
    CollectionNotFoundError,
    ConfigError,
    FingerprintMismatchError,
    IntegrityError,
    SourceError,
    StorageError,
    UsageError,
)
from cairn.pipeline.index.aliases import target_of
from cairn.pipeline.index.generation import Generation, open_latest_intact_generation
from cairn.pipeline.index.layout import SIZES, Checks, CollectionLayout, list_states, read_manifest
from cairn.pipeline.index.names import CONTEXT_ARROW
from cairn.pipeline.index.status import collection_status
from cairn.pipeline.model.folders.model_defaults import settings_warnings
from cairn.pipeline.model.folders.names import (
    MODEL_NAMES,
    describe_model,
    is_endpoint,
    is_folder,
    model_folder,
)
from cairn.pipeline.options import check_names, did_you_mean, shown
from cairn.pipeline.search.contents import (
    DEFAULT_VALUES,
    StoredDocuments,
    count_documents,
    list_matches,
    read_document,
    read_lineage,
    summarise_columns,
    visible_documents,
)
from cairn.pipeline.search.filters import parse_filter
from cairn.pipeline.search.searcher import Searcher, require_encoder
from cairn.pipeline.search_options import PublicSearchKeywords, SearchOptions
from cairn.pipeline.types import (
    ColumnSummary,
    Document,
    IngestReport,
    Lineage,
    ListedDocument,
    ProgressListener,
    QueryEncoder,
    QueryTokens,
    Reranker,
    SearchResult,
    silent_progress,
)
from jaxtyping import Float, Float32
from typing_extensions import override

if TYPE_CHECKING:
    from cairn.pipeline.corpus.given_rows import GivenRows
    from cairn.pipeline.encode.sparse import SparseEncoder
    from cairn.pipeline.encode.text_encoder import TextEncoder
    from cairn.pipeline.index.maintenance import DeleteReport

_BASE_MODEL_NOTE = (
    "all-MiniLM-L6-v2 is trained neither for landmarks nor for context: chunks are pooled as it was trained, "
    "and the stored context is read only with --use-context"
)


def collections_root(root: str | Path | None) -> Path:
    """Return where collections live: ``root``, else ``CAIRN_ROOT``, else ``./cairn-data``."""
    return Path(root if root is not None else os.environ.get("CAIRN_ROOT", DEFAULT_ROOT))


def open_collection(
    name: str,
    *,
    root: str | Path | None = None,
    encoder: QueryEncoder | None = None,
    verify: bool = False,
) -> Collection:
    """Open a collection for searching.

    ``encoder`` replaces the one the manifest describes; its fingerprint must be the same. ``verify`` hashes
    every file that searches read when it is opened, also those that this machine has hashed before. Raises
    :class:`CollectionNotFoundError` naming the collections there are.
    """
    return Collection(switched_layout(name, root), encoder, verify=verify)


def switched_layout(name: str, root: str | Path | None) -> CollectionLayout:
    """Return the collection that a name answers from; see :mod:`cairn.pipeline.index.aliases`."""
    place = collections_root(root)
    layout = CollectionLayout.at(place, target_of(place, name))
    layout.require_exists()
    return layout


class ColumnKeywords(TypedDict, total=False):
    """Which columns hold what; see :class:`cairn.pipeline.config.CorpusConfig`."""

    id_column: str
    text_column: str
    title_column: str | None
    query_column: str | None
    metadata_columns: tuple[str, ...] | None
    vector_column: str | None
    id_prefix: bool


class Collection:
    """One collection: search it, read its documents, add and delete some.

    Safe to share between threads for reading. One thread or process writes at a time.
    """

    def __init__(
        self,
        layout: CollectionLayout,
        encoder: QueryEncoder | None = None,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        verify: bool = False,
    ) -> None:
        self.layout = layout
        self.settings: Mapping[str, Mapping[str, Any]] = settings or {}
        """What a new collection is to be built with, by stage."""
        self._verify = verify
        self._given_encoder = encoder
        self._opened: Searcher | None = None
        self._rerankers: dict[str, Reranker] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is opened: a copy, in this process or another, opens files and models of its own."""
        return {**self.__dict__, "_opened": None, "_rerankers": {}}

    @classmethod
    def create(
        cls,
        name: str,
        *,
        root: str | Path | None = None,
        model: str | None = None,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> Self:
        """Return a new collection; nothing is written before the first :meth:`add`.

        ``model`` is a name or a folder, None the default; ``settings`` are an ingest's by stage, as in
        ``{"encoder": {"pooling": "cls"}}``. The first batch draws the clusters and the context: let it be a
        fair sample. Raises :class:`ConfigError` where there is such a collection, or no such model.
        """
        from cairn.pipeline.line.ingest_settings import STAGES, resolve_ingest_config

        layout = CollectionLayout.at(collections_root(root), name)
        if layout.exists():
            raise ConfigError(
                f"a new collection must have a new name, got {name!r}, which is there; use open_collection"
            )
        for stage, values in (settings or {}).items():
            if stage not in STAGES:
                raise ConfigError(f"settings have no stage {stage!r}{did_you_mean(stage, STAGES)}")
            check_names(f"the stage {stage}", values, STAGES[stage])
        chosen = {stage: dict(values) for stage, values in (settings or {}).items()}
        if model is not None:
            model_folder(model)  # raises for one that cannot be had
            chosen.setdefault("encoder", {})["model"] = model
        for key in ("model", "sparse_model"):
            named = chosen.get("encoder", {}).get(key)
            if isinstance(named, str) and is_folder(named):
                chosen["encoder"][key] = str(model_folder(named).resolve())
        resolve_ingest_config(chosen, None)
        return cls(layout, settings=chosen)

    @property
    def name(self) -> str:
        """The collection's name."""
        return self.layout.name

    @property
    def warnings(self) -> Sequence[str]:
        """Sentences about the generation being served, for example that a newer one is damaged."""
        return self._searcher().warnings

    def search(
        self,
        query: str,
        *,
        rerank: str | Reranker | None = None,
        **options: Unpack[PublicSearchKeywords],
    ) -> SearchResult:
        """Rank documents for a query, each with its best passages.

        The options are those of :class:`cairn.pipeline.search_options.SearchOptions`. ``rerank`` names a
        cross-encoder, by name or folder, that judges the passages of the best documents again
        (:mod:`cairn.pipeline.search.rerank`); needs the extra ``rerank``.
        """
        return self.search_batch([query], rerank=rerank, **options)[0]

    def search_batch(
        self,
        queries: Sequence[str],
        *,
        rerank: str | Reranker | None = None,
        **options: Unpack[PublicSearchKeywords],
    ) -> list[SearchResult]:
        """Answer several queries with one encoder pass; the options are those of :meth:`search`."""
        check_names("a search", options, SearchOptions)
        asked = SearchOptions(**options)
        reranker = None if rerank is None else self._reranker(rerank)
        return self._searcher().answer(queries, asked, reranker)

    def _reranker(self, model: object) -> Reranker:
        if isinstance(model, Reranker):
            return model
        if not isinstance(model, str):
            raise ConfigError(
                "rerank must be the name or folder of a cross-encoder, or a Reranker, got "
                f"{shown(model)}; leave it out to rank without one"
            )
        if model not in self._rerankers:
            from cairn.pipeline.encode.cross_encoder import CrossEncoderReranker

            self._rerankers = {
                model: CrossEncoderReranker(model)
            }  # one is kept: models are rarely changed back
        return self._rerankers[model]

    def search_vectors(
        self,
        query_vectors: Float[np.ndarray, "Q V"],
        *,
        queries: Sequence[str] | None = None,
        **options: Unpack[PublicSearchKeywords],
    ) -> list[SearchResult]:
        """Answer queries that are already encoded by the collection's own model; none is loaded.

        With the texts ``queries``, one a vector, BM25 counts as well.
        """
        check_names("a search", options, SearchOptions)
        return self._searcher().answer(queries, SearchOptions(**options), encoded=query_vectors)

    def more_like(self, doc_id: str, **options: Unpack[PublicSearchKeywords]) -> SearchResult:
        """Rank the other documents by their likeness to one, by its stored vector; no model is loaded.

        Raises :class:`UsageError` where there is no such document.
        """
        others: dict[str, Any] = {"type": "ne", "key": "doc_id", "value": doc_id}
        filters = options.get("filters")
        generation, positions = self._searcher().reading(visible_documents, None, {**others, "type": "eq"})
        if not len(positions):
            raise UsageError(f"doc_id must be of a document of {self.name!r}, got {shown(doc_id)}")
        vectors_1V = generation.documents.reconstruct(positions)
        both = others if filters is None else {"type": "and", "filters": [others, filters]}
        options["filters"] = both
        return self.search_vectors(vectors_1V, **options)[0]

    @property
    def documents(self) -> StoredDocuments:
        """The stored documents: count them, read one by its id, or read all."""
        return StoredDocuments(self._searcher(), self.name)

    def columns(
        self, *, filters: Mapping[str, Any] | None = None, num_values: int = DEFAULT_VALUES
    ) -> list[ColumnSummary]:
        """Describe the columns that filters can name: type, most frequent values with counts, range.

        Only documents that match ``filters`` count. Columns whose values mostly differ have no ``values``.
        """
        return self._searcher().reading(summarise_columns, None, filters, num_values)

    def facets(
        self,
        columns: Sequence[str],
        *,
        filters: Mapping[str, Any] | None = None,
        num_values: int = DEFAULT_VALUES,
    ) -> list[ColumnSummary]:
        """Count the values of some columns over the documents that match ``filters``."""
        return self._searcher().reading(summarise_columns, columns, filters, num_values)

    def count(self, filters: Mapping[str, Any] | None = None) -> int:
        """Count the documents that match a filter tree, all without one."""
        return self._searcher().reading(count_documents, None, filters)

    def list_documents(
        self, filters: Mapping[str, Any] | None = None, *, after: str | None = None
    ) -> Iterator[ListedDocument]:
        """Yield all documents that match, in the order of their ids, without texts and without ranking.

        ``after`` is the id to go on after.
        """
        is_last = False
        while not is_last:
            page = self._searcher().reading(list_matches, filters, after)
            yield from page.documents
            after, is_last = page.next_after, page.next_after is None

    def read_document(self, doc_id: str) -> Document | None:
        """Return a document by its id, None where there is none."""
        return self._searcher().reading(read_document, doc_id)

    def lineage(self, doc_id: str) -> Lineage | None:
        """Say where a document came from: source file and row, run, model, context, generation.

        None where there is no such document. No model is loaded.
        """
        return self._searcher().reading(read_lineage, doc_id)

    @override
    def __repr__(self) -> str:
        number = self.layout.current_generation_number()
        if number is None:
            return f"Collection({self.name!r}, nothing published yet)"
        manifest = read_manifest(self.layout, number)
        return (
            f"Collection({self.name!r}, {counted(manifest.documents, 'document')}, "
            f"{counted(manifest.chunks, 'chunk')}, "
            f"generation {number})"
        )

    def parse_filters(self, expressions: Sequence[str]) -> dict[str, Any] | None:
        """Turn ``column=value`` expressions into a filter tree, values typed as their columns are."""
        return parse_filter(expressions, self._searcher().take().generation.document_schema)

    def status(self) -> dict[str, Any]:
        """Describe what is served, how it was built, and how far the corpus has drifted from its context."""
        status = collection_status(self.layout)
        checks = Checks(verify=True) if self._verify else SIZES
        generation = open_latest_intact_generation(self.layout, checks)
        manifest = generation.manifest
        own = [generation.warning] if generation.warning else []
        own += [f"partition {name} is missing: {reason}" for name, reason in generation.missing.items()]
        context = ContextConfig(**manifest.settings["context"])
        status["warnings"] = [*own, *settings_warnings(manifest.encoder, context)]
        drift = measure_drift(
            manifest.context_cluster_sizes, status["cluster_sizes"], manifest.documents_at_context
        )
        is_base = manifest.encoder.model in MODEL_NAMES and manifest.encoder.given_dims is None
        status["encoder_note"] = _BASE_MODEL_NOTE if is_base else None
        status["context"]["drift"] = {
            "verdict": drift.verdict,
            "total_variation": drift.total_variation,
            "added_share": drift.added_share,
            "changed_clusters": list(drift.changed_clusters),
        }
        # Where no vector depends on the context, nothing is encoded again.
        tokens = manifest.tokens if manifest.encoder.use_context else 0
        speed = manifest.encode_tokens_per_second
        status["context"]["recontextualisation"] = {
            "documents": manifest.documents if tokens else 0,
            "tokens": tokens,
            "seconds": tokens / speed if speed else 0.0,
        }
        return status

    def add(
        self,
        documents: str | Path | GivenRows,
        *,
        progress: ProgressListener = silent_progress,
        **columns: Unpack[ColumnKeywords],
    ) -> IngestReport:
        """Add documents, replace those of the same ids, and publish a generation with them.

        ``documents`` are an Arrow table or batches, a pandas or polars frame, dictionaries, documents of
        another collection, or a source as ``ingest`` takes it: a path, a glob or a URI. Only new and changed
        ones are encoded. ``columns`` say which columns of these documents hold the id, the text and the
        title; later calls and ingests do not take them over. What cannot be indexed is counted by reason in
        the report, and lies in its ``quarantine_file``.

        Raises :class:`CollectionBusyError` while another writer holds the collection, and
        :class:`SourceError` where no row can be indexed.
        """
        return self._ingest(documents, progress, columns, sync=False)

    def sync(
        self,
        documents: str | Path | GivenRows,
        *,
        max_deleted: float = MAX_DELETED,
        progress: ProgressListener = silent_progress,
        **columns: Unpack[ColumnKeywords],
    ) -> IngestReport:
        """Make the collection hold these documents and no others: add as :meth:`add`, delete the rest.

        More than the share ``max_deleted``, and more than one, raise :class:`UsageError` and delete none.
        """
        return self._ingest(documents, progress, columns, sync=True, max_deleted=max_deleted)

    def delete(
        self,
        documents: str | Iterable[str] | Mapping[str, Any],
        *,
        progress: ProgressListener = silent_progress,
    ) -> DeleteReport:
        """Delete documents by their ids, or those that match a filter tree, and publish what is left.

        Ids that are not there are named in the report.
        """
        from cairn.pipeline.index.maintenance import delete_documents

        if isinstance(documents, Mapping):
            doc_ids = self.documents.ids(documents)
        else:
            doc_ids = [documents] if isinstance(documents, str) else list(documents)
        return delete_documents(self.layout, doc_ids, progress)

    def retype(self, types: Mapping[str, str], *, progress: ProgressListener = silent_progress) -> int:
        """Give metadata columns other types, such as ``{"year": "int64"}``; return the new generation.

        A value that does not fit its new type without loss is named, and nothing changes.
        """
        from cairn.pipeline.index.maintenance import retype_columns

        return retype_columns(self.layout, types, progress).generation

    def _ingest(
        self,
        documents: str | Path | GivenRows,
        progress: ProgressListener,
        columns: Mapping[str, Any],
        *,
        sync: bool,
        max_deleted: float = 1.0,
    ) -> IngestReport:
        from cairn.pipeline.corpus.given_rows import source_of  # reading loads no part of the line
        from cairn.pipeline.line.build_index import build_index
        from cairn.pipeline.line.compatibility import stored_settings
        from cairn.pipeline.line.ingest_settings import resolve_ingest_config

        check_names("columns", columns, CorpusConfig)
        root = self.layout.place
        settings = dict(self.settings)
        if (given := columns.get("vector_column")) is not None:  # it says what the collection is, too
            settings["corpus"] = {**settings.get("corpus", {}), "vector_column": given}
        own = resolve_ingest_config(
            {**settings, "sync": sync, "max_deleted": max_deleted}, stored_settings(root, self.name)
        )
        config = replace(own, corpus=replace(own.corpus, **columns), remembered_corpus=own.corpus)
        if isinstance(documents, str | Path):
            source = str(documents)
        else:
            source = source_of(documents, config.corpus)
            if len(source.table) == 0 and (sync or not self.layout.exists()):
                raise SourceError(
                    "the first `add`, and every `sync`, must be given at least one document, got none; to "
                    "empty a collection, call delete(collection.documents.ids())"
                )
            if len(source.table) == 0:
                return self._nothing_added()
        return build_index([source], root, self.name, config, progress)

    def _nothing_added(self) -> IngestReport:
        number = self.layout.current_generation_number() or 0
        return IngestReport(
            collection=self.name,
            rows=0,
            indexed=0,
            unchanged=0,
            quarantined=0,
            deleted=0,
            encoded=0,
            generation=number,
            seconds=0.0,
        )

    def _searcher(self) -> Searcher:
        if self._opened is None:
            self._opened = Searcher(
                self.layout,
                self._given_encoder or _LateEncoder,
                encode_sparse=encode_sparse,
                verify=self._verify,
            )
        return self._opened


class _LateEncoder:
    """The encoder of a generation, loaded when it first encodes; see :func:`load_query_encoder`."""

    def __init__(self, generation: Generation) -> None:
        self.fingerprint = generation.manifest.fingerprints["encoder"]
        self._generation: Generation | None = generation
        self._lock = threading.Lock()

    def encode_queries(self, texts: Sequence[str]) -> Float32[np.ndarray, "Q V"]:
        """See :class:`cairn.pipeline.types.QueryEncoder`."""
        return self._encoder().encode_queries(texts)

    def encode_query_tokens(
        self, texts: Sequence[str]
    ) -> tuple[Float32[np.ndarray, "Q V"], list[QueryTokens]]:
        """See :class:`cairn.pipeline.types.TokenQueryEncoder`."""
        return self._encoder().encode_query_tokens(texts)

    def _encoder(self) -> TextEncoder:
        with self._lock:
            if self._generation is not None:
                self._loaded, self._generation = self._load(self._generation), None
            return self._loaded

    def _load(self, generation: Generation) -> TextEncoder:
        """Load the encoder; of the newest generation where this one has been removed since it was opened."""
        try:
            return load_query_encoder(generation)
        except IntegrityError:
            newest = open_latest_intact_generation(generation.layout, SIZES)
            if newest.manifest.fingerprints["encoder"] != self.fingerprint:
                raise
            return load_query_encoder(newest)


def load_query_encoder(generation: Generation) -> TextEncoder:
    """Build the encoder that a generation's manifest describes, with its context if the encoder reads one.

    A model whose weights have changed since raises :class:`FingerprintMismatchError`.
    """
    from cairn.pipeline.encode.endpoint_requests import QUERY
    from cairn.pipeline.encode.text_encoder import TextEncoder  # torch comes in here, and only here

    # A search encodes one short row, for which no other backend is worth its compilation or being installed.
    config = generation.manifest.encoder
    precision = "auto" if config.precision == "int8" else config.precision
    config = replace(config, backend="torch", precision=precision)
    try:
        model_folder(config.model)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; where the model was moved, ingest again with `--model FOLDER`"
        ) from error
    needs_context = config.use_context or is_endpoint(config.model)  # which keeps its probes there
    with generation.layout.naming_damage():
        context = ContextSet.read(generation.folder / CONTEXT_ARROW) if needs_context else None
    encoder = TextEncoder(config, context, patience=QUERY)
    try:
        require_encoder(generation, encoder)
    except FingerprintMismatchError as error:
        raise FingerprintMismatchError(
            f"{error}; its model is {describe_model(config.model)}: where another folder holds the weights "
            "it was built with, ingest again with `--model FOLDER`"
        ) from error
    return encoder


def encode_sparse(generation: Generation, queries: Sequence[str]) -> list[dict[int, float]]:
    """Return the weights of queries' tokens by the sparse encoder that a generation's manifest names.

    It is loaded when it is first asked. Other weights than the collection was built with raise
    :class:`FingerprintMismatchError`.
    """
    config, expected = generation.manifest.encoder, generation.manifest.fingerprints.get("sparse")
    assert config.sparse_model is not None, "a collection with weights says whose they are"
    with _LOADING:
        encoder = _sparse_encoder(config.sparse_model, config.precision, expected)
    return encoder.encode_queries(queries)


_LOADING: Final = threading.Lock()


@lru_cache(maxsize=4)
def _sparse_encoder(model: str, precision: Precision, expected: str | None) -> SparseEncoder:
    from cairn.pipeline.encode.sparse import SparseEncoder  # torch comes in here
    from cairn.pipeline.model.folders.checkpoint import weights_in_memory

    try:
        with weights_in_memory():
            encoder = SparseEncoder(model, precision)
    except ConfigError as error:
        raise ConfigError(
            f"{error}; where the model was moved, ingest again with `--sparse-model FOLDER`"
        ) from error
    if encoder.fingerprint != expected:
        raise FingerprintMismatchError(
            f"the sparse encoder must be the one the collection was built with, got other weights from "
            f"{describe_model(model)}; restore them, or ingest again with `--sparse-model FOLDER`"
        )
    return encoder


def list_statuses(root: str | Path | None = None) -> list[dict[str, Any]]:
    """Describe every collection under ``root`` in a line each; a damaged one says so instead of hiding.

    Those of which nothing is published yet come last: ``building`` while their first ingest is at work,
    ``unfinished`` where it stopped, ``damaged`` where its lock cannot be opened.
    """
    reports: list[dict[str, Any]] = []
    states = list_states(collections_root(root))
    for name, begun in sorted(states.items(), key=lambda item: item[1] is not None):
        found: dict[str, Any] = {"collection": name}
        status = begun or "ready"
        if begun is None:
            try:
                found = collection_status(CollectionLayout.at(collections_root(root), name))
            except CollectionNotFoundError:
                continue
            except (IntegrityError, StorageError):
                status = "damaged"
        told = {key: found.get(key) for key in ("collection", "documents", "chunks", "generation")}
        reports.append({"status": status, **told})
    return reports
