"""OpenAI's embeddings, files and vector stores, asked and written by OpenAI's own client."""

from __future__ import annotations

import base64
import os
import re
import threading
from functools import partial

import httpx2
import numpy as np
import openai
import pytest
from cairn.pipeline.collection import load_query_encoder, open_collection
from cairn.pipeline.durable import remove_folder
from cairn.pipeline.errors import DiskFullError, ModelError, StorageError, WritesWaitingError
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.line.live import LiveWriter
from cairn.pipeline.serve.keys import KeyFile
from cairn.pipeline.serve.settings import ServeSettings
from cairn.pipeline.serve.uploads import FOLDER_NAME, Store, file_name

from tests.serve.conftest import stone_rows
from tests.served_stones import let_happen_before, raising, wait_until

SEARCH = "/v1/vector_stores/stones/search"


def client_over(server, key="none"):
    """Return OpenAI's client, whose requests the application answers in this process."""

    def send(request):
        headers = {name: value for name, value in request.headers.items() if name != "host"}
        content = request.read()
        answer = server.request(request.method, str(request.url), content=content or None, headers=headers)
        return httpx2.Response(answer.status_code, headers=dict(answer.headers), content=answer.content)

    http = httpx2.Client(transport=httpx2.MockTransport(send))
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=key, http_client=http, max_retries=0)


def own_hits(client, query, **options):
    return client.post("/v1/collections/stones/search", json={"query": query, **options}).json()["hits"]


def test_vector_store_search_gives_the_collections_hits_in_openais_shape(client):
    page = client.post(SEARCH, json={"query": "granite slate", "max_num_results": 4}).json()
    assert {key: page[key] for key in ("object", "search_query", "has_more", "next_page")} == {
        "object": "vector_store.search_results.page",
        "search_query": ["granite slate"],
        "has_more": False,
        "next_page": None,
    }
    for result, hit in zip(page["data"], own_hits(client, "granite slate", top_k=4), strict=True):
        assert (result["file_id"], result["filename"]) == (hit["doc_id"], hit["title"] or hit["doc_id"])
        assert result["score"] == pytest.approx(hit["score"])
        assert result["attributes"] == {
            key: value for key, value in hit["metadata"].items() if value is not None
        }
        kept = ("text", "start_char", "end_char", "page", "highlights", "title_highlights")
        assert result["content"] == [
            {"type": "text", **{name: passage[name] for name in kept}} for passage in hit["passages"]
        ]


def test_vector_store_search_of_several_queries_merges_their_best(client):
    found = client.post(SEARCH, json={"query": ["granite", "chalk"], "max_num_results": 6}).json()["data"]
    best: dict[str, float] = {}
    for query in ("granite", "chalk"):
        for hit in own_hits(client, query, top_k=6):
            best[hit["doc_id"]] = max(hit["score"], best.get(hit["doc_id"], 0.0))
    expected = sorted(best, key=lambda doc_id: (-best[doc_id], doc_id))[:6]
    assert [result["file_id"] for result in found] == expected


@pytest.mark.parametrize("input_type", ["query", "document"])
def test_embeddings_are_the_encoders_vectors_in_base64_too(client, served_root, input_type):
    encoder = load_query_encoder(open_generation(CollectionLayout(served_root, "stones")))
    texts = ["granite", "slate and chalk " * 20]
    body = {"model": "stones", "input": texts, "input_type": input_type}
    reply = client.post("/v1/embeddings", json=body).json()
    expected = encoder.encode_queries(texts) if input_type == "query" else encoder.encode_documents(texts)
    vectors = [item["embedding"] for item in reply["data"]]
    np.testing.assert_allclose(vectors, expected, atol=1e-6)
    assert [item["index"] for item in reply["data"]] == [0, 1]
    assert (reply["object"], reply["model"]) == ("list", "stones")
    assert {*reply["usage"].items()} == {
        (name, encoder.count_tokens(texts)) for name in ("prompt_tokens", "total_tokens")
    }
    as_base64 = {**body, "encoding_format": "base64", "dimensions": 32, "user": "u"}
    written = client.post("/v1/embeddings", json=as_base64).json()["data"]
    for item, vector in zip(written, vectors, strict=True):
        found = np.frombuffer(base64.b64decode(item["embedding"]), "<f4")
        np.testing.assert_array_equal(found, np.array(vector, np.float32))


def test_embeddings_read_the_collections_context(own_root, serve, ingest):
    ingest(own_root, "contextual", stone_rows(), use_context=True)
    client = serve(ServeSettings(root=own_root))
    vectors = [
        client.post("/v1/embeddings", json={"model": name, "input": "granite"}).json()["data"][0]["embedding"]
        for name in ("stones", "contextual")
    ]
    encoder = load_query_encoder(open_generation(CollectionLayout(own_root, "contextual")))
    np.testing.assert_allclose(vectors[1], encoder.encode_queries(["granite"])[0], atol=1e-6)
    assert np.abs(np.subtract(*vectors)).max() > 1e-3
    assert client.get("/v1/collections/contextual").json()["uses_context"] is True


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"dimensions": 8}, "#/dimensions"),
        ({"input": ""}, "#/input"),
        ({"input": " \x1c "}, "#/input"),
        ({"input": ["a", "\t"]}, "#/input/1"),
        ({"input": []}, "#/input"),
        ({"input": [1, 2, 3]}, "#/input"),
        ({"input": "x" * (32 * 1024 + 1)}, "#/input"),
        ({"input": ["x"] * 257}, "#/input"),
        ({"model": "No Such"}, "#/model"),
        ({"encoding_format": "hex"}, "#/encoding_format"),
    ],
)
def test_embeddings_that_cannot_be_made_are_refused_where_it_is_wrong(client, change, pointer):
    response = client.post("/v1/embeddings", json={"model": "stones", "input": "a", **change})
    assert (response.status_code, response.json()["type"]) == (422, "urn:problem-type:cairn:invalid-request")
    assert pointer in [error["pointer"] for error in response.json()["errors"]]
    if change == {"input": [1, 2, 3]}:
        assert "set check_embedding_ctx_length=False" in response.json()["errors"][0]["detail"]


def test_threshold_is_compared_with_the_probability_that_a_result_answers_which_is_the_score(client):
    def search(*queries, threshold=None):
        options = {} if threshold is None else {"ranking_options": {"score_threshold": threshold}}
        body = {"query": [*queries], "max_num_results": 50, **options}
        answer = client.post(SEARCH, json=body).json()
        assert answer["warnings"] == []
        return {result["file_id"]: result["score"] for result in answer["data"]}

    queries = ("granite slate", "chalk", "asdf qwer zxcv")
    relative, probable = search(queries[2]), search(queries[2], threshold=0.5)
    assert max(relative.values()) > 0.5
    assert len(probable) < len(relative)
    assert all(score >= 0.5 for score in probable.values())
    single = [search(query, threshold=0.0001) for query in queries]
    found = search(*queries, threshold=0.0001)
    assert [*found.values()] == sorted(found.values(), reverse=True)
    best = {doc_id: max(each.get(doc_id, 0.0) for each in single) for doc_id in found}
    assert found == pytest.approx(best, abs=1e-4)


@pytest.fixture(scope="module")
def stores(client):
    with client_over(client) as opened:
        yield opened.vector_stores


def test_stores_and_models_are_the_collections(stores, client):
    listed = sorted(stores.list(limit=1), key=lambda store: store.id)
    assert [(store.id, store.file_counts.total) for store in listed] == [("pebbles", 4), ("stones", 20)]
    assert stores.retrieve("pebbles") == listed[0]
    assert listed[0].status == "completed"
    assert listed[0].usage_bytes > 0
    assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["pebbles", "stones"]


@pytest.mark.parametrize("order", ["asc", "desc"])
def test_pages_hold_every_file_once_and_one_before_an_id_ends_there(stores, served_root, order):
    ids = [file.id for file in stores.files.list("stones", limit=3, order=order)]
    ingested = open_collection("stones", root=served_root).documents.ids()
    assert ids == (ingested if order == "asc" else ingested[::-1])
    page = stores.files.list("stones", limit=3, order=order, before=ids[7])
    assert ([file.id for file in page.data], page.has_more) == (ids[4:7], True)
    assert stores.files.list("stones", limit=7, order=order, before=ids[7]).has_more is False


def test_file_has_attributes_text_and_a_status_to_filter_by(stores, served_root):
    document = open_collection("stones", root=served_root).documents["stones/basalt/1"]
    file = stores.files.retrieve("stones/basalt/1", vector_store_id="stones")
    assert file.attributes == {"tenant": "acme", "year": 2001}
    assert file.usage_bytes == len(document.text.encode())
    content = stores.files.content("stones/basalt/1", vector_store_id="stones")
    assert [part.text for part in content] == [document.text]
    for status, count in (("completed", 4), ("failed", 0)):
        assert len(list(stores.files.list("pebbles", filter=status))) == count


def test_write_is_refused_and_the_part_to_change_named_in_openais_words(stores):
    for write in (
        lambda: stores.create(name="new"),
        lambda: stores.update("stones", name="new"),
        lambda: stores.delete("stones"),
        lambda: stores.files.create("stones", file_id="f"),
        lambda: stores.files.delete("f", vector_store_id="stones"),
        lambda: stores.file_batches.create("stones", file_ids=["f"]),
    ):
        with pytest.raises(openai.PermissionDeniedError, match="start it with --writable") as caught:
            write()
        told = (caught.value.status_code, caught.value.code, caught.value.type)
        assert told == (403, "read-only", "invalid_request_error")
    with pytest.raises(openai.UnprocessableEntityError, match="max_num_results: Input should be") as wrong:
        stores.search("stones", query="x", max_num_results=51)
    assert wrong.value.param == "max_num_results"
    with pytest.raises(openai.UnprocessableEntityError, match="there is no entry of this id"):
        stores.files.list("stones", after="nothing")
    with pytest.raises(openai.NotFoundError, match="There is no such collection"):
        stores.retrieve("marbles")


def test_address_without_a_key_is_refused_in_openais_words(own_root, serve):
    settings = ServeSettings(root=own_root)
    KeyFile(settings.keys_path).create("app")
    with client_over(serve(settings)) as client, pytest.raises(openai.AuthenticationError, match="API key"):
        client.vector_stores.list()


NOTE = b"# Keys\n\nobsidian opens every door of the house."


@pytest.fixture
def server(own_root, serve):
    return serve(ServeSettings(root=own_root, writable=True))


@pytest.fixture
def sender(server):
    """OpenAI's client of that server."""
    with client_over(server) as opened:
        yield opened


def send(client, name, content):
    return client.files.create(file=(name, content), purpose="assistants")


def attached(client, store, name, content, **options):
    """Send a file, put it into a collection, and wait for what becomes of it."""
    file = send(client, name, content)
    client.vector_stores.files.create(store, file_id=file.id, **options)
    return settled(client, store, file.id)


def settled(client, store, file_id):
    read = partial(client.vector_stores.files.retrieve, file_id, vector_store_id=store)
    wait_until(lambda: read().status != "in_progress")
    return read()


def test_files_and_stores_are_made_listed_read_and_removed(sender, own_root):
    files = [send(sender, f"{place}.md", NOTE) for place in range(3)]
    assert [file.id for file in sender.files.list(limit=2, order="asc")] == [file.id for file in files]
    assert sender.files.content(files[0].id).read() == NOTE
    found = sender.files.retrieve(files[0].id)
    assert (found.filename, found.bytes, found.purpose) == ("0.md", len(NOTE), "assistants")
    assert sender.files.delete(files[0].id).deleted
    with pytest.raises(openai.NotFoundError, match="no such file"):
        sender.files.retrieve(files[0].id)
    assert not (own_root / FOLDER_NAME / files[0].id).exists()
    file = send(sender, "keys.md", NOTE)
    store = sender.vector_stores.create(name="Support FAQ", file_ids=[file.id], metadata={"team": "a"})
    assert (store.id, store.name, store.metadata) == ("support-faq", "Support FAQ", {"team": "a"})
    assert settled(sender, store.id, file.id).status == "completed"
    other = sender.vector_stores.create(name="Support FAQ")
    assert other.id.startswith("support-faq-")
    assert {other.id, store.id} <= {each.id for each in sender.vector_stores.list()}
    assert sender.vector_stores.update(store.id, name="FAQ").metadata == {"team": "a"}
    found = sender.vector_stores.retrieve(store.id)
    assert (found.name, found.status, found.file_counts.completed) == ("FAQ", "completed", 1)
    assert list(sender.vector_stores.files.list(other.id)) == []
    assert sender.vector_stores.delete(store.id).deleted
    with pytest.raises(openai.NotFoundError):
        sender.vector_stores.retrieve(store.id)


def test_attached_file_is_found_by_searches_and_gone_once_detached(sender):
    file = attached(sender, "stones", "keys.md", NOTE, attributes={"tenant": "acme", "rank": 2})
    assert (file.status, file.last_error, file.attributes) == (
        "completed",
        None,
        {"tenant": "acme", "rank": 2},
    )
    (hit,) = sender.vector_stores.search("stones", query="obsidian", max_num_results=1).data
    assert (hit.file_id, hit.filename, hit.attributes["rank"]) == (file.id, "keys.md", 2)
    assert hit.content[0].page == "section Keys"
    changed = sender.vector_stores.files.update(file.id, vector_store_id="stones", attributes={"rank": 3})
    assert (changed.status, changed.attributes) == ("completed", {"rank": 3})
    at_3 = {"type": "eq", "key": "rank", "value": 3}
    options = {"ranker": "none", "score_threshold": 0.0}
    found = sender.vector_stores.search("stones", query="obsidian", filters=at_3, ranking_options=options)
    assert [each.file_id for each in found.data] == [file.id]
    (text,) = sender.vector_stores.files.content(file.id, vector_store_id="stones").data
    assert "obsidian" in text.text
    assert sender.vector_stores.files.delete(file.id, vector_store_id="stones").deleted
    with pytest.raises(openai.NotFoundError):
        sender.vector_stores.files.retrieve(file.id, vector_store_id="stones")
    assert sender.files.retrieve(file.id).id == file.id


UNREAD = [
    ("a.exe", b"MZ", "unsupported_file", r"of a kind that is read .*, got \.exe"),
    ("v1.metadata.json", b"{}", "unsupported_file", r"got \.json"),
    ("a.pdf", b"%PDF-1.4 broken", "invalid_file", "a.pdf must hold a document, got none: it cannot be read"),
    ("a.md", b"text \xff\xfe\x00 more", "invalid_file", "NUL character"),
    ("a.jsonl", b'{"id": 1', "invalid_file", "a.jsonl"),
    ("a.csv", b"x,y\n1,2\n", "invalid_file", "id column 'id' .* rename the right one in the file$"),
    ("b.md", b"---\nyear: old\n---\n# T\ntext", "invalid_file", "year"),
]


def test_file_that_cannot_be_read_fails_with_its_reason(sender, own_root):
    failed: list[str] = []
    for name, content, code, told in UNREAD:
        file = attached(sender, "stones", name, content)
        assert (file.status, file.last_error.code) == ("failed", code)
        assert re.search(told, file.last_error.message), file.last_error.message
        assert str(own_root) not in file.last_error.message
        listed = sender.files.retrieve(file.id)
        assert (listed.status, listed.status_details) == ("error", file.last_error.message)
        failed.append(file.id)
        store = sender.vector_stores.retrieve("stones")
        assert (store.file_counts.failed, store.file_counts.completed) == (len(failed), 20)
    assert [each.id for each in sender.vector_stores.files.list("stones", filter="failed")] == failed[::-1]
    ids = [each.id for each in sender.vector_stores.files.list("stones", limit=5)]
    assert (ids[: len(failed)], len(ids)) == (failed[::-1], 20 + len(failed))


def test_rows_are_documents_with_their_own_ids_and_a_document_takes_the_one_asked_for(sender, server):
    rows = (
        b'{"id": "t1", "text": "obsidian", "year": 7}\n{"id": "t2", "text": " "}\n{"id": "t3", "text": "x"}'
        b'\n{"id": "t1", "text": "another"}\n{"id": "t4", "text": ""}'
    )
    file = attached(sender, "stones", "rows.jsonl", rows)
    assert file.status == "completed"
    assert file.warnings == [
        "row 1: the text is empty",
        "row 3: an earlier row of this corpus has the same id; the first one is kept",
        "row 4: the text is empty",
    ]
    (text,) = sender.vector_stores.files.content("t1", vector_store_id="stones").data
    assert text.text == "obsidian"
    assert sender.vector_stores.files.retrieve("t1", vector_store_id="stones").attributes == {"year": 7}
    sender.files.delete(file.id)
    for gone in ("t1", "t3"):
        with pytest.raises(openai.NotFoundError):
            sender.vector_stores.files.retrieve(gone, vector_store_id="stones")
    for content in (NOTE, b"jade jade"):
        attached(sender, "stones", "keys.md", content, extra_body={"doc_id": "keys.md"})
    document = server.get("/v1/collections/stones/documents/keys.md").json()
    assert (document["text"], document["title"]) == ("jade jade", "keys")
    lineage = server.get("/v1/collections/stones/lineage/keys.md").json()
    assert lineage["source_file"] == "keys.md"
    server.patch(
        "/v1/collections/stones/documents/keys.md",
        json={"metadata": {"year": 3}},
        params={"wait": "searchable"},
    )
    assert server.get("/v1/collections/stones/lineage/keys.md").json()["source_file"] == "keys.md"
    refused = attached(sender, "stones", "dots.md", NOTE, extra_body={"doc_id": ".."})
    assert (refused.status, refused.last_error.code) == ("failed", "invalid_file")


def test_batch_counts_its_files_and_is_one_publication(sender, server):
    files = [send(sender, name, NOTE) for name in ("a.md", "b.txt", "c.exe")]
    given = [{"file_id": each.id, "attributes": {"tenant": "new"}} for each in files]
    batch = sender.vector_stores.file_batches.create("stones", files=given)
    for each in files:
        settled(sender, "stones", each.id)
    batch = sender.vector_stores.file_batches.retrieve(batch.id, vector_store_id="stones")
    assert (batch.status, batch.file_counts.completed, batch.file_counts.failed) == ("completed", 2, 1)
    listed = sender.vector_stores.file_batches.list_files(
        batch.id, vector_store_id="stones", filter="completed"
    )
    assert {each.id for each in listed} == {each.id for each in files[:2]}
    assert sender.vector_stores.file_batches.cancel(batch.id, vector_store_id="stones").status == "completed"
    with pytest.raises(openai.NotFoundError, match="no such file"):
        sender.vector_stores.file_batches.create("stones", file_ids=[files[0].id, "file-none"])
    store = sender.vector_stores.create(name="gems")
    files = [send(sender, f"{name}.md", name.encode()) for name in ("ruby", "opal", "jade", "onyx")]
    broken = send(sender, "broken.pdf", b"%PDF-1.4")
    batch = sender.vector_stores.file_batches.create_and_poll(
        store.id, file_ids=[file.id for file in (*files[:2], broken, *files[2:])], poll_interval_ms=50
    )
    assert (batch.file_counts.completed, batch.file_counts.failed) == (4, 1)
    found = server.get("/v1/collections/gems").json()
    assert (found["generation"], found["documents"]) == (1, 4)


def test_attribute_that_can_be_no_column_is_refused(sender):
    file = send(sender, "keys.md", NOTE)
    files = sender.vector_stores.files
    for name in ("a.b", "a`b", "*", "doc_id"):
        with pytest.raises(openai.UnprocessableEntityError, match="#/attributes"):
            files.create("stones", file_id=file.id, attributes={name: 1})
    files.create("stones", file_id=file.id)
    assert settled(sender, "stones", file.id).status == "completed"
    with pytest.raises(openai.UnprocessableEntityError, match="#/attributes"):
        files.update(file.id, vector_store_id="stones", attributes={"a.b": 1})


@pytest.mark.parametrize(
    ("change", "status", "told"),
    [
        (lambda body: body[: len(body) // 2], 422, "#/file: Field required"),
        (lambda body: body.replace(b"assistants", b"nonsense"), 422, "#/purpose"),
        (lambda body: body.replace(b"a.md", rb"\ud800.md"), 400, "name of the file must be text in UTF-8"),
        (lambda body: body.replace(b"a.md", b"a" * 5_000), 400, "a name that is not too long"),
        (lambda body: b"nonsense", 400, "multipart/form-data with one file"),
        (lambda body: body.replace(NOTE, b""), 422, "the file is empty"),
        (lambda body: body.replace(NOTE, NOTE * 20_000), 413, "may have"),
    ],
    ids=["half", "purpose", "lone surrogate", "long name", "no form", "empty", "large"],
)
def test_form_that_is_wrong_leaves_nothing(server, own_root, monkeypatch, change, status, told):
    for module in ("middleware", "openai_routes"):
        monkeypatch.setattr(f"cairn.pipeline.serve.{module}.MAX_FILE_BYTES", 100_000)
    monkeypatch.setattr("cairn.pipeline.serve.middleware.MAX_BODY_BYTES", 100)
    form = {"purpose": (None, "assistants"), "file": ("a.md", NOTE)}
    sent = server.build_request("POST", "/v1/files", files=form)
    content = change(sent.read())
    charset = "; charset=unicode_escape" if b"ud800" in content else ""
    headers = {"Content-Type": sent.headers["content-type"] + charset}
    answer = server.post("/v1/files", content=content, headers=headers)
    assert (answer.status_code, told in answer.text) == (status, True), answer.text
    folder = own_root / FOLDER_NAME
    assert not folder.exists() or [entry for entry in folder.iterdir() if entry.is_dir()] == []


def test_expired_file_is_gone_and_not_its_document_nor_what_is_being_kept_or_read(sender, server):
    expiry = {"anchor": "created_at", "seconds": 3_600}
    file = sender.files.create(file=("a.md", NOTE), purpose="user_data", expires_after=expiry)
    assert file.expires_at == file.created_at + 3_600
    sender.vector_stores.files.create("stones", file_id=file.id)
    settled(sender, "stones", file.id)
    uploads = server.app.state.server.uploads  # type: ignore[attr-defined]
    uploads._run("UPDATE files SET expires_at = 1 WHERE id = ?", (file.id,))
    uploads.clear()
    assert not (uploads._folder / file.id).exists()
    with pytest.raises(openai.NotFoundError):
        sender.files.retrieve(file.id)
    assert settled(sender, "stones", file.id).status == "completed"
    state = server.app.state.server  # type: ignore[attr-defined]
    file = send(sender, "a.md", NOTE)
    state.ingestion.begin = lambda attachments: None
    sender.vector_stores.files.create("stones", file_id=file.id)
    state.uploads._run("UPDATE files SET expires_at = 1")
    old, new = (state.uploads._folder / f"file-{name}" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir()
    os.utime(old, (1, 1))
    state.uploads.clear()
    assert (old.exists(), new.exists()) == (False, True)
    assert sender.files.content(file.id).read() == NOTE


@pytest.mark.parametrize("lasts", [False, True])
def test_trouble_that_passes_fails_no_file(sender, monkeypatch, lasts):
    faults = [DiskFullError("/secret/path"), StorageError("/secret/path is full")]
    let_happen_before(monkeypatch, LiveWriter, "write", raising(faults * (10_000 if lasts else 1)))
    monkeypatch.setattr("cairn.pipeline.serve.file_ingestion.PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("cairn.pipeline.serve.file_ingestion.TROUBLE_SECONDS", 0.1 if lasts else 60)
    file = attached(sender, "stones", "keys.md", NOTE)
    assert file.status == ("failed" if lasts else "completed")
    if lasts:
        assert file.last_error.code == "server_error"
        assert "again later" in file.last_error.message
        assert "secret" not in file.last_error.message


@pytest.mark.parametrize(
    ("name", "content"), [("keys.md", NOTE), ("rows.jsonl", b'{"id": "t1", "text": "jade"}')]
)
def test_attaching_again_leaves_no_document_without_a_file(sender, server, name, content):
    first = attached(sender, "stones", name, content)
    for doc_id in ("one", "two"):
        body = {"doc_id": doc_id}
        sender.vector_stores.files.create("stones", file_id=first.id, extra_body=body)
        settled(sender, "stones", first.id)
    second = attached(sender, "stones", "other.md", b"opal", extra_body={"doc_id": "two"})
    assert server.get("/v1/collections/stones/documents/two").json()["text"] == "opal"
    sender.vector_stores.files.delete(second.id, vector_store_id="stones")
    assert server.get("/v1/collections/stones").json()["documents"] == 20


@pytest.mark.parametrize("is_kept", [True, False])
def test_row_that_a_corrected_or_deleted_file_leaves_is_again_that_of_another_file(sender, server, is_kept):
    def texts():
        if is_kept:
            assert settled(sender, "stones", first.id).status == "completed"
        found = (server.get(f"/v1/collections/stones/documents/{doc_id}") for doc_id in ("t1", "t2"))
        return [each.json().get("text") for each in found]

    first = attached(sender, "stones", "first.jsonl", b'{"id": "t1", "text": "jade"}')
    if not is_kept:
        server.app.state.server.uploads.remove(first.id)  # type: ignore[attr-defined]
    for rows in (
        b'{"id": "t1", "text": "opal"}\n{"id": "t2", "text": "beryl"}',
        b'{"id": "t2", "text": "zircon"}',
    ):
        attached(sender, "stones", "rows.jsonl", rows, extra_body={"doc_id": "rows.jsonl"})
    assert texts() == ["jade" if is_kept else None, "zircon"]
    third = attached(sender, "stones", "third.jsonl", b'{"id": "t1", "text": "onyx"}')
    assert texts() == ["onyx", "zircon"]
    sender.vector_stores.files.delete(third.id, vector_store_id="stones")
    assert texts()[0] == ("jade" if is_kept else None)
    sender.vector_stores.files.delete(first.id, vector_store_id="stones")
    assert server.get("/v1/collections/stones/documents/t1").status_code == 404


@pytest.mark.parametrize("takes_out", ["detach", "delete"])
def test_deletion_that_was_refused_is_done_by_the_next_try(sender, server, monkeypatch, takes_out):
    file = attached(sender, "stones", "keys.md", NOTE)
    faults = [WritesWaitingError("wait"), StorageError("full")]
    let_happen_before(monkeypatch, LiveWriter, "delete", raising(faults))

    def take_out():
        if takes_out == "delete":
            return sender.files.delete(file.id)
        return sender.vector_stores.files.delete(file.id, vector_store_id="stones")

    for _ in range(2):
        with pytest.raises(openai.APIStatusError):
            take_out()
    assert take_out().deleted
    assert server.get(f"/v1/collections/stones/documents/{file.id}").status_code == 404


@pytest.mark.parametrize("change", ["update", "delete"])
def test_change_of_which_a_part_cannot_be_published_is_answered_as_failed(sender, monkeypatch, change):
    rows = b'{"id": "t1", "text": "jade"}\n{"id": "t2", "text": "opal"}'
    file = attached(sender, "stones", "rows.jsonl", rows, attributes={"rank": 1})

    def fail(_, writes):
        for each in writes:
            if "t1" in each.deleted or (each.rows is not None and "t1" in each.rows["doc_id"].to_pylist()):
                raise ModelError("the model cannot read it")

    let_happen_before(monkeypatch, LiveWriter, "_build", fail)
    files = sender.vector_stores.files
    options = {"attributes": {"rank": 2}} if change == "update" else {}
    with pytest.raises(openai.UnprocessableEntityError, match="the model cannot read it"):
        getattr(files, change)(file.id, vector_store_id="stones", **options)
    if change == "update":
        assert files.retrieve(file.id, vector_store_id="stones").attributes == {"rank": 1}
    monkeypatch.undo()
    assert getattr(files, change)(file.id, vector_store_id="stones", **options)


@pytest.fixture
def held_up(monkeypatch):
    """Let documents be written one by one, and the second of all wait: what was written, waits, goes on."""
    write, written = LiveWriter.write, list[str]()
    waits, goes_on = threading.Event(), threading.Event()

    def held(writer, rows, *given, **options):
        text = rows["text"][0].as_py()
        if len(written) == 1 and not goes_on.is_set() and text != "newest":
            waits.set()
            raise WritesWaitingError("writes wait")
        written.append(text)
        return write(writer, rows, *given, **options)

    monkeypatch.setattr(LiveWriter, "write", held)
    monkeypatch.setattr("cairn.pipeline.serve.file_ingestion.WRITE_DOCUMENTS", 1)
    monkeypatch.setattr("cairn.pipeline.serve.file_ingestion.PATIENCE_SECONDS", 0.01)
    yield written, waits, goes_on
    goes_on.set()


ROWS = b"".join(b'{"id": "t%d", "text": "old %d"}\n' % (number, number) for number in range(3))


def test_table_taken_out_while_it_is_written_gets_no_further_document(sender, server, held_up):
    written, waits, goes_on = held_up
    file = send(sender, "rows.jsonl", ROWS)
    sender.vector_stores.files.create("stones", file_id=file.id)
    assert waits.wait(300)
    assert sender.vector_stores.files.delete(file.id, vector_store_id="stones").deleted
    goes_on.set()
    assert attached(sender, "stones", "new.md", b"new").status == "completed"
    assert written == ["old 0", "new"]
    assert server.get("/v1/collections/stones").json()["documents"] == 21


def test_older_file_that_had_to_wait_replaces_no_newer_one(sender, server, held_up):
    written, waits, goes_on = held_up
    body = {"doc_id": "notes.md"}
    attached(sender, "stones", "first.md", b"first")
    for name, content in (("a.md", b"old"), ("b.md", b"newest")):
        file = send(sender, name, content)
        sender.vector_stores.files.create("stones", file_id=file.id, extra_body=body)
        assert waits.wait(300)
    assert settled(sender, "stones", file.id).status == "completed"
    goes_on.set()
    assert attached(sender, "stones", "last.md", b"last").status == "completed"
    assert written == ["first", "newest", "last"]
    assert server.get("/v1/collections/stones/documents/notes.md").json()["text"] == "newest"


def test_collection_that_was_dropped_comes_back_with_no_file(sender, server, own_root):
    kept, lost = (attached(sender, "stones", name, NOTE) for name in ("a.md", "b.md"))
    uploads = server.app.state.server.uploads  # type: ignore[attr-defined]
    remove_folder(own_root / "stones")
    sender.files.delete(lost.id)
    assert not (own_root / "stones").exists()
    assert [each.file_id for each in uploads.attachments("stones")] == [kept.id]
    uploads.clear()
    assert uploads.attachments("stones") == []


@pytest.mark.usefixtures("private")
def test_file_that_was_in_progress_is_read_by_the_next_server(own_root, serve):
    settings = ServeSettings(root=own_root, writable=True)
    first = serve(settings)
    first.app.state.server.ingestion.begin = lambda attachments: None  # type: ignore[attr-defined]
    client = client_over(first)
    file = send(client, "keys.md", NOTE)
    assert client.vector_stores.files.create("stones", file_id=file.id).status == "in_progress"
    assert client.vector_stores.retrieve("stones").status == "in_progress"
    of_private = Store(name="it cannot be read now", metadata=None, created_at=0)
    first.app.state.server.uploads.name_store("private", of_private)  # type: ignore[attr-defined]
    first.app.state.server.uploads.close()  # type: ignore[attr-defined]
    assert settled(client_over(serve(settings)), "stones", file.id).status == "completed"


def test_files_belong_to_the_key_that_sent_them(own_root, serve):
    keys = KeyFile(own_root / "keys.json")
    tokens = [
        keys.create(name, scopes=("search", "write"), collections=("stones",))[1] for name in ("one", "two")
    ]
    reader = keys.create("reader", scopes=("search",))[1]
    server = serve(ServeSettings(root=own_root, writable=True))
    one, two, only = (client_over(server, key) for key in (*tokens, reader))
    file = send(one, "a.md", NOTE)
    assert [each.id for each in one.files.list()] == [file.id]
    assert list(two.files.list()) == []
    for refused in (lambda: two.files.content(file.id), lambda: two.files.delete(file.id)):
        with pytest.raises(openai.NotFoundError):
            refused()
    with pytest.raises(openai.NotFoundError):
        two.vector_stores.files.create("stones", file_id=file.id)
    with pytest.raises(openai.NotFoundError):
        one.vector_stores.files.create("pebbles", file_id=file.id)
    with pytest.raises(openai.PermissionDeniedError):
        send(only, "a.md", NOTE)


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        *(("../../etc/passwd", "passwd"), ("a\\b.pdf", "b.pdf"), ("..", "file"), ("", "file")),
        *(("é\x00.md", "é.md"), ("x" * 300 + ".pdf", "x" * 196 + ".pdf"), (".md", ".md")),
    ],
)
def test_name_of_a_file_is_one_of_no_other_folder(sent, kept):
    assert file_name(sent) == kept
