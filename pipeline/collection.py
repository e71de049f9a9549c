"""A collection opened for reading: the Python front door.

    from pipeline import open_collection
    handbook = open_collection("handbook")
    handbook.search("how do I reset a password", granularity="both")

Ties the searcher, which knows vectors only, to the query encoder the collection's manifest describes. The
encoder is loaded at the first search, so that looking at a collection's state needs no model.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from pipeline.config import DEFAULT_ROOT, ContextConfig
from pipeline.context.drift import measure_drift
from pipeline.context.store import ContextSet
from pipeline.errors import (
    CollectionNotFoundError,
    ConfigError,
    FingerprintMismatchError,
    IntegrityError,
    StorageError,
)
from pipeline.index.copied_names import CONTEXT_ARROW
from pipeline.index.generation import Generation, open_latest_intact_generation
from pipeline.index.layout import CollectionLayout, list_states
from pipeline.index.status import collection_status
from pipeline.model.folders.embedded_weights import MODEL_NAMES
from pipeline.model.folders.names import describe_model, model_folder
from pipeline.model.untrained_settings import settings_warnings
from pipeline.options import check_names, shown
from pipeline.search.filters import parse_filter
from pipeline.search.searcher import Searcher
from pipeline.search.served import require_encoder
from pipeline.search_options import PublicSearchKeywords, SearchOptions
from pipeline.types import Document, QueryEncoder, Reranker, SearchResult

if TYPE_CHECKING:
    from pipeline.encode.text_encoder import TextEncoder

_BASE_MODEL_NOTE = (
    "all-MiniLM-L6-v2 is trained neither for landmarks nor for context: chunks are pooled as it was trained, "
    "and the stored context is read only with --use-context"
)


def collections_root(root: str | Path | None) -> Path:
    """Return where collections live: ``root``, else ``CAIRN_ROOT``, else ``./cairn-data``."""
    return Path(root if root is not None else os.environ.get("CAIRN_ROOT", DEFAULT_ROOT))


def open_collection(
    name: str, *, root: str | Path | None = None, encoder: QueryEncoder | None = None
) -> Collection:
    """Open a collection for searching.

    ``encoder`` replaces the one the manifest describes; its fingerprint must be the same. Raises
    :class:`CollectionNotFoundError` naming the collections there are.
    """
    layout = CollectionLayout(collections_root(root), name)
    layout.require_exists()
    return Collection(layout, encoder)


class Collection:
    """One collection: search it, read its documents, ask for its state. Safe to share between threads."""

    def __init__(self, layout: CollectionLayout, encoder: QueryEncoder | None = None) -> None:
        self.layout = layout
        self._given_encoder = encoder
        self._opened: Searcher | None = None
        self._rerankers: dict[str, Reranker] = {}

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

        The options are those of :class:`pipeline.search_options.SearchOptions`. ``rerank`` names a
        cross-encoder, by name or folder, that judges the passages of the best documents again
        (:mod:`pipeline.search.rerank`); needs the extra ``rerank``.
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
            from pipeline.encode.cross_encoder import CrossEncoderReranker

            self._rerankers = {
                model: CrossEncoderReranker(model)
            }  # one is kept: models are rarely changed back
        return self._rerankers[model]

    def read_document(self, doc_id: str) -> Document | None:
        """Return a document by its id, None where there is none."""
        return self._searcher().read_document(doc_id)

    def parse_filters(self, expressions: Sequence[str]) -> dict[str, Any] | None:
        """Turn ``column=value`` expressions into a filter tree, values typed as their columns are."""
        return parse_filter(expressions, self._searcher().generation.document_schema)

    def status(self) -> dict[str, Any]:
        """Describe what is served, how it was built, and how far the corpus has drifted from its context."""
        status = collection_status(self.layout)
        generation = open_latest_intact_generation(self.layout, check_hashes=False)
        manifest = generation.manifest
        own = [generation.warning] if generation.warning else []
        context = ContextConfig(**manifest.settings["context"])
        status["warnings"] = [*own, *settings_warnings(manifest.encoder, context)]
        drift = measure_drift(
            manifest.context_cluster_sizes, status["cluster_sizes"], manifest.documents_at_context
        )
        status["encoder_note"] = _BASE_MODEL_NOTE if status["encoder"]["model"] in MODEL_NAMES else None
        status["context"]["drift"] = {
            "verdict": drift.verdict,
            "total_variation": drift.total_variation,
            "jensen_shannon_bits": drift.jensen_shannon_bits,
            "added_share": drift.added_share,
            "changed_clusters": list(drift.changed_clusters),
        }
        # Where no vector depends on the context, nothing is encoded again.
        tokens = manifest.tokens if manifest.encoder.needs_context else 0
        speed = manifest.encode_tokens_per_second
        status["context"]["recontextualisation"] = {
            "documents": manifest.documents if tokens else 0,
            "seconds": tokens / speed if speed else 0.0,
        }
        return status

    def _searcher(self) -> Searcher:
        if self._opened is None:
            self._opened = Searcher(self.layout, self._given_encoder or load_query_encoder)
        return self._opened


def load_query_encoder(generation: Generation) -> TextEncoder:
    """Build the encoder that a generation's manifest describes, with its context if the encoder reads one.

    A model whose weights have changed since raises :class:`FingerprintMismatchError`.
    """
    from pipeline.encode.text_encoder import TextEncoder  # torch comes in here, and only here

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
    with generation.layout.naming_damage():
        context = ContextSet.read(generation.side_file(CONTEXT_ARROW)) if config.needs_context else None
    encoder = TextEncoder(config, context)
    try:
        require_encoder(generation, encoder)
    except FingerprintMismatchError as error:
        raise FingerprintMismatchError(
            f"{error}; its model is {describe_model(config.model)}: where another folder holds the weights "
            "it was built with, ingest again with `--model FOLDER`"
        ) from error
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
                found = collection_status(CollectionLayout(collections_root(root), name))
            except CollectionNotFoundError:
                continue
            except (IntegrityError, StorageError):
                status = "damaged"
        told = {key: found.get(key) for key in ("collection", "documents", "chunks", "generation")}
        reports.append({"status": status, **told})
    return reports
