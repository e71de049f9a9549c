"""A collection that a framework's store writes: of this machine, or of a writable server.

Both may hold nothing yet, and answer nothing then.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import pyarrow as pa
from cairn.pipeline.client import errors
from cairn.pipeline.errors import ConfigError, UsageError
from cairn.pipeline.types import RESERVED_COLUMNS, Document, Hit

if TYPE_CHECKING:
    from cairn.pipeline.client import CairnClient, RemoteCollection
    from cairn.pipeline.collection import Collection

log = logging.getLogger(__name__)

_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True)
class WrittenCollection:
    """What a store does with its collection."""

    collection: Collection | RemoteCollection
    is_remote: bool

    @classmethod
    def of(
        cls,
        collection: str | RemoteCollection,
        *,
        root: str | Path | None = None,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> WrittenCollection:
        """Return a collection by its name under a root, or one behind the API."""
        if not isinstance(collection, str):
            if root is not None or settings is not None:
                raise ConfigError(
                    "a collection behind the API must come without root and settings, got some; give the "
                    "settings to CairnClient.create"
                )
            return cls(collection, is_remote=True)
        from cairn.pipeline.collection import Collection, collections_root
        from cairn.pipeline.index.layout import CollectionLayout

        # What it writes is what it searches, whatever else the name may answer from.
        layout = CollectionLayout.at(collections_root(root), collection)
        return cls(Collection(layout, settings=settings), is_remote=False)

    @property
    def local(self) -> Collection:
        """The collection of this machine; one behind the API raises :class:`UsageError`."""
        if self.is_remote:
            raise UsageError("this must be asked of a collection of this machine, got one behind the API")
        return cast("Collection", self.collection)

    @property
    def is_empty(self) -> bool:
        """Tell whether nothing was ever published; of a server, its answers tell."""
        return not self.is_remote and not self.local.layout.exists()

    def add(self, rows: pa.Table | Sequence[Mapping[str, Any]]) -> None:
        """Add documents with ``id``, ``title``, ``text`` and metadata, or replace those of the same ids.

        A collection that there is not is made.
        """
        if self.is_remote:
            collection = cast("RemoteCollection", self.collection)
            given = cast("Any", rows).to_pylist() if isinstance(rows, pa.Table) else rows
            documents = [_without_nulls(row) for row in given]
            try:
                collection.add(documents)
            except errors.NotFoundError:
                with contextlib.suppress(errors.ConflictError):  # another has made it meanwhile
                    cast("CairnClient", collection.client).create(collection.name)
                collection.add(documents)
            return
        report = self.local.add(rows)
        if report.quarantined:
            counts = sorted(report.quarantine_reasons.items())
            reasons = ", ".join(f"{reason}: {count}" for reason, count in counts)
            raise UsageError(
                f"every text must be one that can be indexed, got {report.quarantined} that cannot "
                f"({reasons}); the others are in"
            )

    def delete(self, wanted: Sequence[str] | Mapping[str, Any]) -> int:
        """Delete documents by their ids, or those that match a filter tree; return how many there were."""
        return self._read(lambda: self.collection.delete(wanted).deleted, 0) if wanted else 0

    def read(self, doc_ids: Iterable[str]) -> list[Document]:
        """Return the documents of these ids that are there, each once, in the order asked."""
        wanted = dict.fromkeys(doc_ids)
        found = [self._read(lambda own=each: self.collection.read_document(own), None) for each in wanted]
        return [each for each in found if each is not None]

    def hits(self, query: str | Sequence[float], options: Mapping[str, Any]) -> Sequence[Hit]:
        """Rank documents for a query, or for a vector of the collection's own encoder."""
        if isinstance(query, str):
            return self._read(lambda: self.collection.search(query, **options).hits, [], is_search=True)
        vectors = np.asarray([query], np.float32)
        return self._read(lambda: self.local.search_vectors(vectors, **options)[0].hits, [], is_search=True)

    def _read(self, call: Callable[[], _Found], nothing: _Found, *, is_search: bool = False) -> _Found:
        """Return what a call reads, and ``nothing`` of a collection of which nothing is published.

        A search of one that is not there is warned of; other calls come before a first add as well.
        """
        if self.is_remote:
            try:
                return call()
            except (errors.ConflictError, errors.NotFoundError) as error:
                if not error.type.endswith((":collection-empty", ":unknown-collection")):
                    raise
                is_there = error.type.endswith(":collection-empty")
        elif self.is_empty:
            is_there = self.local.layout.is_begun()
        else:
            return call()
        if is_search and not is_there:
            _warn_of_unknown(self.collection.name)
        return nothing


@cache
def _warn_of_unknown(name: str) -> None:
    log.warning("there is no collection %r, so a search finds nothing; check the name or add texts", name)


def columns_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of metadata can be filtered by; other values are kept in the whole, as JSON."""
    return {
        name: value
        for name, value in metadata.items()
        if name not in RESERVED_COLUMNS and name != "id" and (_is_plain(value) or _is_list_of_texts(value))
    }


def title_of(metadata: Mapping[str, Any]) -> str | None:
    """Return a metadata ``title`` that is a text."""
    title = metadata.get("title")
    return title if isinstance(title, str) and title.strip() else None


def as_json(value: Any, what: str) -> str:
    """Return metadata as JSON; what is none raises :class:`UsageError`."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError(f"{what} must be JSON without NaN, got {str(error)[:80]!r}") from None


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | bool | int | float)


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) for each in value)


def _without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None}
