"""Cairn in Haystack: a retriever of passages, here or behind the API, and a document store on this machine.

    pipeline.add_component("retriever", CairnRetriever("handbook", url="http://127.0.0.1:8400"))
    Pipeline.loads(written, allowed_modules=["cairn.pipeline.frameworks.haystack"])
    DocumentWriter(CairnDocumentStore("notes"), policy=DuplicatePolicy.OVERWRITE).run(documents)

Filters may be Haystack's (``{"field": "meta.year", "operator": ">=", "value": 2020}``) or Cairn's (``{"type":
"gte", …}``).

In the store Cairn embeds the texts itself: embeddings that documents bring are not kept. Metadata comes back
as it was; numbers, booleans, texts and lists of texts can be filtered by, and a name has one type. Every call
that writes publishes a generation, so write many documents at once. Over the API, write with
:class:`cairn.CairnClient`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, cast

from cairn.pipeline.errors import FilterError, extra_missing
from cairn.pipeline.frameworks.source import (
    COMPARISONS,
    HAYSTACK_COLUMN,
    Searchable,
    WrittenCollection,
    as_cairn_has_it,
    as_json,
    find_passages,
    open_source,
    row_of,
)
from cairn.pipeline.search.filters import MAX_LIST_VALUES
from cairn.pipeline.search_options import SearchParameters
from cairn.pipeline.types import Document as StoredDocument

try:
    from haystack import Document, component, default_from_dict, default_to_dict
    from haystack.document_stores.errors import DuplicateDocumentError
    from haystack.document_stores.types import DuplicatePolicy
    from haystack.errors import FilterError as HaystackFilterError
    from haystack.utils import Secret
except ModuleNotFoundError as error:
    raise extra_missing(
        error, what="Haystack", module="haystack", package="haystack-ai", extra="haystack"
    ) from None

_COMPARISONS: Final = {**COMPARISONS, "not in": "nin"}
_COMBINATIONS: Final = {"AND": "and", "OR": "or"}


@component
class CairnRetriever:
    """Retrieves passages of a collection: behind the API at ``url``, else under ``root`` on this machine.

    ``parameters`` are more keywords of a search, such as ``{"max_characters": 2000}``. Haystack writes the
    arguments to YAML, the key by its variable's name only. The collection is opened at the first run, or by
    ``warm_up``.
    """

    def __init__(
        self,
        collection: str,
        *,
        url: str | None = None,
        root: str | None = None,
        api_key: Secret = Secret.from_env_var("CAIRN_API_KEY", strict=False),  # noqa: B008 - Haystack's way to name a variable
        top_k: int = 10,
        filters: dict[str, Any] | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        self.collection = collection
        self.url = url
        self.root = root
        self.api_key = api_key
        self.top_k = top_k
        self.filters = filters
        self.parameters = parameters or {}
        self._source: Searchable | None = None

    def warm_up(self) -> None:
        """Open the collection."""
        if self._source is None:
            root = None if self.root is None else Path(self.root)
            self._source = open_source(
                self.collection, root=root, url=self.url, api_key=self.api_key.resolve_value()
            )

    @component.output_types(documents=list[Document])
    def run(
        self, query: str, filters: dict[str, Any] | None = None, top_k: int | None = None
    ) -> dict[str, list[Document]]:
        """Return the best passages; arguments take the place of the component's own."""
        self.warm_up()
        assert self._source is not None
        chosen = cairn_filter(filters if filters is not None else self.filters)
        parameters = cast(SearchParameters, {**self.parameters, "filters": chosen})
        found = find_passages(self._source, query, self.top_k if top_k is None else top_k, parameters)
        documents = [
            Document(id=each.passage_id, content=each.text, score=each.score, meta=dict(each.metadata))
            for each in found
        ]
        return {"documents": documents}


def cairn_filter(filters: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a filter in Cairn's grammar; one that has a ``type`` or names columns is in it already.

    As in Haystack, `!=`, `not in` and NOT match documents without a value.
    """
    if not filters:
        return None
    if "operator" not in filters and "field" not in filters and "conditions" not in filters:
        return dict(filters)
    return as_cairn_has_it(_tree(filters))


def _tree(filters: object) -> dict[str, Any]:
    if not isinstance(filters, Mapping):
        raise FilterError(f"a condition must be an object, got a value of type {type(filters).__name__}")
    node = cast("Mapping[str, Any]", filters)
    operator = node.get("operator")
    if operator in (*_COMBINATIONS, "NOT"):
        conditions = node.get("conditions")
        if not isinstance(conditions, list) or not conditions:
            raise FilterError(f"{operator} must have conditions, a list of at least one, got none")
        trees = [_tree(each) for each in cast("list[object]", conditions)]
        if operator == "NOT":
            return {"type": "not", "filter": {"type": "and", "filters": trees}}
        return {"type": _COMBINATIONS[operator], "filters": trees}
    if operator not in _COMPARISONS or not isinstance(node.get("field"), str) or "value" not in node:
        known = ", ".join([*_COMBINATIONS, "NOT", *_COMPARISONS])
        raise FilterError(
            f"a filter must have a field, a value and one of the operators {known}, got "
            f"{str(operator)[:20]!r}"
        )
    kind, key, value = _COMPARISONS[operator], node["field"].removeprefix("meta."), node["value"]
    if kind in ("in", "nin") and not isinstance(value, list):
        raise FilterError(f"`{operator}` must come with a list of values, got {type(value).__name__}")
    if value is None:  # which no value is larger or smaller than
        either = [{"type": each, "key": key} for each in ("is_null", "is_not_null")]
        return either[kind == "ne"] if kind in ("eq", "ne") else {"type": "and", "filters": either}
    return {"type": kind, "key": key, "value": value}


class CairnDocumentStore:
    """Documents in the collection of a name, which is made at the first write.

    ``settings`` are an ingest's, by stage, and count for a new collection.
    """

    def __init__(
        self,
        collection: str,
        *,
        root: str | None = None,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._own = {"collection": collection, "root": root, "settings": settings}
        self._source = WrittenCollection.of(collection, root=root, settings=settings)

    def to_dict(self) -> dict[str, Any]:
        """Return what the store is made of, for a pipeline in YAML."""
        return default_to_dict(self, **self._own)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Make a store of what :meth:`to_dict` gave."""
        return default_from_dict(cls, data)

    def count_documents(self) -> int:
        """Count the documents."""
        return 0 if self._source.is_empty else len(self._source.local.documents)

    def filter_documents(self, filters: dict[str, Any] | None = None) -> list[Document]:
        """Return the documents that match Haystack's filters, or Cairn's, in the order of their writes."""
        return [_as_document(each) for each in self._source.read(self._ids(filters))]

    def write_documents(
        self, documents: list[Document], policy: DuplicatePolicy = DuplicatePolicy.NONE
    ) -> int:
        """Write documents and return how many; without a policy one that is there is refused, and all are."""
        given = cast("Any", documents)
        if not isinstance(given, list) or not all(isinstance(each, Document) for each in cast("Any", given)):
            raise ValueError("documents must be a list of haystack's Document, got something else")
        for place, document in enumerate(documents):
            if not (document.content or "").strip():
                raise ValueError(f"a document must hold text, got document {place} with none; leave it out")
        newest = {document.id: document for document in documents}
        if policy is not DuplicatePolicy.OVERWRITE:
            there = self._present([*newest])
            if there and policy is not DuplicatePolicy.SKIP:
                raise DuplicateDocumentError(f"documents must have new ids, got {sorted(there)[0]!r}")
            newest = {doc_id: document for doc_id, document in newest.items() if doc_id not in there}
        if newest:
            self._source.add([_row(document) for document in newest.values()])
        return len(documents) if policy is DuplicatePolicy.OVERWRITE else len(newest)

    def delete_documents(self, document_ids: list[str]) -> None:
        """Delete documents by their ids; those that are not there are passed over."""
        self._source.delete(document_ids)

    def delete_by_filter(self, filters: dict[str, Any]) -> int:
        """Delete the documents that match filters, and return how many there were."""
        return self._source.delete(self._ids(filters))

    def delete_all_documents(self) -> None:
        """Delete all documents; the collection stays."""
        self._source.delete(self._ids(None))

    def _ids(self, filters: dict[str, Any] | None) -> list[str]:
        try:
            return self._source.ids(cairn_filter(filters))
        except FilterError as error:
            raise HaystackFilterError(str(error)) from error

    def _present(self, ids: Sequence[str]) -> set[str]:
        found: set[str] = set()
        for start in range(0, len(ids), MAX_LIST_VALUES):
            wanted = {"type": "in", "key": "doc_id", "value": [*ids[start : start + MAX_LIST_VALUES]]}
            found.update(self._source.ids(wanted))
        return found


def _row(document: Document) -> dict[str, Any]:
    kept = {HAYSTACK_COLUMN: as_json(document.meta, "meta")}
    return row_of(document.id, document.content, document.meta, **kept)


def _as_document(stored: StoredDocument) -> Document:
    kept = stored.metadata.get(HAYSTACK_COLUMN)
    meta = dict(stored.metadata) if kept is None else json.loads(kept)
    return Document(id=stored.doc_id, content=stored.text, meta=meta)
