from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.corpus.quarantine import REJECTED_SCHEMA, quarantine_writer, shown_id


def rejected(*reasons: str) -> pa.RecordBatch:
    rows = [
        {"source_file": "a.parquet", "row_index": i, "doc_id": None, "reason": reason, "detail": "d"}
        for i, reason in enumerate(reasons)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=REJECTED_SCHEMA)


def test_writer_with_no_rows_leaves_no_file(tmp_path: Path) -> None:
    with quarantine_writer(tmp_path / "q" / "run.parquet") as writer:
        writer.write(rejected())
    assert list(tmp_path.rglob("*")) == []
    assert writer.counts == {}


def test_writer_stores_rows_in_order_and_counts_reasons(tmp_path: Path) -> None:
    with quarantine_writer(tmp_path / "q" / "run.parquet") as writer:
        writer.write(rejected("null_id", "empty_text"))
        writer.write(rejected("null_id"))
    assert pq.read_table(tmp_path / "q" / "run.parquet").column("reason").to_pylist() == [
        "null_id",
        "empty_text",
        "null_id",
    ]
    assert (writer.counts, writer.num_rows) == ({"empty_text": 1, "null_id": 2}, 3)


def test_writer_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.pipeline.corpus.quarantine.ROW_GROUP_ROWS", 1)

    def fail() -> None:
        with quarantine_writer(tmp_path / "run.parquet") as writer:
            writer.write(rejected("null_id"))
            assert len(list(tmp_path.iterdir())) == 1
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_writer_file_appears_only_when_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.pipeline.corpus.quarantine.ROW_GROUP_ROWS", 1)
    with quarantine_writer(tmp_path / "run.parquet") as writer:
        writer.write(rejected("null_id"))
        assert not (tmp_path / "run.parquet").exists()
    assert (tmp_path / "run.parquet").exists()


def test_writer_many_small_batches_share_row_groups(tmp_path: Path) -> None:
    with quarantine_writer(tmp_path / "run.parquet") as writer:
        for _ in range(100):
            writer.write(rejected("null_id"))
    assert pq.read_metadata(tmp_path / "run.parquet").num_row_groups == 1


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        (None, None),
        (b"a\0b", "a\ufffdb"),
        (b"\xff", "\ufffd"),
        (b"x" * 5_000, "x" * 1_024),
        (("ü" * 5_000).encode(), "ü" * 1_024),
    ],
)
def test_shown_id_is_printable_and_short(raw: bytes | None, shown: str | None) -> None:
    assert shown_id(raw) == shown
