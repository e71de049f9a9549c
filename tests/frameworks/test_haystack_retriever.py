"""The component in Haystack's own pipelines, written to YAML and read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from cairn.haystack import CairnRetriever
from cairn.pipeline.errors import FilterError
from cairn.pipeline.frameworks.haystack import cairn_filter
from haystack import Document, Pipeline
from haystack.components.builders import PromptBuilder
from haystack.utils import Secret

QUERY = "granite and slate"


@pytest.fixture(params=["local", "remote"])
def retriever(request: pytest.FixtureRequest, stones_root: Path, stones_address: str) -> CairnRetriever:
    place = {"root": str(stones_root)} if request.param == "local" else {"url": stones_address}
    return CairnRetriever("stones", **place, top_k=3)


def test_component_answers_with_scored_documents(retriever: CairnRetriever) -> None:
    documents = retriever.run(QUERY)["documents"]
    assert len(documents) == 3
    assert all(isinstance(document, Document) and document.score is not None for document in documents)
    assert documents[0].meta["end_char"] - documents[0].meta["start_char"] == len(documents[0].content or "")
    filters = {"operator": "AND", "conditions": [{"field": "meta.year", "operator": ">=", "value": 2009}]}
    assert {
        document.meta["year"] for document in retriever.run(QUERY, filters=filters, top_k=12)["documents"]
    } == {2009, 2010, 2011}


def test_pipeline_runs_as_before_once_written_and_read_again(retriever: CairnRetriever) -> None:
    pipeline = Pipeline()
    pipeline.add_component("retriever", retriever)
    pipeline.add_component(
        "prompt",
        PromptBuilder(
            "{% for document in documents %}{{ document.content }}|{% endfor %}", required_variables="*"
        ),
    )
    pipeline.connect("retriever.documents", "prompt.documents")
    written = pipeline.dumps()
    read = Pipeline.loads(written, allowed_modules=["cairn.pipeline.frameworks.haystack"])
    asked = {"retriever": {"query": QUERY}}
    assert read.run(asked) == pipeline.run(asked)


def test_key_is_written_by_its_variable_only() -> None:
    pipeline = Pipeline()
    key = Secret.from_env_var("MY_KEY", strict=False)
    pipeline.add_component("retriever", CairnRetriever("stones", url="http://127.0.0.1:1", api_key=key))
    written = pipeline.to_dict()
    parameters = written["components"]["retriever"]["init_parameters"]
    assert parameters["api_key"] == {"type": "env_var", "env_vars": ["MY_KEY"], "strict": False}
    allowed = ["cairn.pipeline.frameworks.haystack"]
    assert Pipeline.loads(pipeline.dumps(), allowed_modules=allowed).to_dict() == written
    pipeline = Pipeline()
    pipeline.add_component("retriever", CairnRetriever("stones", api_key=Secret.from_token("secret")))
    with pytest.raises(ValueError, match=r"[Tt]oken"):
        pipeline.dumps()


@pytest.mark.parametrize(
    ("haystack", "cairn"),
    [
        (None, None),
        ({}, None),
        ({"type": "eq", "key": "year", "value": 1}, {"type": "eq", "key": "year", "value": 1}),
        ({"kind": ["a", "b"]}, {"kind": ["a", "b"]}),
    ],
)
def test_filters_of_cairns_own_are_taken_as_they_are(
    haystack: dict[str, Any] | None, cairn: dict[str, Any] | None
) -> None:
    assert cairn_filter(haystack) == cairn


@pytest.mark.parametrize(
    "wrong", [{"operator": "NOT", "conditions": []}, {"field": "a", "operator": "~"}, {"operator": "=="}]
)
def test_filters_that_are_no_filters_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(FilterError, match="must have"):
        cairn_filter(wrong)
