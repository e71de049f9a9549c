"""The retriever in LlamaIndex's own types and its query engine."""

from __future__ import annotations

import asyncio

from cairn.llama_index import CairnRetriever
from cairn.pipeline.frameworks.source import Searchable
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers.no_text import NoText
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode

QUERY = "granite and slate"


def test_nodes_carry_span_source_and_score(stones: Searchable) -> None:
    retriever = CairnRetriever(
        stones, similarity_top_k=3, filters={"type": "gte", "key": "year", "value": 2004}
    )
    assert isinstance(retriever, BaseRetriever)
    found = retriever.retrieve(QUERY)
    assert len(found) == 3
    assert [node.score for node in found] == sorted((node.get_score() for node in found), reverse=True)
    for scored in found:
        assert isinstance(scored, NodeWithScore)
        node = scored.node
        assert isinstance(node, TextNode)
        document = stones.read_document(str(node.ref_doc_id))
        assert document is not None
        assert document.text[node.start_char_idx : node.end_char_idx] == node.get_content(MetadataMode.NONE)
        assert node.metadata["year"] >= 2004
        assert "scores" not in node.get_content(MetadataMode.LLM)


def test_awaited_retrieval_finds_the_same(stones: Searchable) -> None:
    retriever = CairnRetriever(stones, similarity_top_k=3, parameters={"max_characters": 200})
    awaited = asyncio.run(retriever.aretrieve(QUERY))
    assert [node.node_id for node in awaited] == [node.node_id for node in retriever.retrieve(QUERY)]


def test_query_engine_takes_the_retriever(stones: Searchable) -> None:
    engine = RetrieverQueryEngine(CairnRetriever(stones, similarity_top_k=2), NoText(llm=MockLLM()))
    response = engine.query(QUERY)
    assert len(response.source_nodes) == 2
