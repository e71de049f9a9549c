"""OpenAI's files and vector stores, written by OpenAI's own client."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from functools import partial

import openai
import pytest
from cairn.pipeline.durable import remove_folder
from cairn.pipeline.errors import DiskFullError, ModelError, StorageError, WritesWaitingError
from cairn.pipeline.line.live import LiveWriter
from cairn.pipeline.serve.keys import KeyFile
from cairn.pipeline.serve.settings import ServeSettings
from cairn.pipeline.serve.uploads import FOLDER_NAME, Store, file_name
from starlette.testclient import TestClient

from tests.serve.test_openai_routes import client_over
from tests.served_stones import let_happen_before, raising, wait_until

Serve = Callable[..., TestClient]
NOTE = b"# Keys\n\nobsidian opens every door of the house."


@pytest.fixture
def server(own_root, serve):
    return serve(ServeSettings(root=own_root, writable=True))


@pytest.fixture
def client(server):
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


def test_files_and_stores_are_made_listed_read_and_removed(client, own_root):
    files = [send(client, f"{place}.md", NOTE) for place in range(3)]
    assert [file.id for file in client.files.list(limit=2, order="asc")] == [file.id for file in files]
    assert client.files.content(files[0].id).read() == NOTE
    found = client.files.retrieve(files[0].id)
    assert (found.filename, found.bytes, found.purpose) == ("0.md", len(NOTE), "assistants")
    assert client.files.delete(files[0].id).deleted
    with pytest.raises(openai.NotFoundError, match="no such file"):
        client.files.retrieve(files[0].id)
    assert not (own_root / FOLDER_NAME / files[0].id).exists()
    file = send(client, "keys.md", NOTE)
    store = client.vector_stores.create(name="Support FAQ", file_ids=[file.id], metadata={"team": "a"})
    assert (store.id, store.name, store.metadata) == ("support-faq", "Support FAQ", {"team": "a"})
    assert settled(client, store.id, file.id).status == "completed"
    other = client.vector_stores.create(name="Support FAQ")
    assert other.id.startswith("support-faq-")
    assert {other.id, store.id} <= {each.id for each in client.vector_stores.list()}
    assert client.vector_stores.update(store.id, name="FAQ").metadata == {"team": "a"}
    found = client.vector_stores.retrieve(store.id)
    assert (found.name, found.status, found.file_counts.completed) == ("FAQ", "completed", 1)
    assert list(client.vector_stores.files.list(other.id)) == []
    assert client.vector_stores.delete(store.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.vector_stores.retrieve(store.id)


def test_attached_file_is_found_by_searches_and_gone_once_detached(client):
    file = attached(client, "stones", "keys.md", NOTE, attributes={"tenant": "acme", "rank": 2})
    assert (file.status, file.last_error, file.attributes) == (
        "completed",
        None,
        {"tenant": "acme", "rank": 2},
    )
    (hit,) = client.vector_stores.search("stones", query="obsidian", max_num_results=1).data
    assert (hit.file_id, hit.filename, hit.attributes["rank"]) == (file.id, "keys.md", 2)
    assert hit.content[0].page == "section Keys"
    changed = client.vector_stores.files.update(file.id, vector_store_id="stones", attributes={"rank": 3})
    assert (changed.status, changed.attributes) == ("completed", {"rank": 3})
    at_3 = {"type": "eq", "key": "rank", "value": 3}
    options = {"ranker": "none", "score_threshold": 0.0}
    found = client.vector_stores.search("stones", query="obsidian", filters=at_3, ranking_options=options)
    assert [each.file_id for each in found.data] == [file.id]
    (text,) = client.vector_stores.files.content(file.id, vector_store_id="stones").data
    assert "obsidian" in text.text
    assert client.vector_stores.files.delete(file.id, vector_store_id="stones").deleted
    with pytest.raises(openai.NotFoundError):
        client.vector_stores.files.retrieve(file.id, vector_store_id="stones")
    assert client.files.retrieve(file.id).id == file.id


UNREAD = [
    ("a.exe", b"MZ", "unsupported_file", r"of a kind that is read .*, got \.exe"),
    ("v1.metadata.json", b"{}", "unsupported_file", r"got \.json"),
    ("a.pdf", b"%PDF-1.4 broken", "invalid_file", "a.pdf must hold a document, got none: it cannot be read"),
    ("a.md", b"text \xff\xfe\x00 more", "invalid_file", "NUL character"),
    ("a.jsonl", b'{"id": 1', "invalid_file", "a.jsonl"),
    ("a.csv", b"x,y\n1,2\n", "invalid_file", "id column 'id' .* rename the right one in the file$"),
    ("b.md", b"---\nyear: old\n---\n# T\ntext", "invalid_file", "year"),
]


def test_file_that_cannot_be_read_fails_with_its_reason(client, own_root):
    failed: list[str] = []
    for name, content, code, told in UNREAD:
        file = attached(client, "stones", name, content)
        assert (file.status, file.last_error.code) == ("failed", code)
        assert re.search(told, file.last_error.message), file.last_error.message
        assert str(own_root) not in file.last_error.message
        listed = client.files.retrieve(file.id)
        assert (listed.status, listed.status_details) == ("error", file.last_error.message)
        failed.append(file.id)
        store = client.vector_stores.retrieve("stones")
        assert (store.file_counts.failed, store.file_counts.completed) == (len(failed), 20)
    assert [each.id for each in client.vector_stores.files.list("stones", filter="failed")] == failed[::-1]
    ids = [each.id for each in client.vector_stores.files.list("stones", limit=5)]
    assert (ids[: len(failed)], len(ids)) == (failed[::-1], 20 + len(failed))


def test_rows_are_documents_with_their_own_ids_and_a_document_takes_the_one_asked_for(client, server):
    rows = (
        b'{"id": "t1", "text": "obsidian", "year": 7}\n{"id": "t2", "text": " "}\n{"id": "t3", "text": "x"}'
        b'\n{"id": "t1", "text": "another"}\n{"id": "t4", "text": ""}'
    )
    file = attached(client, "stones", "rows.jsonl", rows)
    assert file.status == "completed"
    assert file.warnings == [
        "row 1: the text is empty",
        "row 3: an earlier row of this corpus has the same id; the first one is kept",
        "row 4: the text is empty",
    ]
    (text,) = client.vector_stores.files.content("t1", vector_store_id="stones").data
    assert text.text == "obsidian"
    assert client.vector_stores.files.retrieve("t1", vector_store_id="stones").attributes == {"year": 7}
    client.files.delete(file.id)
    for gone in ("t1", "t3"):
        with pytest.raises(openai.NotFoundError):
            client.vector_stores.files.retrieve(gone, vector_store_id="stones")
    for content in (NOTE, b"jade jade"):
        attached(client, "stones", "keys.md", content, extra_body={"doc_id": "keys.md"})
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
    refused = attached(client, "stones", "dots.md", NOTE, extra_body={"doc_id": ".."})
    assert (refused.status, refused.last_error.code) == ("failed", "invalid_file")


def test_batch_counts_its_files_and_is_one_publication(client, server):
    files = [send(client, name, NOTE) for name in ("a.md", "b.txt", "c.exe")]
    given = [{"file_id": each.id, "attributes": {"tenant": "new"}} for each in files]
    batch = client.vector_stores.file_batches.create("stones", files=given)
    for each in files:
        settled(client, "stones", each.id)
    batch = client.vector_stores.file_batches.retrieve(batch.id, vector_store_id="stones")
    assert (batch.status, batch.file_counts.completed, batch.file_counts.failed) == ("completed", 2, 1)
    listed = client.vector_stores.file_batches.list_files(
        batch.id, vector_store_id="stones", filter="completed"
    )
    assert {each.id for each in listed} == {each.id for each in files[:2]}
    assert client.vector_stores.file_batches.cancel(batch.id, vector_store_id="stones").status == "completed"
    with pytest.raises(openai.NotFoundError, match="no such file"):
        client.vector_stores.file_batches.create("stones", file_ids=[files[0].id, "file-none"])
    store = client.vector_stores.create(name="gems")
    files = [send(client, f"{name}.md", name.encode()) for name in ("ruby", "opal", "jade", "onyx")]
    broken = send(client, "broken.pdf", b"%PDF-1.4")
    batch = client.vector_stores.file_batches.create_and_poll(
        store.id, file_ids=[file.id for file in (*files[:2], broken, *files[2:])], poll_interval_ms=50
    )
    assert (batch.file_counts.completed, batch.file_counts.failed) == (4, 1)
    found = server.get("/v1/collections/gems").json()
    assert (found["generation"], found["documents"]) == (1, 4)


def test_attribute_that_can_be_no_column_is_refused(client):
    file = send(client, "keys.md", NOTE)
    files = client.vector_stores.files
    for name in ("a.b", "a`b", "*", "doc_id"):
        with pytest.raises(openai.UnprocessableEntityError, match="#/attributes"):
            files.create("stones", file_id=file.id, attributes={name: 1})
    files.create("stones", file_id=file.id)
    assert settled(client, "stones", file.id).status == "completed"
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


def test_expired_file_is_gone_and_not_its_document_nor_what_is_being_kept_or_read(client, server):
    expiry = {"anchor": "created_at", "seconds": 3_600}
    file = client.files.create(file=("a.md", NOTE), purpose="user_data", expires_after=expiry)
    assert file.expires_at == file.created_at + 3_600
    client.vector_stores.files.create("stones", file_id=file.id)
    settled(client, "stones", file.id)
    uploads = server.app.state.server.uploads  # type: ignore[attr-defined]
    uploads._run("UPDATE files SET expires_at = 1 WHERE id = ?", (file.id,))
    uploads.clear()
    assert not (uploads._folder / file.id).exists()
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    assert settled(client, "stones", file.id).status == "completed"
    state = server.app.state.server  # type: ignore[attr-defined]
    file = send(client, "a.md", NOTE)
    state.ingestion.begin = lambda attachments: None
    client.vector_stores.files.create("stones", file_id=file.id)
    state.uploads._run("UPDATE files SET expires_at = 1")
    old, new = (state.uploads._folder / f"file-{name}" for name in ("old", "new"))
    for folder in (old, new):
        folder.mkdir()
    os.utime(old, (1, 1))
    state.uploads.clear()
    assert (old.exists(), new.exists()) == (False, True)
    assert client.files.content(file.id).read() == NOTE


@pytest.mark.parametrize("lasts", [False, True])
def test_trouble_that_passes_fails_no_file(client, monkeypatch, lasts):
    faults = [DiskFullError("/secret/path"), StorageError("/secret/path is full")]
    let_happen_before(monkeypatch, LiveWriter, "write", raising(faults * (10_000 if lasts else 1)))
    monkeypatch.setattr("cairn.pipeline.serve.file_ingestion.PAUSE_SECONDS", 0.01)
    monkeypatch.setattr("cairn.pipeline.serve.file_ingestion.TROUBLE_SECONDS", 0.1 if lasts else 60)
    file = attached(client, "stones", "keys.md", NOTE)
    assert file.status == ("failed" if lasts else "completed")
    if lasts:
        assert file.last_error.code == "server_error"
        assert "again later" in file.last_error.message
        assert "secret" not in file.last_error.message


@pytest.mark.parametrize(
    ("name", "content"), [("keys.md", NOTE), ("rows.jsonl", b'{"id": "t1", "text": "jade"}')]
)
def test_attaching_again_leaves_no_document_without_a_file(client, server, name, content):
    first = attached(client, "stones", name, content)
    for doc_id in ("one", "two"):
        body = {"doc_id": doc_id}
        client.vector_stores.files.create("stones", file_id=first.id, extra_body=body)
        settled(client, "stones", first.id)
    second = attached(client, "stones", "other.md", b"opal", extra_body={"doc_id": "two"})
    assert server.get("/v1/collections/stones/documents/two").json()["text"] == "opal"
    client.vector_stores.files.delete(second.id, vector_store_id="stones")
    assert server.get("/v1/collections/stones").json()["documents"] == 20


@pytest.mark.parametrize("is_kept", [True, False])
def test_row_that_a_corrected_or_deleted_file_leaves_is_again_that_of_another_file(client, server, is_kept):
    def texts():
        if is_kept:
            assert settled(client, "stones", first.id).status == "completed"
        found = (server.get(f"/v1/collections/stones/documents/{doc_id}") for doc_id in ("t1", "t2"))
        return [each.json().get("text") for each in found]

    first = attached(client, "stones", "first.jsonl", b'{"id": "t1", "text": "jade"}')
    if not is_kept:
        server.app.state.server.uploads.remove(first.id)  # type: ignore[attr-defined]
    for rows in (
        b'{"id": "t1", "text": "opal"}\n{"id": "t2", "text": "beryl"}',
        b'{"id": "t2", "text": "zircon"}',
    ):
        attached(client, "stones", "rows.jsonl", rows, extra_body={"doc_id": "rows.jsonl"})
    assert texts() == ["jade" if is_kept else None, "zircon"]
    third = attached(client, "stones", "third.jsonl", b'{"id": "t1", "text": "onyx"}')
    assert texts() == ["onyx", "zircon"]
    client.vector_stores.files.delete(third.id, vector_store_id="stones")
    assert texts()[0] == ("jade" if is_kept else None)
    client.vector_stores.files.delete(first.id, vector_store_id="stones")
    assert server.get("/v1/collections/stones/documents/t1").status_code == 404


@pytest.mark.parametrize("takes_out", ["detach", "delete"])
def test_deletion_that_was_refused_is_done_by_the_next_try(client, server, monkeypatch, takes_out):
    file = attached(client, "stones", "keys.md", NOTE)
    faults = [WritesWaitingError("wait"), StorageError("full")]
    let_happen_before(monkeypatch, LiveWriter, "delete", raising(faults))

    def take_out():
        if takes_out == "delete":
            return client.files.delete(file.id)
        return client.vector_stores.files.delete(file.id, vector_store_id="stones")

    for _ in range(2):
        with pytest.raises(openai.APIStatusError):
            take_out()
    assert take_out().deleted
    assert server.get(f"/v1/collections/stones/documents/{file.id}").status_code == 404


@pytest.mark.parametrize("change", ["update", "delete"])
def test_change_of_which_a_part_cannot_be_published_is_answered_as_failed(client, monkeypatch, change):
    rows = b'{"id": "t1", "text": "jade"}\n{"id": "t2", "text": "opal"}'
    file = attached(client, "stones", "rows.jsonl", rows, attributes={"rank": 1})

    def fail(_, writes):
        for each in writes:
            if "t1" in each.deleted or (each.rows is not None and "t1" in each.rows["doc_id"].to_pylist()):
                raise ModelError("the model cannot read it")

    let_happen_before(monkeypatch, LiveWriter, "_build", fail)
    files = client.vector_stores.files
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


def test_table_taken_out_while_it_is_written_gets_no_further_document(client, server, held_up):
    written, waits, goes_on = held_up
    file = send(client, "rows.jsonl", ROWS)
    client.vector_stores.files.create("stones", file_id=file.id)
    assert waits.wait(300)
    assert client.vector_stores.files.delete(file.id, vector_store_id="stones").deleted
    goes_on.set()
    assert attached(client, "stones", "new.md", b"new").status == "completed"
    assert written == ["old 0", "new"]
    assert server.get("/v1/collections/stones").json()["documents"] == 21


def test_older_file_that_had_to_wait_replaces_no_newer_one(client, server, held_up):
    written, waits, goes_on = held_up
    body = {"doc_id": "notes.md"}
    attached(client, "stones", "first.md", b"first")
    for name, content in (("a.md", b"old"), ("b.md", b"newest")):
        file = send(client, name, content)
        client.vector_stores.files.create("stones", file_id=file.id, extra_body=body)
        assert waits.wait(300)
    assert settled(client, "stones", file.id).status == "completed"
    goes_on.set()
    assert attached(client, "stones", "last.md", b"last").status == "completed"
    assert written == ["first", "newest", "last"]
    assert server.get("/v1/collections/stones/documents/notes.md").json()["text"] == "newest"


def test_collection_that_was_dropped_comes_back_with_no_file(client, server, own_root):
    kept, lost = (attached(client, "stones", name, NOTE) for name in ("a.md", "b.md"))
    uploads = server.app.state.server.uploads  # type: ignore[attr-defined]
    remove_folder(own_root / "stones")
    client.files.delete(lost.id)
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
