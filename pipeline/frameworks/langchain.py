"""Cairn in LangChain: a retriever and embeddings, of this machine or over the API, and a store that writes.

    CairnRetriever(collection=open_collection("handbook"), k=4).invoke("how do I reset a password")
    CairnEmbeddings(load_encoder("cairn-minilm"))
    CairnVectorStore("notes").add_texts(["a first note", "a second one"])

Over the API, the collection is ``CairnClient(…).collection("handbook")``; embeddings then are of its encoder
and context.

The store is a collection with each text as a document: of this machine, or of a writable server. Here, every
call that writes is an ingest and publishes a generation, so add in large batches. One writer works at a time;
others get :class:`CollectionBusyError`. The first batch draws the clusters and the context: let it be a fair
sample. The collection embeds with its own encoder, so no other embeddings are taken. LangChain's metadata is
kept as JSON; only keys named in ``filter_columns`` can be filtered by.
"""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self, cast

import pyarrow as pa
from cairn.pipeline.errors import ConfigError, UsageError, extra_missing
from cairn.pipeline.frameworks.source import (
    LANGCHAIN_COLUMN,
    WrittenCollection,
    as_json,
    find_passages,
    kept_whole,
    title_of,
)
from cairn.pipeline.search_options import MAX_TOP_K, PublicSearchKeywords, SearchKeywords, SearchParameters
from cairn.pipeline.types import Hit
from typing_extensions import override

try:
    from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables import run_in_executor
    from langchain_core.vectorstores import VectorStore
except ModuleNotFoundError as error:
    raise extra_missing(
        error, what="LangChain", module="langchain_core", package="langchain-core", extra="langchain"
    ) from None

if TYPE_CHECKING:
    from cairn.pipeline.client.clients import RemoteCollection
    from cairn.pipeline.encode.text_encoder import TextEncoder

HIGHLIGHTED_PASSAGES: Final = 3
_NOT_CALIBRATED: Final = (
    "the collection has too few documents to tell how probable answers are, or is being measured: these "
    "scores are relative to the best possible for the query, and no threshold was applied by the search"
)
_TYPES: Final[Mapping[str, pa.DataType]] = {
    "string": pa.string(),
    "integer": pa.int64(),
    "number": pa.float64(),
    "boolean": pa.bool_(),
}

ColumnType = Literal["string", "integer", "number", "boolean"]


class CairnRetriever(BaseRetriever):
    """Retrieves passages; ``k``, ``filters`` and ``parameters`` may be given to ``invoke`` as well.

    ``collection`` is what ``open_collection`` or ``CairnClient.collection`` returns. ``filters`` is Cairn's
    filter tree; ``parameters`` are more keywords of a search, such as ``{"max_characters": 2000}`` or
    ``{"granularity": "chunk", "passages": 1}``.
    """

    collection: Any
    k: int = 4
    filters: Mapping[str, Any] | None = None
    parameters: Mapping[str, Any] = {}

    @override
    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **asked: Any
    ) -> list[Document]:
        return self._find(query, asked)

    @override
    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **asked: Any
    ) -> list[Document]:
        return await run_in_executor(None, self._find, query, asked)

    def _find(self, query: str, asked: Mapping[str, Any]) -> list[Document]:
        unknown = set(asked) - {"k", "filters", "parameters"}
        if unknown:
            raise ConfigError(
                f"a retriever takes k, filters and parameters, got {', '.join(sorted(unknown))}"
            )
        chosen = {
            **self.parameters,
            "filters": asked.get("filters", self.filters),
            **asked.get("parameters", {}),
        }
        found = find_passages(self.collection, query, asked.get("k", self.k), cast(SearchParameters, chosen))
        return [
            Document(id=each.passage_id, page_content=each.text, metadata=dict(each.metadata))
            for each in found
        ]


class CairnEmbeddings(Embeddings):
    """LangChain's interface to an encoder: ``load_encoder(…)``, or a collection behind the API."""

    def __init__(self, encoder: TextEncoder | RemoteCollection) -> None:
        self.encoder = encoder

    @override
    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self.encoder.encode_documents(texts).tolist() if texts else []

    @override
    def embed_query(self, text: str) -> list[float]:
        return self.encoder.encode_queries([text])[0].tolist()


class CairnVectorStore(VectorStore):
    """Stores texts in the collection of this name, which is made at the first add, or in one behind the API.

    ``settings`` are an ingest's, by stage (``{"encoder": {"model": "all-MiniLM-L6-v2"}}``), and count for a
    new collection. ``filter_columns`` names metadata with a type to be filtered by. A metadata ``title`` that
    is a text is the document's title.
    """

    def __init__(
        self,
        collection: str | RemoteCollection,
        *,
        root: str | Path | None = None,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        filter_columns: Mapping[str, ColumnType] | None = None,
    ) -> None:
        self.source = WrittenCollection.of(collection, root=root, settings=settings)
        self.collection: Any = self.source.collection
        self._columns = {name: _column_type(name, kind) for name, kind in (filter_columns or {}).items()}

    @override
    def add_documents(
        self,
        documents: list[Document],
        *,
        ids: Sequence[str | None] | None = None,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add documents, or replace those of the same ids; returns the ids, drawn where none are given.

        All are one publication, whatever ``batch_size`` is.
        """
        _require_known(kwargs)
        if ids is not None and len(ids) != len(documents):
            raise UsageError(
                f"there must be one id a document, got {len(ids)} ids and {len(documents)} documents"
            )
        wanted = list(ids) if ids is not None else [document.id for document in documents]
        chosen = [doc_id or str(uuid.uuid4()) for doc_id in wanted]
        for place, document in enumerate(documents):
            if not document.page_content.strip():
                raise UsageError(f"a document must hold text, got document {place} with none; leave it out")
        if documents:
            # Of one id the last counts, as if added one by one.
            self.source.add(self._table(dict(zip(chosen, documents, strict=True))))
        return chosen

    @override
    def add_texts(
        self,
        texts: Iterable[str],
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> list[str]:
        """Add texts as documents; see :meth:`add_documents`."""
        texts = list(texts)  # LangChain reads a generator twice
        return super().add_texts(texts, metadatas, ids=ids, **kwargs)

    @override
    def delete(self, ids: list[str] | str | None = None, **kwargs: Any) -> bool:
        """Delete documents, or one by its id; ids that are not there are passed over."""
        _require_known(kwargs)
        if ids is None:
            raise UsageError(
                "ids to delete must be given, got none; to delete everything, remove the collection's folder"
            )
        self.source.delete([ids] if isinstance(ids, str) else ids)
        return True

    @override
    def get_by_ids(self, ids: Sequence[str], /) -> list[Document]:
        """Return the documents of these ids that are there, in the order asked."""
        found = self.source.read([ids] if isinstance(ids, str) else ids)
        return [_as_document(each.doc_id, each.text, each.metadata) for each in found]

    @override
    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        """Return the best documents; keywords are those of :meth:`similarity_search_with_score`."""
        return [document for document, _ in self.similarity_search_with_score(query, k, **kwargs)]

    @override
    def similarity_search_with_score(
        self,
        query: str,
        k: int = 4,
        *,
        filter: Mapping[str, Any] | None = None,
        hybrid: bool = True,
        highlights: bool = False,
        min_probability: float | None = None,
        **kwargs: Any,
    ) -> list[tuple[Document, float]]:
        """Return whole documents with their scores, best first; with ``min_probability`` their probabilities.

        ``filter`` is Cairn's over ``filter_columns``: ``{"kind": ["a", "b"]}``, or a tree. With
        ``highlights`` the metadata has ``highlights`` and ``title_highlights``: the words of a document's
        best passages, and of its title, that answered, as dictionaries of
        :class:`cairn.pipeline.types.Highlight`. Their spans count in ``page_content``.
        """
        _require_known(kwargs)
        options: PublicSearchKeywords = {"hybrid": hybrid, "min_probability": min_probability}
        return self._found(query, k, filter, options, highlights=highlights)

    @override
    def _similarity_search_with_relevance_scores(
        self, query: str, k: int = 4, **kwargs: Any
    ) -> list[tuple[Document, float]]:
        """Return documents with the probability that each answers, which thresholds are compared with."""
        kwargs.setdefault("min_probability", 0.0)
        return self.similarity_search_with_score(query, k, **kwargs)

    @override
    def similarity_search_by_vector(
        self, embedding: list[float], k: int = 4, *, filter: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> list[Document]:
        """Return the documents nearest to a vector that the collection's own encoder made."""
        _require_known(kwargs)
        return _documents(self._found(embedding, k, filter, {}))

    @override
    def max_marginal_relevance_search(
        self,
        query: str,
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        *,
        filter: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """Return documents that answer a query and are unlike one another, chosen among the best ``fetch_k``.

        ``lambda_mult`` is from 0, which looks at likeness alone, to 1, which looks at scores alone. A server
        takes no ``fetch_k``: it chooses among its own number of candidates.
        """
        _require_known(kwargs)
        return _documents(self._found(query, k, filter, self._marginal(k, fetch_k, lambda_mult)))

    @override
    def max_marginal_relevance_search_by_vector(
        self,
        embedding: list[float],
        k: int = 4,
        fetch_k: int = 20,
        lambda_mult: float = 0.5,
        *,
        filter: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> list[Document]:
        """Do as :meth:`max_marginal_relevance_search` for a vector of the collection's own encoder."""
        _require_known(kwargs)
        return _documents(self._found(embedding, k, filter, self._marginal(k, fetch_k, lambda_mult)))

    def _found(
        self,
        query: str | Sequence[float],
        k: int,
        filters: Mapping[str, Any] | None,
        options: PublicSearchKeywords,
        *,
        highlights: bool = False,
    ) -> list[tuple[Document, float]]:
        if not 1 <= k <= MAX_TOP_K:
            raise ConfigError(f"k must be a number from 1 to {MAX_TOP_K}, got {k}")
        passages = HIGHLIGHTED_PASSAGES if highlights else 0
        asked: PublicSearchKeywords = {
            **options,
            "top_k": k,
            "passages": passages,
            "filters": filters or None,
        }
        hits = self.source.hits(query, asked)
        is_asked = options.get("min_probability") is not None
        if is_asked and any("probability" not in hit.scores for hit in hits):
            warnings.warn(_NOT_CALIBRATED, stacklevel=3)
        by_id = {hit.doc_id: hit for hit in hits}
        documents = self.get_by_ids(list(by_id))
        if highlights:
            for document in documents:
                document.metadata |= _highlights(by_id[str(document.id)])
        scores = {hit.doc_id: hit.threshold_score for hit in hits}
        return [(document, scores[str(document.id)]) for document in documents]

    def _marginal(self, k: int, fetch_k: int, lambda_mult: float) -> SearchKeywords:
        if self.source.is_remote:
            return {"mmr": lambda_mult}
        return {"mmr": lambda_mult, "max_candidates": max(k, fetch_k)}

    @override
    @classmethod
    def from_texts(
        cls,
        texts: list[str],
        embedding: Embeddings | None = None,
        metadatas: list[dict[str, Any]] | None = None,
        *,
        ids: list[str] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Make a store and add texts.

        ``embedding`` must be None or CairnEmbeddings, as the collection embeds with its own encoder.
        ``collection_name``, as other stores have it, stands for ``collection``.
        """
        if embedding is not None and not isinstance(embedding, CairnEmbeddings):
            raise ConfigError(
                f"a collection embeds with its own encoder, got {type(embedding).__name__}; "
                'leave embedding out and name a model: settings={"encoder": {"model": …}}'
            )
        if "collection_name" in kwargs and "collection" not in kwargs:
            kwargs["collection"] = kwargs.pop("collection_name")
        store = cls(**kwargs)
        store.add_texts(texts, metadatas, ids=ids)
        return store

    def _table(self, documents: Mapping[str, Document]) -> pa.Table:
        rows = list(documents.values())
        columns = {
            "id": pa.array(list(documents), pa.string()),
            "title": pa.array([title_of(row.metadata) for row in rows], pa.string()),
            "text": pa.array([row.page_content for row in rows], pa.large_string()),
            LANGCHAIN_COLUMN: pa.array([as_json(row.metadata, "metadata") for row in rows], pa.string()),
            **{
                name: _column(name, kind, [row.metadata.get(name) for row in rows])
                for name, kind in self._columns.items()
            },
        }
        return pa.table(columns)


def _as_document(doc_id: str, text: str, metadata: Mapping[str, Any]) -> Document:
    kept = kept_whole(metadata.get(LANGCHAIN_COLUMN))
    if kept is None:
        kept = {
            name: value for name, value in metadata.items() if name != LANGCHAIN_COLUMN or value is not None
        }
    return Document(id=doc_id, page_content=text, metadata=kept)


def _highlights(hit: Hit) -> dict[str, Any]:
    """Return the words of a hit's passages and of its title, each word once, in their order."""
    places = {
        "highlights": [each for passage in hit.passages for each in passage.highlights],
        "title_highlights": [each for passage in hit.passages for each in passage.title_highlights],
    }
    return {
        name: [asdict(each) for _, each in sorted({each.start_char: each for each in found}.items())]
        for name, found in places.items()
    }


def _documents(found: Sequence[tuple[Document, float]]) -> list[Document]:
    return [document for document, _ in found]


def _column(name: str, kind: pa.DataType, values: Sequence[Any]) -> pa.Array:
    try:
        return pa.array(values, kind)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise UsageError(
            f"metadata {name!r} must be of the type given in filter_columns ({kind}), got another: {error}"
        ) from None


def _column_type(name: str, kind: str) -> pa.DataType:
    if kind not in _TYPES:
        raise ConfigError(f"the type of column {name!r} must be one of {', '.join(_TYPES)}, got {kind!r}")
    return _TYPES[kind]


def _require_known(keywords: Iterable[str]) -> None:
    if unknown := sorted(keywords):
        raise ConfigError(f"the store knows no {', '.join(unknown)}; leave it out")
