"""Stores of Haystack and LlamaIndex: their published tests, filters, pipelines, and a writable server."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cairn.haystack import CairnDocumentStore
from cairn.langchain import CairnVectorStore as LangChainStore
from cairn.llama_index import CairnVectorStore, LeaveUnembedded
from cairn.pipeline.collection import open_collection
from cairn.pipeline.errors import ConfigError, FilterError
from cairn.pipeline.frameworks.source import find_passages
from haystack import Document, Pipeline
from haystack.components.writers import DocumentWriter
from haystack.document_stores.errors import DuplicateDocumentError
from haystack.document_stores.types import DuplicatePolicy
from haystack.testing import document_store as published
from langchain_core.indexing import InMemoryRecordManager, aindex, index
from llama_index.core import Document as LlamaDocument
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores.types import (
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryMode,
)


def without_embedding(document):
    return document.id, document.content, document.meta


class TestDocumentStore(
    published.CountDocumentsTest,
    published.WriteDocumentsTest,
    published.DeleteDocumentsTest,
    published.DeleteAllTest,
    published.DeleteByFilterTest,
):
    """Haystack's own tests; embeddings that documents bring are not kept."""

    @pytest.fixture
    def document_store(self, place):
        return CairnDocumentStore("notes", **place)

    @staticmethod
    def assert_documents_are_equal(received, expected):
        assert sorted(map(without_embedding, received)) == sorted(map(without_embedding, expected))

    def test_write_documents(self, document_store):
        document = Document(content="a note", meta={"deep": {"x": [1]}, "title": "Note", "tags": ["a", "b"]})
        assert document_store.write_documents([document]) == 1
        assert document_store.filter_documents() == [document]
        with pytest.raises(DuplicateDocumentError):
            document_store.write_documents([document])


class TestFilters(published.FilterDocumentsTest):
    """Haystack's own tests of filters, all over one store, which has what each of them writes."""

    assert_documents_are_equal = staticmethod(TestDocumentStore.assert_documents_are_equal)

    @pytest.fixture(scope="class")
    @classmethod
    def filterable_docs(cls):
        return published.create_filterable_docs()

    @pytest.fixture(scope="class")
    @classmethod
    def filled(cls, tmp_path_factory, tiny_model_folder, filterable_docs):
        settings = {"encoder": {"model": str(tiny_model_folder), "landmark_interval": 16}}
        store = CairnDocumentStore("notes", root=str(tmp_path_factory.mktemp("root")), settings=settings)
        assert store.write_documents(filterable_docs) == len(filterable_docs)
        return store

    @pytest.fixture
    def document_store(self, request, filled, monkeypatch):
        if "filterable_docs" in request.node.fixturenames:
            monkeypatch.setattr(filled, "write_documents", len)
        return filled

    def test_no_filters(self, document_store, filterable_docs):
        for filters in (None, {}):
            self.assert_documents_are_equal(document_store.filter_documents(filters), filterable_docs)


def test_writer_of_a_saved_pipeline_writes(place):
    pipeline = Pipeline()
    store = CairnDocumentStore("notes", **place)
    pipeline.add_component("writer", DocumentWriter(store, policy=DuplicatePolicy.OVERWRITE))
    again = Pipeline.loads(pipeline.dumps(), allowed_modules=["cairn.pipeline.frameworks.haystack"])
    assert again.run({"writer": {"documents": [Document(content="a note")]}})["writer"] == {
        "documents_written": 1
    }
    assert store.count_documents() == 1
    with pytest.raises(ValueError, match="document 0 with none"):
        store.write_documents([Document(content=" ")])


@pytest.fixture(params=["local", "remote"])
def make(request, place):
    """Return what makes a store of a kind: over a collection here, or of a writable server."""
    if request.param == "local":
        return lambda kind, **options: kind("notes", **place, **options)
    client = request.getfixturevalue("server")
    # A server takes models by their packaged names: the settings of a collection that was ingested.
    seed = LangChainStore("seed", **place)
    seed.add_texts(["a seed"], ids=["seed"])
    shutil.copytree(Path(place["root"]) / "seed", Path(place["root"]) / "notes")
    client.collection("notes").delete("seed")
    return lambda kind, **options: kind(client.collection("notes"), **options)


def node(node_id, text, source="s", **metadata):
    related = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=source)}
    return TextNode(id_=node_id, text=text, metadata=metadata, relationships=related)


def where(*conditions, condition="and"):
    given = [{"key": key, "operator": operator, "value": value} for key, operator, value in conditions]
    return MetadataFilters.model_validate({"filters": given, "condition": condition})


def test_nodes_are_found_as_they_were_and_deleted(make):
    store = make(CairnVectorStore)
    assert store.query(VectorStoreQuery(query_str="granite")).ids == []
    nodes = [node("1", "granite granite", "a", year=1, tags=["x"], deep={"k": [1]}), node("2", "slate", "b")]
    assert store.add([*nodes, TextNode(id_="alone", text="shale")]) == ["1", "2", "alone"]
    found = store.query(VectorStoreQuery(query_str="granite", similarity_top_k=3))
    assert found.nodes[0] == nodes[0]
    assert found.similarities == sorted(found.similarities, reverse=True)
    assert store.get_nodes(["2", "none"]) == [nodes[1]]
    assert {each.node_id for each in store.get_nodes()} == {"1", "2", "alone"}
    assert store.get_nodes(filters=where(("year", "==", 1))) == [nodes[0]]
    only = VectorStoreQuery(query_str="slate", similarity_top_k=2, filters=where(("year", "==", 1)))
    assert store.query(only).ids == ["1"]
    store.delete("none")
    store.delete("a")
    found = store.query(VectorStoreQuery(query_str="granite", similarity_top_k=3))
    assert {*found.ids} == {"2", "alone"}
    store.delete_nodes(["2"])
    assert store.get_nodes(["1", "2"]) == []


def test_vectors_find_the_same_here_and_over_http_and_marginal_relevance_leaves_copies_out(make, place):
    def apart(found):
        return len({each.page_content for each in found})

    store, here = make(LangChainStore, filter_columns={"kind": "string"}), LangChainStore("notes", **place)
    others = ["granite and slate", "sea and salt", "a river", "old mill", "marble"]
    kinds = ["a"] * 6 + ["b"] * len(others)
    store.add_texts(["granite granite"] * 6 + others, [{"kind": kind} for kind in kinds])
    vector = here.collection._searcher()._served.encoder.encode_queries(["granite"])[0].tolist()
    by_vector = store.similarity_search_by_vector(vector, k=5)
    assert by_vector == here.similarity_search_by_vector(vector, k=5)
    assert store.max_marginal_relevance_search_by_vector(vector, k=3, lambda_mult=1.0) == by_vector[:3]
    diverse = store.max_marginal_relevance_search_by_vector(vector, k=3, lambda_mult=0.0)
    assert (diverse[0], apart(diverse)) == (by_vector[0], 3)
    of_kind = store.max_marginal_relevance_search("granite", k=9, filter={"kind": "b"})
    assert {each.page_content for each in of_kind} == {*others}
    two = here.max_marginal_relevance_search("granite", k=2, fetch_k=2, lambda_mult=0.0)
    assert two == here.similarity_search("granite", k=2)
    for weight in (0.3, 0.5, 0.7):
        options = {"k": 4, "lambda_mult": weight}
        retriever = store.as_retriever(search_type="mmr", search_kwargs=options)
        assert apart(store.max_marginal_relevance_search("granite", **options)) == 4
        assert apart(retriever.invoke("granite")) == 4


def test_search_of_a_collection_that_is_not_there_is_warned_of_once_and_a_server_makes_it(
    server, place, caplog
):
    for store in (LangChainStore(server.collection("made")), LangChainStore("misspelt", **place)):
        for _ in range(2):
            assert store.similarity_search("granite") == []
    said = [each for each in caplog.messages if "no collection" in each]
    assert [name in each for name, each in zip(("made", "misspelt"), said, strict=True)] == [True, True]
    store = CairnVectorStore(server.collection("made"))
    assert store.query(VectorStoreQuery(query_str="granite")).ids == []
    store.delete_nodes(["1"])
    store.add([node("1", "granite granite")])
    assert store.query(VectorStoreQuery(query_str="granite")).ids == ["1"]


def test_filters_are_those_of_llama_index_and_a_question_that_cannot_be_asked_is_refused(place):
    store = CairnVectorStore("notes", **place)
    with pytest.raises(ConfigError, match="got svm"):
        store.query(VectorStoreQuery(query_str="x", mode=VectorStoreQueryMode.SVM))
    with pytest.raises(ConfigError, match="got none"):
        store.query(VectorStoreQuery())
    store.add(
        [
            node("1", "one", year=1, kind="a", tags=["x"]),
            node("2", "two", year=2, kind="b", tags=["x", "y"]),
            node("3", "three", year=3),
            node("4", "four"),
        ]
    )
    for ids, filters in (
        ("23", where(("year", ">=", 2))),
        ("134", where(("year", "!=", 2))),
        ("123", where(("year", "in", [1, 3]), ("kind", "==", "b"), condition="or")),
        ("234", where(("year", "nin", [1]))),
        ("34", where(("year", "==", 1), ("kind", "==", "b"), condition="not")),
        ("12", where(("tags", "contains", "x"))),
        ("2", where(("tags", "all", ["x", "y"]))),
        ("2", where(("tags", "any", ["y", "z"]))),
        ("34", where(("kind", "is_empty", None))),
        ("2", MetadataFilters(filters=[where(("year", "<", 3)), where(("kind", "text_match", "b"))])),
    ):
        assert {each.node_id for each in store.get_nodes(filters=filters)} == {*ids}, filters
    with pytest.raises(FilterError, match="got text_match_insensitive"):
        store.get_nodes(filters=where(("a", "text_match_insensitive", "b")))
    with pytest.raises(FilterError, match="must not negate contains"):
        store.get_nodes(filters=where(("a", "contains", "b"), condition="not"))


def test_ingestion_pipeline_replaces_a_document_and_an_index_answers(make):
    store = make(CairnVectorStore)
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(chunk_size=64, chunk_overlap=0), LeaveUnembedded()],
        vector_store=store,
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS,
    )
    for text in ("granite and slate", "obsidian"):
        pipeline.run(documents=[LlamaDocument(id_="a", text=text, metadata={"year": 1})])
    over = VectorStoreIndex.from_vector_store(store, embed_model=MockEmbedding(1))
    found = over.as_retriever(similarity_top_k=5, filters=where(("year", "==", 1))).retrieve("stone")
    assert [each.node.get_content() for each in found] == ["obsidian"]
    over.insert(LlamaDocument(id_="b", text="jade"))
    assert len(over.as_retriever(similarity_top_k=5).retrieve("stone")) == 2
    store.clear()
    assert over.as_retriever(similarity_top_k=5).retrieve("stone") == []


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_langchain_indexes_into_the_store(make):
    from langchain_core.documents import Document as LangChainDocument

    store, records = make(LangChainStore), InMemoryRecordManager(namespace="notes")
    records.create_schema()
    documents = [
        LangChainDocument(page_content=text, metadata={"source": text[0]}) for text in ("granite", "slate")
    ]

    def counts(done):
        return tuple(done[name] for name in ("num_added", "num_skipped", "num_deleted"))

    first = index(documents, records, store, cleanup="full", source_id_key="source", key_encoder="sha256")
    assert counts(first) == (2, 0, 0)
    again = await aindex(
        documents[:1], records, store, cleanup="full", source_id_key="source", key_encoder="sha256"
    )
    assert counts(again) == (0, 1, 1)
    assert [each.page_content for each in store.similarity_search("stone", k=3)] == ["granite"]


def test_retrievers_give_what_every_store_kept(make, place):
    meta = {"kind": "a", "deep": {"k": 1}}
    store = make(LangChainStore)
    store.add_texts(["granite"], [meta], ids=["a"])
    make(CairnVectorStore).add([node("b", "granite", kind="a")])
    own = {"kind": "a", "langchain_metadata": "by hand"}
    store.collection.add([{"id": "c", "text": "granite", **own}])
    assert store.get_by_ids(["c"])[0].metadata["langchain_metadata"] == "by hand"
    found = find_passages(open_collection("notes", root=place["root"]), "granite", 3, {})
    assert {each.metadata["kind"] for each in found} == {"a"}
    assert [each.metadata.get("deep") for each in found if each.doc_id == "a"] == [{"k": 1}]
    kept = {name for each in found for name in each.metadata if name.startswith(("langchain", "llama"))}
    assert kept == {"langchain_metadata"}
    assert [each.metadata.get("langchain_metadata") for each in found if each.doc_id != "c"] == [None] * 2


def test_langchain_takes_an_id_that_is_a_text_as_one(make):
    store = make(LangChainStore)
    assert store.add_texts((text for text in ("one", "two", "three")), ids=["1", "2", "12"]) == [
        "1",
        "2",
        "12",
    ]
    store.delete("12")
    assert [each.id for each in store.get_by_ids(["1", "2", "12"])] == ["1", "2"]
    assert [each.id for each in store.get_by_ids("1")] == ["1"]
    with pytest.raises(ValueError, match="number of metadatas must match"):
        store.add_texts(["four"], [{}, {}])
