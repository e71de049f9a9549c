"""Cairn in LlamaIndex: a retriever of passages as nodes, and a vector store whose documents are nodes.

    CairnRetriever(open_collection("handbook"), similarity_top_k=4).retrieve("how do I reset a password")
    store = CairnVectorStore("notes")                                 # or CairnClient(…).collection("notes")
    IngestionPipeline(transformations=[SentenceSplitter(), LeaveUnembedded()], vector_store=store).run(…)
    VectorStoreIndex.from_vector_store(store, embed_model=MockEmbedding(1)).as_retriever()

Over the API, a collection is ``CairnClient(…).collection("handbook")``. In the store Cairn embeds the texts
itself: embeddings of nodes are not kept, and queries are sent as texts. Nodes come back as they were;
numbers, booleans, texts and lists of texts of their metadata can be filtered by, and a name has one type.
Every call that writes publishes a generation, so add many nodes at once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from cairn.pipeline.errors import ConfigError, FilterError, extra_missing
from cairn.pipeline.frameworks.source import (
    COMPARISONS,
    LLAMA_COLUMN,
    FoundPassage,
    Searchable,
    WrittenCollection,
    as_cairn_has_it,
    as_json,
    find_passages,
    row_of,
)
from cairn.pipeline.search_options import SearchParameters
from cairn.pipeline.types import Document as StoredDocument
from typing_extensions import override

try:
    from llama_index.core.bridge.pydantic import PrivateAttr
    from llama_index.core.callbacks import CallbackManager
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import (
        BaseNode,
        MetadataMode,
        NodeRelationship,
        NodeWithScore,
        QueryBundle,
        RelatedNodeInfo,
        TextNode,
        TransformComponent,
    )
    from llama_index.core.vector_stores.types import (
        BasePydanticVectorStore,
        FilterCondition,
        FilterOperator,
        MetadataFilter,
        MetadataFilters,
        VectorStoreQuery,
        VectorStoreQueryMode,
        VectorStoreQueryResult,
    )
    from llama_index.core.vector_stores.utils import metadata_dict_to_node, node_to_metadata_dict
except ModuleNotFoundError as error:
    raise extra_missing(
        error, what="LlamaIndex", module="llama_index", package="llama-index-core", extra="llama-index"
    ) from None

if TYPE_CHECKING:
    from cairn.pipeline.client.clients import RemoteCollection

SOURCE_COLUMN: Final = "ref_doc_id"
DEFAULT_MMR: Final = 0.5
_COMPARISONS: Final = {
    **COMPARISONS,
    "nin": "nin",
    "any": "in",
    "contains": "contains",
    "text_match": "contains",
}
_FOR_MACHINES: Final = [
    "doc_id",
    "start_char",
    "end_char",
    "score",
    "scores",
    "highlights",
    "title_highlights",
    "collection",
    "generation",
    "warnings",
]
"""Metadata that says nothing to a language model or an embedding."""


class CairnRetriever(BaseRetriever):
    """Retrieves passages as nodes, scored; ``filters`` and ``parameters`` are those of a search."""

    def __init__(
        self,
        collection: Searchable,
        *,
        similarity_top_k: int = 4,
        filters: Mapping[str, Any] | None = None,
        parameters: Mapping[str, Any] | None = None,
        callback_manager: CallbackManager | None = None,
        verbose: bool = False,
    ) -> None:
        super().__init__(callback_manager=callback_manager, verbose=verbose)
        self.collection = collection
        self.similarity_top_k = similarity_top_k
        self.filters = filters
        self.parameters = dict(parameters or {})

    @override
    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        parameters = cast(SearchParameters, {**self.parameters, "filters": self.filters})
        return [
            _passage_node(passage)
            for passage in find_passages(
                self.collection, query_bundle.query_str, self.similarity_top_k, parameters
            )
        ]

    @override
    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)


def _passage_node(passage: FoundPassage) -> NodeWithScore:
    """Return a passage as LlamaIndex has nodes."""
    node = TextNode(
        id_=passage.passage_id,
        text=passage.text,
        start_char_idx=passage.start_char,
        end_char_idx=passage.end_char,
        metadata=dict(passage.metadata),
        excluded_llm_metadata_keys=_FOR_MACHINES,
        excluded_embed_metadata_keys=_FOR_MACHINES,
        relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=passage.doc_id)},
    )
    return NodeWithScore(node=node, score=passage.score)


class LeaveUnembedded(TransformComponent):
    """A last step of an ingestion pipeline, which hands only embedded nodes to a store; Cairn embeds them."""

    @override
    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        for node in nodes:
            node.embedding = node.embedding or []
        return nodes


class CairnVectorStore(BasePydanticVectorStore):
    """Nodes in the collection of a name, which is made at the first add, or in one behind the API.

    ``settings`` are an ingest's, by stage, and count for a new collection.
    """

    stores_text: bool = True
    is_embedding_query: bool = False
    _source: WrittenCollection = PrivateAttr()

    def __init__(
        self,
        collection: str | RemoteCollection,
        *,
        root: str | Path | None = None,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        super().__init__(stores_text=True, is_embedding_query=False)
        self._source = WrittenCollection.of(collection, root=root, settings=settings)

    @classmethod
    @override
    def class_name(cls) -> str:
        return "CairnVectorStore"

    @property
    @override
    def client(self) -> Any:
        """The collection."""
        return self._source.collection

    @override
    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        """Add nodes, or replace those of the same ids; all are one publication."""
        newest = {node.node_id: _row(node) for node in nodes}
        if newest:
            self._source.add([*newest.values()])
        return [node.node_id for node in nodes]

    @override
    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete the nodes of a source document."""
        self._source.delete({"type": "eq", "key": SOURCE_COLUMN, "value": ref_doc_id})

    @override
    def delete_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None, **delete_kwargs: Any
    ) -> None:
        """Delete nodes by their ids, or those that match filters, or both hold for."""
        if filters is None:
            self._source.delete(node_ids or [])
        elif node_ids != []:
            self._source.delete(_both(_in("doc_id", node_ids), cairn_filter(filters)) or {})

    @override
    def clear(self) -> None:
        """Delete all nodes; the collection stays."""
        self._source.delete({"type": "is_not_null", "key": "doc_id"})

    @override
    def get_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        """Return nodes by their ids, those that match filters, those for which both hold, or all."""
        if filters is None and node_ids is not None:
            return [_as_node(each) for each in self._source.read(node_ids)]
        tree = _both(_in("doc_id", node_ids), cairn_filter(filters))
        return [_as_node(each) for each in self._source.read(self._source.ids(tree))]

    @override
    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        """Rank nodes for the text of a query, or for a vector of the collection's own encoder."""
        if query.mode not in (
            VectorStoreQueryMode.DEFAULT,
            VectorStoreQueryMode.HYBRID,
            VectorStoreQueryMode.MMR,
        ):
            raise ConfigError(f"a query's mode must be default, hybrid or mmr, got {query.mode.value}")
        asked = query.query_str if query.query_str is not None else query.query_embedding
        if asked is None:
            raise ConfigError("a query must have query_str, got none; Cairn embeds it")
        tree = _both(
            _in(SOURCE_COLUMN, query.doc_ids or None),
            _in("doc_id", query.node_ids or None),
            cairn_filter(query.filters),
        )
        options: dict[str, Any] = {"top_k": query.similarity_top_k, "passages": 0, "filters": tree}
        if query.mode is VectorStoreQueryMode.MMR:
            options["mmr"] = DEFAULT_MMR if query.mmr_threshold is None else query.mmr_threshold
        scores = {hit.doc_id: hit.score for hit in self._source.hits(asked, options)}
        nodes = [_as_node(each) for each in self._source.read(scores)]
        ids = [node.node_id for node in nodes]
        return VectorStoreQueryResult(nodes=nodes, similarities=[scores[each] for each in ids], ids=ids)


def cairn_filter(filters: MetadataFilters | None) -> dict[str, Any] | None:
    """Return a filter in Cairn's grammar, None where there is none."""
    return None if filters is None or not filters.filters else as_cairn_has_it(_combined(filters))


def _combined(filters: MetadataFilters) -> dict[str, Any]:
    """Return the tree of filters; NOT is that none of them holds."""
    condition = filters.condition or FilterCondition.AND
    trees = [
        _combined(each) if isinstance(each, MetadataFilters) else _compared(each) for each in filters.filters
    ]
    tree = {"type": "and" if condition is FilterCondition.AND else "or", "filters": trees}
    return {"type": "not", "filter": tree} if condition is FilterCondition.NOT else tree


def _compared(each: MetadataFilter) -> dict[str, Any]:
    if each.operator is FilterOperator.IS_EMPTY:
        return {"type": "is_null", "key": each.key}
    if each.operator is FilterOperator.ALL:
        values = each.value if isinstance(each.value, list) else [each.value]
        return {
            "type": "and",
            "filters": [{"type": "in", "key": each.key, "value": [value]} for value in values],
        }
    if each.operator.value not in _COMPARISONS:
        raise FilterError(f"a filter's operator must be one that Cairn has, got {each.operator.value}")
    return {"type": _COMPARISONS[each.operator.value], "key": each.key, "value": each.value}


def _in(key: str, values: Sequence[str] | None) -> dict[str, Any] | None:
    return None if values is None else {"type": "in", "key": key, "value": [*values]}


def _both(*trees: dict[str, Any] | None) -> dict[str, Any] | None:
    there = [tree for tree in trees if tree is not None]
    return {"type": "and", "filters": there} if len(there) > 1 else next(iter(there), None)


def _row(node: BaseNode) -> dict[str, Any]:
    metadata: dict[str, Any] = node_to_metadata_dict(node, remove_text=True, flat_metadata=False)
    kept = {
        SOURCE_COLUMN: node.ref_doc_id
        or "None",  # as LlamaIndex's own store has it: there is always a column
        LLAMA_COLUMN: as_json({name: metadata[name] for name in ("_node_content", "_node_type")}, "metadata"),
    }
    text = node.get_content(metadata_mode=MetadataMode.NONE)
    return row_of(node.node_id, text, node.metadata, **kept)


def _as_node(stored: StoredDocument) -> BaseNode:
    kept = stored.metadata.get(LLAMA_COLUMN)
    if kept is None:  # written by something else
        return TextNode(id_=stored.doc_id, text=stored.text, metadata=dict(stored.metadata))
    return metadata_dict_to_node(cast("dict[str, Any]", json.loads(kept)), text=stored.text)
