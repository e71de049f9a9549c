"""Tables of Lance, Delta and Iceberg as sources, beside the same rows in memory."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.file_identity import file_identities
from cairn.pipeline.corpus.formats.format import TablePart
from cairn.pipeline.corpus.formats.tables import iceberg_part, store_properties
from cairn.pipeline.corpus.scan import read_checked, scan_sources
from cairn.pipeline.corpus.sources import resolve_sources
from cairn.pipeline.errors import ConfigError, SourceError, TryAgainError
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError
from pyiceberg.catalog.memory import InMemoryCatalog

from tests.corpus import published as publication
from tests.corpus.checked_rows import read
from tests.corpus.published import Published

if TYPE_CHECKING:
    from tests.object_stores import ObjectStore

ROWS = [{"id": f"d{n}", "text": f"text {n}", "year": 2000 + n % 2, "tags": ["a", str(n)]} for n in range(6)]
TABLE = pa.Table.from_pylist(ROWS)


class DeltaWritten:
    def __init__(self, place: str) -> None:
        self.place = place

    def append(self, rows: pa.Table) -> None:
        write_deltalake(self.place, rows, mode="append", partition_by=["year"])

    def delete(self, doc_id: str) -> None:
        DeltaTable(self.place).delete(f"id = '{doc_id}'")


class LanceWritten:
    def __init__(self, place: str) -> None:
        self.place = place

    def append(self, rows: pa.Table) -> None:
        lance.write_dataset(rows, self.place, mode="append")

    def delete(self, doc_id: str) -> None:
        lance.dataset(self.place).delete(f"id = '{doc_id}'")


class IcebergWritten:
    def __init__(self, place: str) -> None:
        self.catalog = InMemoryCatalog("tests", warehouse=place, **store_properties())
        self.catalog.create_namespace("n")
        self.table = self.catalog.create_table("n.t", schema=TABLE.schema, location=place)

    def append(self, rows: pa.Table) -> None:
        self.table.append(rows)

    def delete(self, doc_id: str) -> None:
        self.table.delete(f"id == '{doc_id}'")


Written = DeltaWritten | LanceWritten | IcebergWritten
FORMATS: dict[str, Callable[[str], Written]] = {
    "delta": DeltaWritten,
    "lance": LanceWritten,
    "iceberg": IcebergWritten,
}


@pytest.fixture(params=FORMATS)
def written(request: pytest.FixtureRequest, tmp_path: Path) -> Written:
    """A table at ``tmp_path / "t"``: documents 0 to 2, then 3 to 5, without 4."""
    return make(FORMATS[request.param], str(tmp_path / "t"))


def make(written: Callable[[str], Written], place: str) -> Written:
    table = written(place)
    table.append(TABLE.slice(0, 3))
    table.append(TABLE.slice(3, 3))
    table.delete("d4")
    return table


def documents(*sources: Path | str, batch_rows: int = 1_024) -> list[dict[str, Any]]:
    rows, rejected = read(*sources, config=CorpusConfig(batch_rows=batch_rows))
    assert rejected == []
    kept = [{name: row[name] for name in ("doc_id", "text", "year", "tags")} for row in rows]
    return sorted(kept, key=lambda row: row["doc_id"])


@pytest.mark.parametrize("batch_rows", [1, 1_024])
def test_rows_of_a_table_are_those_of_its_latest_version(
    written: Written, tmp_path: Path, batch_rows: int
) -> None:
    wanted = [{"doc_id": row["id"], **{name: row[name] for name in ("text", "year", "tags")}} for row in ROWS]
    del wanted[4]
    assert documents(tmp_path / "t", batch_rows=batch_rows) == wanted
    assert documents(f"{tmp_path}/*", batch_rows=batch_rows) == wanted


def test_new_version_reads_only_the_files_that_it_added(written: Written, tmp_path: Path) -> None:
    published, place = Published(tmp_path / "work"), tmp_path / "t"
    published.ingest(place)
    published.ingest(place)
    assert len(published.passed_over) == len(resolve_sources([str(place)]))

    before = {file.path.rpartition("/")[2] for file in resolve_sources([str(place)])}
    written.append(pa.Table.from_pylist([{**ROWS[0], "id": "d6"}]))
    outcome = published.ingest(place)
    assert [row["doc_id"] for row in outcome["staged_rows"]] == ["d6"]
    assert {*published.passed_over} == before

    written.delete("d1")
    outcome = published.ingest(place, sync=True)
    assert outcome["vanished"] == ["d1"]
    assert outcome["staged_rows"] == []
    assert published.passed_over
    assert sorted(published.documents) == ["d0", "d2", "d3", "d5", "d6"]


def test_table_that_changes_during_an_ingest_is_read_as_it_was(
    written: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was added or deleted meanwhile is found by the next ingest."""
    published, place = Published(tmp_path / "work"), tmp_path / "t"

    def scan_then_change(*arguments: Any, **named: Any) -> Any:
        found = scan_sources(*arguments, **named)
        written.append(pa.Table.from_pylist([{**ROWS[0], "id": "d6"}]))
        written.delete("d1")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(publication, "scan_sources", scan_then_change)
        published.ingest(place, sync=True)
    assert sorted(published.documents) == ["d0", "d1", "d2", "d3", "d5"]
    outcome = published.ingest(place, sync=True)
    assert [row["doc_id"] for row in outcome["staged_rows"]] == ["d6"]
    assert outcome["vanished"] == ["d1"]


def test_added_column_is_null_in_files_from_before_it(tmp_path: Path) -> None:
    place = tmp_path / "t"
    write_deltalake(place, TABLE)
    before = file_identities(resolve_sources([str(place)]))
    more = pa.table({"id": ["new"], "text": ["x"], "extra": ["y"]})
    write_deltalake(place, more, mode="append", schema_mode="merge")
    rows, _ = read(place)
    assert {row["doc_id"]: row["extra"] for row in rows} == {**{row["id"]: None for row in ROWS}, "new": "y"}
    assert not {*before} & {*file_identities(resolve_sources([str(place)]))}


def test_damaged_data_file_costs_its_own_rows_and_deletes_nothing(written: Written, tmp_path: Path) -> None:
    published, place = Published(tmp_path / "work"), tmp_path / "t"
    published.ingest(place)
    written.append(pa.Table.from_pylist([{**ROWS[0], "id": "d6"}]))
    newest = max(place.rglob("*.lance" if (place / "_versions").exists() else "*.parquet"), key=_written_at)
    newest.write_bytes(b"\0" * newest.stat().st_size)

    outcome = published.ingest(place, sync=True)

    assert {row["reason"] for row in outcome["refused"]} <= {"damaged_file", "damaged_rows"}
    assert len(outcome["refused"]) == 1
    assert not outcome["is_complete"]
    assert sorted(published.documents) == ["d0", "d1", "d2", "d3", "d5"]


class PanicException(BaseException):
    __module__ = "pyo3_runtime"


@pytest.mark.parametrize(
    "error", [DeltaError("first\n   \x1b[31m↳\x1b[0m second"), PanicException("first: second")]
)
def test_whatever_a_library_raises_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    make(FORMATS["lance"], str(tmp_path / "t"))
    scan = scan_sources([str(tmp_path / "t")], CorpusConfig())

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(TablePart, "read", property(lambda _: fail))
    refused = [row for each in read_checked(scan, CorpusConfig()) for row in each.rejected.to_pylist()]
    assert {(row["reason"], row["detail"]) for row in refused} == {("damaged_rows", "first: second")}
    monkeypatch.setattr(lance, "dataset", fail)
    with pytest.raises(SourceError, match="must be one that can be opened, got: first: second"):
        resolve_sources([str(tmp_path / "t")])


def _written_at(path: Path) -> int:
    return path.stat().st_mtime_ns


@pytest.mark.parametrize("name", ["deltalake", "pyiceberg"])
def test_missing_library_names_the_extra(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = "delta" if name == "deltalake" else "iceberg"
    make(FORMATS[found], str(tmp_path / "t"))
    for module in [each for each in sys.modules if each.partition(".")[0] == name]:
        monkeypatch.setitem(sys.modules, module, None)
    sentence = rf"table .*/t must have the package {name}, got none; .*\.\[{found}\]"
    with pytest.raises(ConfigError, match=sentence):
        resolve_sources([str(tmp_path / "t")])


def test_table_that_cannot_be_opened_is_refused_in_a_sentence(written: Written, tmp_path: Path) -> None:
    for folder in ("_delta_log", "_versions", "metadata"):
        for path in (tmp_path / "t" / folder).glob("*"):
            path.write_bytes(b"{")
    with pytest.raises(SourceError, match=r"table .*/t must be one that can be opened, got: .+") as caught:
        resolve_sources([str(tmp_path / "t")])
    assert "\n" not in str(caught.value)


def test_folder_above_a_table_is_refused(tmp_path: Path) -> None:
    for name in ("delta", "iceberg"):
        make(FORMATS[name], str(tmp_path / name / "t"))
        with pytest.raises(SourceError, match=rf"must hold no table .*, got {tmp_path}/{name}/t; name"):
            resolve_sources([str(tmp_path / name)])


def test_delta_table_that_arrow_cannot_read_is_one_part(tmp_path: Path) -> None:
    place = tmp_path / "t"
    vectors = {"delta.enableDeletionVectors": "true"}
    write_deltalake(
        DeltaTable.create(place, schema=TABLE.schema, configuration=vectors), TABLE, mode="append"
    )
    DeltaTable(place).delete("id = 'd4'")
    assert [file.relative for file in resolve_sources([str(place)])] == ["version-2"]
    assert [row["doc_id"] for row in documents(place, batch_rows=2)] == ["d0", "d1", "d2", "d3", "d5"]


def test_iceberg_rows_that_delete_files_name_are_left_out(tmp_path: Path) -> None:
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
    from pyiceberg.table import FileScanTask, StaticTable
    from pyiceberg.typedef import Record

    table = IcebergWritten(str(tmp_path / "t"))
    table.append(TABLE)
    static = StaticTable.from_metadata(table.table.metadata_location)
    (task,) = static.scan().plan_files()
    path = tmp_path / "t" / "deletes.parquet"
    pq.write_table(pa.table({"file_path": [task.file.file_path] * 2, "pos": pa.array([1, 4])}), path)
    deletes = DataFile.from_args(
        content=DataFileContent.POSITION_DELETES,
        file_path=str(path),
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=2,
        file_size_in_bytes=path.stat().st_size,
    )
    part = iceberg_part(static, FileScanTask(task.file, {deletes}), TABLE.schema)
    assert part.num_rows() == 4
    rows = [row for batch in part.read(["id"], 1_024) for row in batch.to_pylist()]
    assert [row["id"] for row in rows] == ["d0", "d2", "d3", "d5"]


def test_iceberg_metadata_file_names_its_version(tmp_path: Path) -> None:
    table = IcebergWritten(str(tmp_path / "t"))
    table.append(TABLE.slice(0, 1))
    first = table.table.metadata_location.removeprefix("file://")
    table.append(TABLE.slice(1, 1))
    assert [row["doc_id"] for row in documents(first)] == ["d0"]
    assert [row["doc_id"] for row in documents(tmp_path / "t")] == ["d0", "d1"]

    published = Published(tmp_path / "work")
    for row in ROWS[2:4]:
        published.ingest(table.table.metadata_location)
        table.append(pa.Table.from_pylist([row]))
    published.ingest(table.table.metadata_location)
    assert len(published.passed_over) == 3, "the file's name has changed, its table has not"

    newest = Path(table.table.metadata_location.removeprefix("file://"))
    shutil.copy(newest, newest.with_name(f"{newest.name[:6]}other.metadata.json"))
    with pytest.raises(
        SourceError, match=r"must be the newest, got .* and .*; name the one that its catalog"
    ):
        resolve_sources([str(tmp_path / "t")])


@pytest.mark.parametrize("name", FORMATS)
def test_table_in_an_object_store_is_read(object_store: ObjectStore, name: str) -> None:
    make(FORMATS[name], "s3://cairn/lake/t")
    assert [row["doc_id"] for row in documents("s3://cairn/lake/t")] == ["d0", "d1", "d2", "d3", "d5"]


@pytest.mark.parametrize("name", FORMATS)
def test_store_that_does_not_answer_damages_no_table(object_store: ObjectStore, name: str) -> None:
    make(FORMATS[name], "s3://cairn/lake/t")
    scan = scan_sources(["s3://cairn/lake/t"], CorpusConfig())
    object_store.fault("GET", r"lake/t/.*\.(parquet|lance)", "refuse", times=1_000)
    with pytest.raises(TryAgainError, match=r"the store of source s3://cairn/lake/t/.* does not answer: .+"):
        list(read_checked(scan, CorpusConfig()))
    object_store.fault("GET", "lake/t/.+", "refuse", times=1_000)
    with pytest.raises(TryAgainError, match=r"the store of source s3://cairn/lake/t does not answer: .+"):
        resolve_sources(["s3://cairn/lake/t"])
    object_store.fault("GET", "lake/t/.+", "forbid", times=1_000)
    with pytest.raises(SourceError, match=r"table s3://cairn/lake/t must be one that can be opened, got: .+"):
        resolve_sources(["s3://cairn/lake/t"])
    object_store.fault("GET", "none", "forbid", times=0)


def test_folder_of_tables_names_them(tmp_path: Path) -> None:
    for name in ("notes.lance", "mails.lance"):
        lance.write_dataset(TABLE, tmp_path / "db" / name)
    with pytest.raises(
        SourceError, match=r"folder of tables \(mails\.lance, notes\.lance\); name one, as in"
    ):
        scan_sources([str(tmp_path / "db")], CorpusConfig())
    assert len(read(tmp_path / "db" / "*.lance", config=CorpusConfig(metadata_columns=()))[0]) >= len(ROWS)
