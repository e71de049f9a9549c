"""LangChain's standard suites over both sources, and what they do not ask."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from cairn import open_collection
from cairn.langchain import CairnEmbeddings, CairnRetriever, CairnVectorStore
from cairn.pipeline.encode.text_encoder import load_encoder
from cairn.pipeline.errors import ConfigError, FilterError, UsageError
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_tests.integration_tests import (
    EmbeddingsIntegrationTests,
    RetrieversIntegrationTests,
    VectorStoreIntegrationTests,
)

from tests.frameworks.conftest import QUERY

MakeStore = Callable[..., CairnVectorStore]


@pytest.mark.anyio
class TestCairnEmbeddings(EmbeddingsIntegrationTests):
    @pytest.fixture(autouse=True, params=["local", "remote"])
    def give(self, request, tiny_model_folder, stones_client):
        is_local = request.param == "local"
        self.encoder = (
            load_encoder(str(tiny_model_folder), landmark_interval=16)
            if is_local
            else stones_client.collection("stones")
        )

    @property
    def embeddings_class(self):
        return CairnEmbeddings

    @property
    def embedding_model_params(self):
        return {"encoder": self.encoder}


@pytest.mark.anyio
class TestCairnRetriever(RetrieversIntegrationTests):
    @pytest.fixture(autouse=True)
    def give(self, stones):
        self.stones = stones

    @property
    def retriever_constructor(self):
        return CairnRetriever

    @property
    def retriever_constructor_params(self):
        return {"collection": self.stones}

    @property
    def retriever_query_example(self):
        return QUERY


def test_documents_say_where_they_stand(stones):
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
    with pytest.raises(ConfigError, match="got top_k"):
        retriever.invoke(QUERY, top_k=3)
    chain = retriever | (lambda documents: documents[0].page_content)
    assert chain.invoke(QUERY) == first.page_content


@pytest.fixture
def make_store(place):
    return partial(CairnVectorStore, "notes", **place)


@pytest.mark.anyio
class TestCairnVectorStore(VectorStoreIntegrationTests):
    @property
    def has_async(self):
        """Asynchronously LangChain calls the same methods on a thread, as ``aindex`` does in another test."""
        return False

    @pytest.fixture
    def vectorstore(self, make_store):  # type: ignore[override]
        return make_store()


def test_metadata_named_in_filter_columns_can_be_filtered_by(make_store):
    store = make_store(filter_columns={"year": "integer", "kind": "string"})
    metadatas = [
        {"year": 2019, "kind": "a", "deep": {"x": [1]}},
        {"year": 2021, "kind": "b"},
        {"title": "No year"},
    ]
    store.add_texts(["first note", "second note", "third note"], metadatas, ids=["1", "2", "3"])
    found = store.similarity_search_with_score(
        "note", k=3, filter={"type": "gte", "key": "year", "value": 2000}
    )
    assert {document.id for document, _ in found} == {"1", "2"}
    assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)
    with pytest.warns(UserWarning, match="too few documents to tell how probable"):
        scored = store.similarity_search_with_relevance_scores("note", k=3)
    assert all(0.0 <= score <= 1.0 for _, score in scored)
    assert store.get_by_ids(["3", "1", "9"]) == [
        Document(id="3", page_content="third note", metadata={"title": "No year"}),
        Document(id="1", page_content="first note", metadata=metadatas[0]),
    ]
    assert {found.id for found in store.similarity_search("note", filter={"kind": ["a", "c"]})} == {"1"}
    with pytest.raises(FilterError):
        store.similarity_search("note", filter={"type": "eq", "key": "deep", "value": 1})
    retriever = store.as_retriever(
        search_type="similarity_score_threshold", search_kwargs={"k": 3, "score_threshold": 0.0}
    )
    with pytest.warns(UserWarning, match="no threshold was applied"):
        assert len(retriever.invoke("note")) == 3


def test_highlights_are_words_of_the_whole_document(tmp_path, tiny_model_folder):
    settings = {"encoder": {"model": str(tiny_model_folder), "landmark_interval": 8, "token_bytes": 32}}
    store = CairnVectorStore("notes", root=tmp_path / "root", settings=settings)
    text = "the mat marks the way. " * 12 + "the old cat sat on the mat."
    store.add_texts([text, "the river follows the path."], [{"title": "mountain"}, {}], ids=["1", "2"])
    (found,) = store.similarity_search("the old cat on the mountain", k=1, highlights=True)
    places = [(each["start_char"], each["end_char"]) for each in found.metadata["highlights"]]
    assert places == sorted(places)
    assert {found.page_content[start:end] for start, end in places} <= {*text.replace(".", "").split()}
    assert places
    assert [(each["start_char"], each["end_char"]) for each in found.metadata["title_highlights"]] == [(0, 8)]
    assert "highlights" not in store.similarity_search("old cat", k=1)[0].metadata


def test_another_store_opens_what_one_wrote_with_its_own_metadata_alone_and_fills_it_again(make_store, place):
    make_store().add_texts(["first note"], ids=["1"])
    other = make_store()
    assert other.similarity_search("note", k=1)[0].id == "1"
    assert other.add_texts(["of one id", "the last counts"], ids=["2", "2"]) == ["2", "2"]
    assert [document.page_content for document in other.get_by_ids(["2"])] == ["the last counts"]
    with pytest.raises(UsageError, match=r"got 1 that cannot \(nul_character: 1\)"):
        other.add_texts(["a\x00b", "a note"], ids=["3", "4"])
    assert [document.id for document in other.get_by_ids(["3", "4"])] == ["4"]
    open_collection("notes", root=place["root"]).add([{"id": "5", "text": "another", "year": 2020}])
    (found,) = make_store().get_by_ids(["5"])
    assert found.metadata == {"year": 2020}
    store = make_store()
    assert store.delete([*"1245"])
    assert store.similarity_search("note", k=3) == []
    assert store.add_documents([]) == []
    store.add_texts(["a third"], ids=["3"])
    assert [document.id for document in store.similarity_search("third", k=3)] == ["3"]


def test_from_texts_takes_no_foreign_embeddings_and_the_name_that_other_stores_have(place):
    with pytest.raises(ConfigError, match="embeds with its own encoder, got DeterministicFakeEmbedding"):
        CairnVectorStore.from_texts(["a"], DeterministicFakeEmbedding(size=3), collection="notes", **place)
    document = Document(page_content="a note", metadata={"x": 1})
    for named in ({"collection": "notes"}, {"collection_name": "other"}):
        stored = CairnVectorStore.from_documents([document], None, **named, **place)  # type: ignore[arg-type]
        assert [stored.collection.layout.name] == [*named.values()]
        assert stored.similarity_search("note", k=1)[0].metadata == {"x": 1}


def test_what_cannot_be_stored_is_refused_before_anything_is(make_store):
    store = make_store(filter_columns={"year": "integer"})
    refused: list[tuple[list[Document], dict[str, Any]]] = [
        ([Document(page_content="  ")], {}),
        ([Document(page_content="a", metadata={"x": float("nan")})], {}),
        ([Document(page_content="a", metadata={"year": "old"})], {}),
        ([Document(page_content="a")], {"ids": ["1", "2"]}),
    ]
    for documents, options in refused:
        with pytest.raises(UsageError):
            store.add_documents(documents, **options)
    with pytest.raises(ConfigError, match="knows no namespace"):
        store.add_documents([Document(page_content="a")], namespace="x")
    with pytest.raises(UsageError, match="remove the collection's folder"):
        store.delete()
    with pytest.raises(ConfigError, match="must be one of string, integer"):
        make_store(filter_columns={"year": "date"})
    assert not store.collection.layout.folder.exists()
