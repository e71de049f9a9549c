"""LangChain's standard suite of retrievers, over both sources, and what it does not ask."""

from __future__ import annotations

from typing import Any

import pytest
from cairn.langchain import CairnRetriever
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.frameworks.source import Searchable
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_tests.integration_tests import RetrieversIntegrationTests

QUERY = "granite and slate"


@pytest.mark.anyio
class TestCairnRetriever(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def give(self, stones: Searchable) -> None:
        self.stones = stones

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        return CairnRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"collection": self.stones}

    @property
    def retriever_query_example(self) -> str:
        return QUERY


def test_documents_say_where_they_stand(stones: Searchable) -> None:
    retriever = CairnRetriever(collection=stones, k=2, filters={"type": "gte", "key": "year", "value": 2005})
    documents = retriever.invoke(QUERY)
    assert all(isinstance(document, Document) and document.metadata["year"] >= 2005 for document in documents)
    first = documents[0]
    assert (
        first.id == f"{first.metadata['doc_id']}#{first.metadata['start_char']}-{first.metadata['end_char']}"
    )
    assert {document.metadata["year"] for document in retriever.invoke(QUERY, filters=None)} != {2005}
    two = retriever.invoke(QUERY, k=9, filters={"year": [2001, 2004, 1900]})
    assert {document.metadata["year"] for document in two} == {2001, 2004}
    assert len(retriever.invoke(QUERY, k=9, parameters={"passages": 1})) == 7


def test_retriever_takes_part_in_a_chain(stones: Searchable) -> None:
    chain = CairnRetriever(collection=stones, k=1) | (lambda documents: documents[0].page_content)
    assert "stone" in chain.invoke("stone 3") or chain.invoke("stone 3")


def test_keyword_it_does_not_know_is_refused(stones: Searchable) -> None:
    with pytest.raises(ConfigError, match="got top_k"):
        CairnRetriever(collection=stones).invoke(QUERY, top_k=3)
