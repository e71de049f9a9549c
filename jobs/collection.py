"""A collection that can be written, too: what ``import cairn`` gives.

    notes = cairn.Collection.create("notes")
    report = notes.add([{"id": "1", "text": "a first note"}, {"id": "2", "text": "a second one"}])
    notes.search("note")

Every call that writes is the same job as ``ingest``: one writer at a time, others get
:class:`CollectionBusyError`; rows that cannot be indexed are quarantined and counted in the report; readers
see the generation before or the next one. It stands in ``jobs`` because it runs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

from jobs.build_index import build_index
from jobs.compatibility import stored_settings
from jobs.ingest_settings import STAGES, resolve_ingest_config
from pipeline import collection as read_only
from pipeline.collection import collections_root
from pipeline.config import CorpusConfig
from pipeline.corpus.given_rows import GivenRows, table_of
from pipeline.corpus.sources import TableSource
from pipeline.errors import ConfigError, SourceError
from pipeline.index.layout import CollectionLayout
from pipeline.index.maintenance import DeleteReport, delete_documents
from pipeline.model.folders.names import is_folder, model_folder
from pipeline.options import check_names, did_you_mean
from pipeline.types import IngestReport, ProgressListener, QueryEncoder, silent_progress


class ColumnKeywords(TypedDict, total=False):
    """Which columns hold what; see :class:`pipeline.config.CorpusConfig`."""

    id_column: str
    text_column: str
    title_column: str | None
    query_column: str | None
    metadata_columns: tuple[str, ...] | None


def open_collection(
    name: str,
    *,
    root: str | Path | None = None,
    encoder: QueryEncoder | None = None,
    verify: bool = False,
) -> Collection:
    """Open a collection; its model is loaded by the first search for a text.

    ``encoder`` replaces the one the manifest describes; its fingerprint must be the same. ``verify`` hashes
    every file that searches read, also those that this machine has hashed before. Raises
    :class:`CollectionNotFoundError` naming the collections there are.
    """
    return Collection(read_only.switched_layout(name, root), encoder, verify=verify)


class Collection(read_only.Collection):
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
        super().__init__(layout, encoder, verify=verify)
        self._settings = settings or {}

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
        layout = CollectionLayout(collections_root(root), name)
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
            folder = model_folder(model)
            chosen.setdefault("encoder", {})["model"] = str(folder.resolve()) if is_folder(model) else model
        resolve_ingest_config(chosen, None)
        return cls(layout, settings=chosen)

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
        progress: ProgressListener = silent_progress,
        **columns: Unpack[ColumnKeywords],
    ) -> IngestReport:
        """Make the collection hold these documents and no others: add as :meth:`add`, delete the rest."""
        return self._ingest(documents, progress, columns, sync=True)

    def delete(
        self,
        documents: str | Iterable[str] | Mapping[str, Any],
        *,
        progress: ProgressListener = silent_progress,
    ) -> DeleteReport:
        """Delete documents by their ids, or those that match a filter tree, and publish what is left.

        Ids that are not there are named in the report.
        """
        if isinstance(documents, Mapping):
            doc_ids = self.documents.ids(documents)
        else:
            doc_ids = [documents] if isinstance(documents, str) else list(documents)
        return delete_documents(self.layout, doc_ids, progress)

    def _ingest(
        self,
        documents: str | Path | GivenRows,
        progress: ProgressListener,
        columns: Mapping[str, Any],
        *,
        sync: bool,
    ) -> IngestReport:
        check_names("columns", columns, CorpusConfig)
        root = self.layout.root
        own = resolve_ingest_config({**self._settings, "sync": sync}, stored_settings(root, self.name))
        config = replace(own, corpus=replace(own.corpus, **columns), remembered_corpus=own.corpus)
        if isinstance(documents, str | Path):
            source = str(documents)
        else:
            table = table_of(documents, config.corpus)
            if table.num_rows == 0 and (sync or not self.layout.exists()):
                raise SourceError(
                    "the first `add`, and every `sync`, must be given at least one document, got none; to "
                    "empty a collection, call delete(collection.documents.ids())"
                )
            if table.num_rows == 0:
                return self._nothing_added()
            source = TableSource(table=table)
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
