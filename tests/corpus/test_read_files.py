"""Files that are not read again, beside runs that read every file each time."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus import file_identity, ledger
from cairn.pipeline.corpus.source_record import create_record, holds_for
from cairn.pipeline.errors import SourceError

from tests.corpus.published import Published
from tests.damages import KINDS, put

Row = tuple[str | None, str | None]


@pytest.fixture(autouse=True)
def trust_fresh_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_identity, "SETTLED_SECONDS", 0.0)


@pytest.fixture
def published(tmp_path: Path) -> Published:
    return Published(tmp_path / "work")


_times = iter(range(1, 10**9))


def write(path: Path, rows: list[Row], **columns: Any) -> Path:
    """Write a file, a second later than the one before."""
    path.parent.mkdir(exist_ok=True)
    ids, texts = [row[0] for row in rows], [row[1] for row in rows]
    pq.write_table(
        pa.table({"id": pa.array(ids, pa.string()), "text": pa.array(texts, pa.string()), **columns}), path
    )
    touch(path)
    return path


def touch(path: Path) -> None:
    seconds = 1_000_000 + next(_times)
    os.utime(path, (seconds, seconds))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Three files of two documents."""
    for name in "abc":
        write(tmp_path / "corpus" / f"{name}.parquet", [(f"{name}{number}", "text") for number in (1, 2)])
    return tmp_path / "corpus"


def test_documents_take_their_ids_from_how_the_source_is_named(published: Published, tmp_path: Path) -> None:
    (sub := tmp_path / "m" / "sub").mkdir(parents=True)
    (sub / "a.md").write_text("text")
    touch(sub / "a.md")
    found = [[*published.ingest(source, sync=True)["documents"]] for source in (sub.parent, sub)]
    assert found == [["sub/a.md"], ["a.md"]]


def test_file_with_the_size_and_the_time_of_before_is_read(published: Published, corpus: Path) -> None:
    path = corpus / "a.parquet"
    published.ingest(corpus)
    before = path.stat()
    write(path, [("a1", "tent"), ("a2", "tent")])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert published.ingest(corpus)["changed"] == 2


def test_file_written_a_moment_ago_is_read_again(
    published: Published, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_identity, "SETTLED_SECONDS", 60.0)
    published.ingest(corpus)
    published.ingest(corpus)
    assert published.passed_over == []


@pytest.mark.parametrize(
    "change",
    [
        {"config": CorpusConfig(max_id_characters=9)},
        {"config": CorpusConfig(metadata_columns=())},
        {"config": CorpusConfig(title_column="text")},
    ],
    ids=["limit", "metadata", "title"],
)
def test_other_settings_read_every_file(published: Published, corpus: Path, change: dict[str, Any]) -> None:
    for name in "abc":
        write(corpus / f"{name}.parquet", [(name, "text")], year=[1])
    published.ingest(corpus)
    published.ingest(corpus, **change)
    assert published.passed_over == []


def test_file_with_too_many_quarantined_rows_is_read_each_time(
    published: Published, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "MAX_REJECTED", 1)
    write(corpus / "a.parquet", [("a1", ""), ("a2", "")])
    write(corpus / "b.parquet", [("b1", "")])
    published.ingest(corpus)
    published.ingest(corpus)
    assert published.passed_over == ["b.parquet", "c.parquet"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("b.csv", "id,text\nx,y\n"),
        ("b.jsonl", '{"id": "x", "text": "y"}\n'),
        ("b.mbox", "From x Mon 10:00\nSubject: s\n\ny\n"),
    ],
)
def test_damaged_file_is_read_each_time_and_keeps_sync_from_deleting(
    published: Published, corpus: Path, name: str, content: str
) -> None:
    (corpus / name).write_text(content)
    published.ingest(corpus)
    path = corpus / "b.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    (corpus / name).write_text("")
    for _ in range(2):
        done = published.ingest(corpus, sync=True)
        assert (done["is_complete"], done["quarantine_reasons"]) == (False, {"damaged_file": 2})
        assert published.passed_over == ["a.parquet", "c.parquet"]
    path.unlink()
    assert not published.ingest(corpus, sync=True)["is_complete"]


@pytest.mark.parametrize(
    ("name", "content", "cut"),
    [
        ("b.csv", "id,text\nx,y\n", "id,te"),
        ("b.jsonl", '{"id": "x", "text": "y"}\n', '{"error": "rate limited"}\n'),
    ],
)
@pytest.mark.parametrize("reread", [False, True])
def test_a_table_that_gave_documents_and_lacks_a_column_keeps_sync_from_deleting(
    published: Published,
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    reread: bool,
    name: str,
    content: str,
    cut: str,
) -> None:
    (corpus / name).write_text(content)
    published.ingest(corpus)
    published.reread = reread
    monkeypatch.chdir(corpus)
    for source in (corpus, Path(), corpus):
        (corpus / name).write_text(cut)
        done = published.ingest(source, sync=True)
        assert (done["is_complete"], done["quarantine_reasons"]) == (False, {"damaged_file": 1})
        assert "it gave documents before" in done["refused"][0]["detail"]
        assert "x" in done["documents"]


def test_file_with_damaged_rows_is_read_each_time(published: Published, corpus: Path) -> None:
    path = corpus / "b.parquet"
    table = pa.table({"id": [f"b{number}" for number in range(9)], "text": ["some text"] * 9})
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(table, path, write_page_checksum=True, **plain)
    content = bytearray(path.read_bytes())
    content[content.index(b"some text")] ^= 1
    path.write_bytes(content)
    for _ in range(2):
        assert published.ingest(corpus)["quarantine_reasons"] == {"damaged_rows": 9}
        assert "b.parquet" not in published.passed_over


def test_record_does_not_grow_with_runs(published: Published, corpus: Path) -> None:
    published.ingest(corpus)
    size = (published.folder / "sources.sqlite").stat().st_size
    for number in range(20):
        write(corpus / "b.parquet", [("b1", f"text {number}"), ("b3", "")])
        published.ingest(corpus, sync=True)
    assert (published.folder / "sources.sqlite").stat().st_size <= size + 8_192


EDITS = ("write",) * 6 + ("remove", "touch", "cut", "rename", "delete")


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 40))]
)
def test_runs_that_leave_files_unread_do_what_runs_that_read_all_do(tmp_path: Path, seed: int) -> None:
    """Edits of files, deletions, kills, damage and other sources between runs, at random."""
    rng = random.Random(seed)
    both = [Published(tmp_path / "unread"), Published(tmp_path / "reread", reread=True)]
    corpus = tmp_path / "corpus"
    write(corpus / "z.parquet", [("z", "text")])
    num_unread = 0
    for _ in range(30):
        for _ in range(rng.choice((0, 1, 1, 2))):
            _edit(rng, corpus, both)
        name, is_sync = rng.choice((*"abc", *[None] * 7)), rng.random() < 0.4
        killed = rng.choice(("early", "late", *[""] * 6))
        source = corpus if name is None else corpus / f"{name}.parquet"
        unread, reread = (_outcome(published, source, is_sync, killed) for published in both)
        assert unread == reread
        num_unread += len(both[0].passed_over)
    assert num_unread > 10


def _edit(rng: random.Random, corpus: Path, both: list[Published]) -> None:
    kind, path = rng.choice(EDITS), corpus / f"{rng.choice('abcd')}.parquet"
    if kind == "delete":
        doc_id = rng.choice("pqrstuvw")
        for published in both:
            published.generation += 1
            published.documents.pop(doc_id, None)
    elif kind == "write":
        ids = rng.sample("pqrstuvw", rng.choice((1, 2, 2, 3)))
        rows: list[Row] = [(doc_id, rng.choice(("1", "2", "3", "4", ""))) for doc_id in ids]
        write(path, rows + rng.choice(([], [], [(None, "text")], rows[:1])))
    elif not path.exists():
        return
    elif kind == "remove":
        path.unlink()
    elif kind == "touch":
        touch(path)
    elif kind == "cut":
        path.write_bytes(path.read_bytes()[:-9])
        touch(path)
    else:
        path.rename(corpus / f"{rng.choice('abcd')}.parquet")


def _outcome(published: Published, source: Path, is_sync: bool, killed: str) -> Any:
    try:
        return published.ingest(source, sync=is_sync, killed=killed)
    except SourceError as error:
        published.passed_over = []
        return str(error)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        *((("", "-journal"), kind) for kind in KINDS[1:]),
        (("-journal",), "FIFO"),
        (("-wal",), "FIFO"),
    ],
)
def test_record_of_another_kind_or_beside_one_is_made_again(
    tmp_path: Path, names: tuple[str, ...], kind: str
) -> None:
    record = tmp_path / "sources.sqlite"
    if "" not in names:
        create_record(record, "a" * 64, ())
    for name in names:
        put(tmp_path / f"sources.sqlite{name}", kind)
    assert not holds_for(record, "a" * 64)
    create_record(record, "a" * 64, ())
    assert holds_for(record, "a" * 64)
