"""What an ingest accepted is served: columns of drawn types, names and values, over every surface."""

from __future__ import annotations

import json
import random
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from cairn.cli.main import cairn, run
from cairn.pipeline.collection import open_collection
from cairn.pipeline.corpus.schema import stored_name
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.serve.answers import json_value
from cairn.pipeline.serve.settings import ServeSettings
from cairn.pipeline.types import is_filterable

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
