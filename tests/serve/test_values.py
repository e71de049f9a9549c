"""Values of any type: kept by every door into a collection, and served and filtered on every surface."""

from __future__ import annotations

import datetime as dt
import json
import random
import time
from contextlib import contextmanager
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from cairn.cli.main import cairn, run
from cairn.pipeline.collection import Collection, open_collection
from cairn.pipeline.corpus.schema import stored_name
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.live import LiveWriter
from cairn.pipeline.serve.answers import json_value
from cairn.pipeline.serve.settings import ServeSettings
from cairn.pipeline.serve.writers import ServedDocuments
from cairn.pipeline.types import is_filterable

from tests.serve.conftest import starter
from tests.serve.test_openai_routes import attached, client_over
from tests.served_stones import wait_until
from tests.small_ingests import settings

NAMES = [
    "Übung", "with space", " lead", "a-b", "select", "a'b", 'a"b', "[a]", "{a", "$a", "😀", "x" * 300, "a,b",
    "a=b", "a>b", "doc_id", "_rowid", "_distance", "line\nbreak", "\x1b[1m", "NULL", "1", "true", "key",
    "filters", "count(*)", "a\\b", "%s", "vector", "source_file",
]  # fmt: skip
NOT_STORED = ["a.b", "a`b", "", "nul\0"]
ZONES = [None, "UTC", "Europe/Berlin", "+05:30", "America/New_York"]
SCALARS = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint32(), pa.uint64()),
    *(pa.float16(), pa.float32(), pa.float64(), pa.bool_(), pa.string(), pa.large_string(), pa.string_view()),
    *(pa.dictionary(pa.int8(), pa.string()), pa.date32(), pa.date64(), pa.decimal32(7, 2)),
    *(pa.decimal128(12, 2), pa.decimal256(50, 2)),
    *(pa.timestamp(unit, zone) for unit in ("s", "ms", "us", "ns") for zone in ZONES),
]
NOT_KEPT = [pa.time64("us"), pa.duration("s"), pa.binary(), pa.struct([("a", pa.int8())]), pa.null()]
TEXTS = [
    "",
    " ",
    "plain",
    "it's",
    'a"b',
    "%_\\",
    "\x1b]0;x\x07",
    "😀",
    "null",
    "1e5",
    "True",
    "a\nb",
    "x" * 900,
]
YEARS = (-719_162, 2_932_896)
"""Days of the first and the last year that can be shown."""


def drawn(kind, draw, size):
    """Return values of a type, among them its least and its greatest, and nulls."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        rows = [drawn(kind.value_type, draw, draw.randrange(4)).drop_null() for _ in range(size)]
        ends = [sum(map(len, rows[:place])) for place in range(size + 1)]
        made = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
        return made.from_arrays(ends, pa.concat_arrays([pa.array([], kind.value_type), *rows]))
    if pa.types.is_dictionary(kind):
        return drawn(pa.string(), draw, size).dictionary_encode().cast(kind)
    if pa.types.is_temporal(kind) and not (pa.types.is_time(kind) or pa.types.is_duration(kind)):
        is_west = getattr(kind, "tz", None) == "America/New_York"  # where the first day begins in the year 0
        days = (-106_000, 106_000) if getattr(kind, "unit", "") == "ns" else (YEARS[0] + is_west, YEARS[1])
        found = pa.array([draw.choice([*days, draw.randint(*days)]) for _ in range(size)], pa.int32())
        column = found.cast(pa.date32()).cast(kind if pa.types.is_date(kind) else pa.timestamp(kind.unit))
        column = column if pa.types.is_date(kind) else column.cast(pa.int64()).cast(kind)
    elif pa.types.is_integer(kind):
        bits, least = (
            kind.bit_width,
            0 if pa.types.is_unsigned_integer(kind) else -(2 ** (kind.bit_width - 1)),
        )
        values = [least, least + 2**bits - 1, 1]
        column = pa.array([draw.choice(values) for _ in range(size)], kind)
    elif pa.types.is_boolean(kind):
        column = pa.array([draw.random() < 0.5 for _ in range(size)])
    elif pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        column = pa.array([draw.choice([0.5, -0.25, 1024.0]) for _ in range(size)]).cast(kind)
    elif pa.types.is_struct(kind) or pa.types.is_null(kind):
        return pa.nulls(size, kind) if pa.types.is_null(kind) else pa.array([{"a": 1}] * size, kind)
    elif pa.types.is_time(kind) or pa.types.is_duration(kind):
        column = pa.array([draw.randrange(9) for _ in range(size)], pa.int64()).cast(kind)
    else:
        return pa.array([draw.choice([*TEXTS, None]) for _ in range(size)], pa.string()).cast(kind)
    return pc.if_else(pa.array([draw.random() < 0.8 for _ in range(size)]), column, pa.scalar(None, kind))


@pytest.mark.parametrize("seed", [0, 1])
def test_what_was_accepted_is_served_and_filtered_on_every_surface(
    tmp_path, tiny_model_folder, serve, capsys, seed
):
    draw, size = random.Random(seed), 5
    kinds = draw.sample(SCALARS, 20) + [pa.list_(kind) for kind in draw.sample(SCALARS, 8)]
    kinds += [pa.large_list(pa.int16()), *draw.sample(NOT_KEPT, 3)]
    names = draw.sample(NAMES, len(NAMES))
    columns = {name: drawn(kind, draw, size) for name, kind in zip(names, kinds, strict=False)}
    columns |= {name: drawn(pa.int64(), draw, size) for name in NOT_STORED}
    ids = [f"row {number}" for number in range(size)]
    texts = [f"the old cat walks path number {number}" for number in range(size)]
    pq.write_table(pa.table({"id": ids, "text": texts, **columns}), tmp_path / "a.parquet")
    config = settings(tiny_model_folder, num_clusters=1, context_documents=2, use_context=False)
    report = build_index([str(tmp_path / "a.parquet")], tmp_path / "root", "c", config)
    assert (report.indexed, report.quarantined) == (size, 0)
    found = open_collection("c", root=tmp_path / "root")
    stored = {document.doc_id: dict(document.metadata) for document in found.documents}
    kept = set(stored["row 0"])
    assert not kept & {*NOT_STORED}
    for name, column in columns.items():
        own = stored_name(name)
        if own not in kept:
            assert any(repr(name) in warning for warning in report.warnings), name
            continue
        expected = column
        if "ns" in str(column.type):
            unit = pa.timestamp("us", getattr(column.type, "value_type", column.type).tz)
            is_list = pa.types.is_list(column.type)
            expected = column.cast(pa.list_(unit) if is_list else unit, safe=False)
        assert [stored[doc_id][own] for doc_id in ids] == expected.to_pylist(), (name, column.type)

    as_json = {
        doc_id: {name: json_value(each) for name, each in row.items()} for doc_id, row in stored.items()
    }
    client = serve(ServeSettings(root=tmp_path / "root"))
    for doc_id in ids:
        answer = client.get(f"/v1/collections/c/documents/{doc_id}").json()
        assert answer["metadata"] == as_json[doc_id]
    asked = dict[str, Any]()
    for field in found.documents.to_arrow().schema:
        if field.name not in kept or not is_filterable(field.type):
            continue
        is_list = pa.types.is_list(field.type)
        values = [value for row in as_json.values() if (value := row[field.name]) not in (None, [])]
        value = values and (values[0][0] if is_list else values[0])
        if not values:
            continue
        wanted = {
            doc_id for doc_id, row in as_json.items()
            if (value in (row[field.name] or []) if is_list else row[field.name] == value)
        }  # fmt: skip
        kind = "contains" if is_list else "eq"
        asked[field.name] = ({"type": kind, "key": field.name, "value": value}, wanted)
    for name, (tree, wanted) in asked.items():
        assert set(found.documents.ids(tree)) == wanted, (name, tree)
        reply = client.post("/v1/collections/c/search", json={"query": "cat", "filters": tree}).json()
        assert {hit["doc_id"] for hit in reply["hits"]} == wanted, (name, tree)
    for tree, wanted in draw.sample([*asked.values()], 3):
        words = ["search", "cat", "--collection", "c", "--root", str(tmp_path / "root")]
        assert run(cairn, [*words, "--json", "--filter", json.dumps(tree)], "cairn") == 0
        hits = json.loads(capsys.readouterr().out)["hits"]
        assert {hit["doc_id"]: hit["metadata"].keys() for hit in hits} == dict.fromkeys(wanted, kept)


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
