"""Retrievers of the frameworks: passages of a collection, here or behind the API."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from cairn import haystack, llama_index
from cairn.pipeline.errors import CollectionNotFoundError, ConfigError, FilterError
from cairn.pipeline.frameworks.haystack import cairn_filter
from cairn.pipeline.frameworks.source import find_passages, open_source
from haystack import Document, Pipeline
from haystack.components.builders import PromptBuilder
from haystack.utils import Secret
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers.no_text import NoText
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode

from tests.cli.test_imports import FRAMEWORKS, ROOT
from tests.frameworks.conftest import QUERY


def test_passages_are_cut_from_their_documents_best_first_as_parameters_of_the_search_say(stones):
    found = find_passages(stones, QUERY, 5, {"passages": 2})
    assert len(found) == 5
    assert [passage.score for passage in found] == sorted((passage.score for passage in found), reverse=True)
    for passage in found:
        document = stones.read_document(passage.doc_id)
        assert document is not None
        assert document.text[passage.start_char : passage.end_char] == passage.text
        assert passage.metadata["year"] == document.metadata["year"]
        assert passage.metadata["collection"] == "stones"
        assert {"document", "chunk"} <= set(passage.metadata["scores"])
    assert len({passage.passage_id for passage in found}) == 5
    only = find_passages(stones, QUERY, 5, {"filters": {"type": "eq", "key": "year", "value": 2003}})
    assert {passage.metadata["year"] for passage in only} == {2003}
    within = find_passages(stones, QUERY, 10, {"max_characters": 150})
    assert 0 < sum(len(passage.text) for passage in within) <= 150


def test_passages_of_diverse_documents_keep_their_order(stones):
    hits = stones.search(QUERY, top_k=4, passages=1, mmr=0.1).hits
    found = find_passages(stones, QUERY, 4, {"passages": 1, "mmr": 0.1})
    assert [passage.doc_id for passage in found] == [hit.doc_id for hit in hits]
    scores = [passage.score for passage in found]
    assert scores != sorted(scores, reverse=True)


def test_source_is_here_or_behind_a_url_and_numbers_that_cannot_be_answered_are_refused(
    stones_root, stones_address
):
    here, there = open_source("stones", root=stones_root), open_source("stones", url=stones_address)
    assert here.read_document("stones/slate/2").text == there.read_document("stones/slate/2").text  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="got both"):
        open_source("stones", root=stones_root, url=stones_address)
    with pytest.raises(CollectionNotFoundError):
        open_source("pebbles", root=stones_root)
    for source in (here, there):
        for number in (0, 201):
            with pytest.raises(ConfigError, match="from 1 to 200"):
                find_passages(source, QUERY, number, {})
        with pytest.raises(ConfigError, match="top_k must be left out"):
            find_passages(source, QUERY, 3, {"top_k": 5})


def test_extra_that_is_missing_is_named():
    extras = {
        "cairn.pipeline.client.clients": ("httpx2", "client"),
        "cairn.langchain": ("langchain-core", "langchain"),
        "cairn.llama_index": ("llama-index-core", "llama-index"),
        "cairn.haystack": ("haystack-ai", "haystack"),
        "cairn.pipeline.frameworks.mcp_server": ("mcp", "mcp"),
    }
    program = (
        f"import importlib, sys\nfor name in {FRAMEWORKS}: sys.modules[name] = None\n"
        f"from cairn.pipeline.errors import ConfigError\nfor module in {[*extras]}:\n"
        "    try:\n        importlib.import_module(module)\n"
        "    except ConfigError as error:\n        print(error)"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True, text=True
    ).stdout
    for sentence, (package, extra) in zip(said.splitlines(), extras.values(), strict=True):
        assert f"must have the package {package}, got none; " in sentence
        assert f"install it with `pip install '.[{extra}]'`" in sentence


@pytest.fixture(params=["local", "remote"])
def retriever(request, stones_root, stones_address):
    place = {"root": str(stones_root)} if request.param == "local" else {"url": stones_address}
    return haystack.CairnRetriever("stones", **place, top_k=3)


def test_component_answers_with_scored_documents_in_a_pipeline_that_was_written_and_read_too(retriever):
    documents = retriever.run(QUERY)["documents"]
    assert len(documents) == 3
    assert all(isinstance(document, Document) and document.score is not None for document in documents)
    assert documents[0].meta["end_char"] - documents[0].meta["start_char"] == len(documents[0].content or "")
    filters = {"operator": "AND", "conditions": [{"field": "meta.year", "operator": ">=", "value": 2009}]}
    found = retriever.run(QUERY, filters=filters, top_k=12)["documents"]
    assert {document.meta["year"] for document in found} == {2009, 2010, 2011}
    pipeline = Pipeline()
    pipeline.add_component("retriever", retriever)
    template = "{% for document in documents %}{{ document.content }}|{% endfor %}"
    pipeline.add_component("prompt", PromptBuilder(template, required_variables="*"))
    pipeline.connect("retriever.documents", "prompt.documents")
    read = Pipeline.loads(pipeline.dumps(), allowed_modules=["cairn.pipeline.frameworks.haystack"])
    asked = {"retriever": {"query": QUERY}}
    assert read.run(asked) == pipeline.run(asked)


def test_key_is_written_by_its_variable_only():
    pipeline = Pipeline()
    key = Secret.from_env_var("MY_KEY", strict=False)
    pipeline.add_component(
        "retriever", haystack.CairnRetriever("stones", url="http://127.0.0.1:1", api_key=key)
    )
    written = pipeline.to_dict()
    parameters = written["components"]["retriever"]["init_parameters"]
    assert parameters["api_key"] == {"type": "env_var", "env_vars": ["MY_KEY"], "strict": False}
    allowed = ["cairn.pipeline.frameworks.haystack"]
    assert Pipeline.loads(pipeline.dumps(), allowed_modules=allowed).to_dict() == written


def test_filters_of_cairns_own_are_taken_as_they_are_and_those_that_are_none_refused():
    for own in ({"type": "eq", "key": "year", "value": 1}, {"kind": ["a", "b"]}, None, {}):
        assert cairn_filter(own) == (own or None)
    for wrong in ({"operator": "NOT", "conditions": []}, {"field": "a", "operator": "~"}, {"operator": "=="}):
        with pytest.raises(FilterError, match="must have"):
            cairn_filter(wrong)


def test_nodes_carry_span_source_and_score_awaited_and_in_a_query_engine(stones):
    retriever = llama_index.CairnRetriever(
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
    ids = [node.node_id for node in found]
    assert [node.node_id for node in asyncio.run(retriever.aretrieve(QUERY))] == ids
    answered = RetrieverQueryEngine(retriever, NoText(llm=MockLLM())).query(QUERY)
    assert [node.node_id for node in answered.source_nodes] == ids
