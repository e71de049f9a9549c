"""Values keep their Arrow types by every door into a collection, in a first batch and in a later one."""

from __future__ import annotations

import datetime as dt
import json
import time
from contextlib import contextmanager
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.collection import Collection, open_collection
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.line.live import LiveWriter
from cairn.pipeline.serve.settings import ServeSettings
from cairn.pipeline.serve.writers import ServedDocuments

from tests.serve.conftest import starter
from tests.serve.test_file_routes import attached
from tests.serve.test_openai_routes import client_over
from tests.served_stones import wait_until

NOW = {"wait": "searchable"}
COLUMNS = {
    "day": pa.array([dt.date(2024, 2, 29), None]),
    "time_ms": pa.array([1_704_070_923_456, 0], pa.timestamp("ms")),
    "time_ns": pa.array([1_704_070_923_456_789_012, 1], pa.timestamp("ns")),
    "zoned": pa.array([1_704_070_923_456_789, 1], pa.timestamp("us", "Europe/Berlin")),
    "price": pa.array([Decimal("12345678901234567890.25"), Decimal("1.10")], pa.decimal128(38, 2)),
    "u64": pa.array([2**64 - 1, 1], pa.uint64()),
    "i8": pa.array([-128, None], pa.int8()),
    "f32": pa.array([0.1, 2.0], pa.float32()),
    "flag": pa.array([True, False]),
    "days": pa.array([[dt.date(2024, 2, 29)], []], pa.list_(pa.date32())),
    "code": pa.array(["007", "2024-02-29"]),
}
UNFILTERED = "filters cannot name 'price' (decimal128(38, 2)); the values are kept and shown"


@contextmanager
def serving(root, folder):
    with starter() as start:
        yield start(ServeSettings(root=root, writable=True, allowed_sources=(str(folder),)))


def by_file(root, path, model):
    begin(root, model)
    with serving(root, path.parent) as server, client_over(server) as client:
        file = attached(client, "c", path.name, path.read_bytes())
        assert (file.status, file.warnings) == ("completed", [UNFILTERED])


def by_file_of_a_killed_server(root, path, model):
    """Keep a file's documents in the log alone, from which the next server publishes them."""
    begin(root, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LiveWriter, "_publish", lambda *_: time.sleep(0.01))
        writer = opened(root)
        writer.write(writer.read_file(path, ServedDocuments(None)).rows, ServedDocuments(None))
        assert writer.stop(0)
    with serving(root, path.parent) as server:
        wait_until(lambda: server.get(f"/v1/collections/c/documents/{path.stem}1").status_code == 200)


def by_source(root, path, model):
    begin(root, model)
    with serving(root, path.parent) as server:
        answer = server.post("/v1/collections/c/sources", json={"source": str(path)}, params=NOW)
        assert answer.json()["ingested"]["indexed"] == 2


def by_python(root, path, model):
    is_new = not CollectionLayout.at(root, "c").exists()
    found = Collection.create("c", root=root, model=str(model)) if is_new else open_collection("c", root=root)
    found.add(pq.read_table(path))


def begin(root, model):
    if not CollectionLayout.at(root, "c").is_begun():
        writer = opened(root)
        writer.create({"encoder": {"model": str(model)}}, {})
        writer.stop(5)


def opened(root):
    return LiveWriter(CollectionLayout.at(root, "c"), backbone=lambda: None, take_up=lambda _: None)


def stored(root):
    found = open_collection("c", root=root).documents.to_arrow().sort_by("doc_id")
    return found.select([name for name in COLUMNS if name in found.schema.names])


@pytest.mark.parametrize("door", [by_file, by_file_of_a_killed_server, by_source, by_python])
def test_values_of_files_keep_their_types_by_every_door(tmp_path, tiny_model_folder, door):
    others = {"time_ms": COLUMNS["time_ms"].cast(pa.timestamp("us")), "u64": pa.array([1, 2], pa.uint8())}
    expected = []
    for name, columns in (("a", COLUMNS), ("b", {**COLUMNS, **others})):
        rows = pa.table({"id": [f"{name}0", f"{name}1"], "text": ["a slate", "an agate"], **columns})
        pq.write_table(rows, tmp_path / f"{name}.parquet")
        door(tmp_path / "root", tmp_path / f"{name}.parquet", tiny_model_folder)
        expected.append(rows.select([*COLUMNS]).cast(pa.table(COLUMNS).schema))
        assert stored(tmp_path / "root").equals(pa.concat_tables(expected))


def test_texts_of_json_take_the_type_of_their_column_and_else_stay_texts(tmp_path, tiny_model_folder):
    rows = pa.table({"id": ["a0", "a1"], "text": ["a slate", "an agate"], **COLUMNS})
    pq.write_table(rows, tmp_path / "a.parquet")
    by_python(tmp_path / "root", tmp_path / "a.parquet", tiny_model_folder)
    values = rows.select([*COLUMNS]).slice(0, 1)
    for name in ("time_ms", "time_ns", "zoned", "price"):
        values = values.set_column(values.schema.get_field_index(name), name, values[name].cast(pa.string()))
    sent = json.loads(json.dumps(values.to_pylist()[0], default=str))
    document = {"doc_id": "b", "text": "a slate", "metadata": {**sent, "new": "2024-02-29"}}
    with serving(tmp_path / "root", tmp_path) as server:
        address = "/v1/collections/c/documents"
        assert server.post(address, json={"documents": [document]}, params=NOW).json()["warnings"] == [
            UNFILTERED
        ]
        answer = server.patch(f"{address}/a0", json={"metadata": {"i8": 5, "f32": 2}}, params=NOW)
        assert answer.status_code == 200, answer.json()
    found = stored(tmp_path / "root")
    assert found.slice(2, 1).equals(rows.select([*COLUMNS]).slice(0, 1))
    changed, before = found.slice(0, 1), rows.select([*COLUMNS]).slice(0, 1)
    assert (changed["i8"].to_pylist(), changed["f32"].to_pylist()) == ([5], [2.0])
    assert changed.drop_columns(["i8", "f32"]).equals(before.drop_columns(["i8", "f32"]))
    new = open_collection("c", root=tmp_path / "root").documents.to_arrow().sort_by("doc_id")["new"]
    assert (new.type, new.to_pylist()) == (pa.string(), [None, None, "2024-02-29"])
