"""A retriever for LlamaIndex: passages of a collection as nodes, with spans and their document as source.

    CairnRetriever(open_collection("handbook"), similarity_top_k=4).retrieve("how do I reset a password")

Over the API: ``CairnClient(…).collection("handbook")``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final, cast

from cairn.pipeline.client.calls import SearchParameters
from cairn.pipeline.errors import extra_missing
from cairn.pipeline.frameworks.source import FoundPassage, Searchable, find_passages
from typing_extensions import override

try:
    from llama_index.core.callbacks import CallbackManager
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import (
        NodeRelationship,
        NodeWithScore,
        QueryBundle,
        RelatedNodeInfo,
        TextNode,
    )
except ModuleNotFoundError as error:
    raise extra_missing(
        error,
        what="LlamaIndex's retriever",
        module="llama_index",
        package="llama-index-core",
        extra="llama-index",
    ) from None

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
            as_node(passage)
            for passage in find_passages(
                self.collection, query_bundle.query_str, self.similarity_top_k, parameters
            )
        ]

    @override
    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)


def as_node(passage: FoundPassage) -> NodeWithScore:
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
