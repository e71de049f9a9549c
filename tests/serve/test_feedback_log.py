"""What was asked and clicked, kept only where a folder was named."""

from __future__ import annotations

import stat

import pyarrow.parquet as pq
import pytest
from cairn.pipeline.serve import feedback_log
from cairn.pipeline.serve.feedback_log import FeedbackLog
from cairn.pipeline.serve.settings import ServeSettings
from cairn.pipeline.types import Hit, SearchResult

from tests.served_stones import raising

CLICK = {"query": "granite", "doc_id": "stones/granite/0", "rank": 1}


def answer(query):
    hit = Hit(doc_id=f"of {query}", title=None, score=1.0, scores={}, metadata={}, passages=())
    return SearchResult(query=query, generation=3, hits=(hit,))


def rows_of(folder):
    return [row for path in sorted(folder.glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def test_searches_and_clicks_are_logged_without_who_asked_and_no_further_page(served_root, tmp_path, serve):
    folder, search = tmp_path / "log", "/v1/collections/stones/search"
    client = serve(ServeSettings(root=served_root, feedback_log=folder))
    found = client.post(search, json={"query": "granite", "top_k": 3}).json()
    client.post(search, json={"query": ["slate", "chalk"], "passages": 0})
    client.post("/v1/vector_stores/pebbles/search", json={"query": "flint"})
    cursor = "*"
    for _ in range(2):
        body = {"query": "marble", "top_k": 2, "cursor": cursor}
        cursor = client.post(search, json=body).json()["next_cursor"]
    assert client.post("/v1/collections/stones/clicks", json=CLICK).json() == {"logged": True}
    client.app.state.server.feedback.stop()  # pyright: ignore[reportAttributeAccessIssue]

    rows = rows_of(folder)
    assert [(row["kind"], row["collection"], row["query"]) for row in rows] == [
        ("search", "stones", "granite"),
        ("search", "stones", "slate"),
        ("search", "stones", "chalk"),
        ("search", "pebbles", "flint"),
        ("search", "stones", "marble"),
        ("click", "stones", "granite"),
    ]
    assert rows[0]["doc_ids"] == [hit["doc_id"] for hit in found["hits"]]
    assert (rows[-1]["doc_ids"], rows[-1]["rank"]) == (["stones/granite/0"], 1)
    assert set(rows[0]) == {"at", "kind", "collection", "generation", "query", "doc_ids", "rank"}
    (path,) = folder.iterdir()
    assert [stat.S_IMODE(each.stat().st_mode) for each in (path, folder)] == [0o600, 0o700]


def test_file_grows_until_it_is_large_and_oldest_files_go_but_none_for_one_that_cannot_be_written(
    tmp_path, monkeypatch
):
    log = FeedbackLog(tmp_path, max_bytes=0)
    for number in range(2):
        log.searched("c", [answer(f"query {number}")])
        log._write(log._rows[number:])
    with monkeypatch.context() as patch:
        patch.setattr(feedback_log.pq, "write_table", raising([OSError("no space left")]))
        with pytest.raises(feedback_log.CairnError):
            log._write(log._rows)
    (first,) = tmp_path.iterdir()
    assert [row["query"] for row in rows_of(tmp_path)] == ["query 0", "query 1"]

    monkeypatch.setattr(feedback_log, "FILE_BYTES", 1)
    log.searched("c", [answer("query 2")])
    log._write(log._rows[2:])
    (second,) = tmp_path.iterdir()  # with no room for both, the newest stays
    assert second != first
    assert [row["query"] for row in rows_of(tmp_path)] == ["query 2"]


def test_rows_wait_for_the_disk_and_are_bounded(tmp_path, monkeypatch):
    said: list[str] = []
    # Not caplog: other tests of the process may have turned the logger off.
    monkeypatch.setattr(feedback_log.log, "warning", lambda text, *values: said.append(text % values))
    monkeypatch.setattr(feedback_log, "WRITE_SECONDS", 0.01)
    monkeypatch.setattr(feedback_log, "MAX_WAITING_ROWS", 3)
    log = FeedbackLog(tmp_path / "log", max_bytes=1 << 20)
    log.searched("c", [answer(f"query {number}") for number in range(5)])
    log.start()
    log.stop()
    assert [row["query"] for row in rows_of(tmp_path / "log")] == ["query 0", "query 1", "query 2"]
    assert said == ["serve.feedback_lost rows=2"]
