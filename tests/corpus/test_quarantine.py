from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.corpus.quarantine import REJECTED_SCHEMA, RowWriter, count_new, shown_id


def rejected(*reasons: str) -> pa.RecordBatch:
    rows = [
        {"source_file": "a.parquet", "row_index": i, "doc_id": None, "reason": reason, "detail": "d"}
        for i, reason in enumerate(reasons)
    ]
    return pa.RecordBatch.from_pylist(rows, schema=REJECTED_SCHEMA)


def test_writer_stores_rows_in_order_in_one_group_and_leaves_no_file_without_any(tmp_path: Path) -> None:
    with RowWriter(tmp_path / "none.parquet") as writer:
        writer.write(rejected())
    with RowWriter(tmp_path / "run.parquet") as writer:
        for _ in range(100):
            writer.write(rejected("null_id", "empty_text"))
    assert [path.name for path in tmp_path.iterdir()] == ["run.parquet"]
    assert (
        pq.read_table(tmp_path / "run.parquet").column("reason").to_pylist()
        == ["null_id", "empty_text"] * 100
    )
    assert pq.read_metadata(tmp_path / "run.parquet").num_row_groups == 1


def test_rows_that_runs_before_refused_are_not_new(tmp_path: Path) -> None:
    def refuse(run: int, *rows: tuple[int | None, str | None, str]) -> int:
        path = tmp_path / f"{run}.parquet"
        with RowWriter(path) as writer:
            for row_index, doc_id, reason in rows:
                row = {"source_file": "a", "row_index": row_index, "doc_id": doc_id, "reason": reason}
                writer.write(pa.RecordBatch.from_pylist([{**row, "detail": "d"}], schema=REJECTED_SCHEMA))
        return count_new(path)

    same = [(0, "x", "empty_text"), (1, None, "null_id")]
    assert (refuse(1, *same), refuse(2, *same), refuse(3)) == (2, 0, 0)
    assert refuse(4, (5, "x", "empty_text"), (2, None, "null_id"), (0, "x", "null_text")) == 2
    assert (refuse(5, (None, None, "damaged_file")), refuse(6, (None, None, "damaged_file"))) == (1, 0)


def test_writer_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cairn.pipeline.corpus.quarantine.ROW_GROUP_ROWS", 1)

    def fail() -> None:
        with RowWriter(tmp_path / "run.parquet") as writer:
            writer.write(rejected("null_id"))
            assert len(list(tmp_path.iterdir())) == 1
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert list(tmp_path.iterdir()) == []


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
