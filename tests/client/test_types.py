"""Values keep their types over HTTP: of tables, of rows of Python, and of JSON that names them."""

from __future__ import annotations

import datetime as dt
import time
from contextlib import contextmanager
from decimal import Decimal
from zoneinfo import ZoneInfo

import httpx2
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from cairn.pipeline.client.clients import CairnClient
from cairn.pipeline.collection import Collection, open_collection
from cairn.pipeline.errors import UsageError
from cairn.pipeline.line.live import LiveWriter
from cairn.pipeline.serve.writers import ServedDocuments
from cairn.pipeline.types import RESERVED_COLUMNS

from tests.serve.test_values import COLUMNS, NOW, begin, opened, serving, stored
from tests.served_stones import wait_until

DOCUMENTS = "/v1/collections/c/documents"
NOON = dt.datetime(2024, 2, 29, 12, 0, 0, 250)  # noqa: DTZ001 (a column without a zone)
BERLIN = NOON.replace(tzinfo=ZoneInfo("Europe/Berlin"))
TYPES = {
    "day": "date32[day]",
    "at": "timestamp[ms]",
    "fine": "timestamp[ns]",
    "zoned": "timestamp[us, tz=Europe/Berlin]",
    "price": "decimal128(10, 2)",
    "count": "int8",
    "days": "list[date32[day]]",
    "prices": "list[decimal128(5, 1)]",
    "none": "int64",
}
VALUES = {
    "day": "2024-02-29",
    "at": "2024-02-29T12:00:00.25",
    "fine": "2024-02-29 12:00:00.123456789",
    "zoned": "2024-02-29T12:00:00+01:00",
    "price": 12.5,
    "count": "-7",
    "days": ["2024-02-29", None],
    "prices": "0.5",
    "other": [1, 2.5],
    "long": [2**53 + 1, 0.5],
    "empty": [],
}
READ = {
    "day": dt.date(2024, 2, 29),
    "at": NOON.replace(microsecond=250_000),
    "zoned": BERLIN.replace(microsecond=0),
    "price": Decimal("12.50"),
    "count": -7,
    "days": [dt.date(2024, 2, 29), None],
    "prices": [Decimal("0.5")],
    "none": None,
    "other": [1.0, 2.5],
    "long": ["9007199254740993", "0.5"],
}


@contextmanager
def client_over(server):
    def send(request):
        headers = {name: value for name, value in request.headers.items() if name != "host"}
        content = request.read()
        answer = server.request(request.method, str(request.url), content=content or None, headers=headers)
        return httpx2.Response(answer.status_code, headers=dict(answer.headers), content=answer.content)

    with CairnClient(transport=httpx2.MockTransport(send)) as client:
        yield client.collection("c")


@pytest.fixture
def server(tmp_path, tiny_model_folder):
    begin(tmp_path / "root", tiny_model_folder)
    with serving(tmp_path / "root", tmp_path) as started:
        yield started


def document(doc_id, **metadata):
    return {"doc_id": doc_id, "text": "a slate", "metadata": metadata}


def metadata_of(root):
    found = open_collection("c", root=root).documents.to_arrow().sort_by("doc_id")
    return found.select([name for name in found.schema.names if name not in RESERVED_COLUMNS])


def others():
    """The columns of a second table, some of other types than those of the first, and more."""
    return {
        **COLUMNS,
        "time_ms": COLUMNS["time_ms"].cast(pa.timestamp("us")),
        "i8": pa.array([1, 2]),
        "old": pa.array([-5_364_662_400, None], pa.timestamp("s", "Europe/Berlin")),  # by 53 min 28 s
        "pair": pa.array([[1, 2], None], pa.list_(pa.int8(), 2)),
        "words": pa.array([["a"], None], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
    }


ROWS = [
    {"day": dt.date(2024, 2, 29), "at": NOON, "zoned": BERLIN, "price": Decimal("12.50"), "n": 1},
    {"day": None, "at": NOON, "zoned": BERLIN.astimezone(dt.UTC), "price": Decimal("0.125"), "n": 2.5},
    {"days": (dt.date(2024, 2, 29),), "either": NOON.date(), "clock": NOON, "mixed": [1, "a"]},
    {"days": [], "either": NOON, "clock": BERLIN, "object": {"a": 1}, "flag": True},
]
OBJECTS = {
    "mixed": pd.Series([1, "a"], dtype=object),
    "day": pd.Series([dt.date(2024, 2, 29), np.nan], dtype=object),
    "lists": [[1], []],
    "empty": [[], []],
    "time": pd.Series([pd.Timestamp("2024-02-29 12:00:00.123456789"), pd.NaT]),
    "count": pd.Series([1, None], dtype="Int8"),
}


@pytest.mark.parametrize(
    "batches",
    [
        [pa.table({"id": [f"{name}0", f"{name}1"], "text": ["a slate", "an agate"], **columns})
         for name, columns in (("a", COLUMNS), ("b", others()))],
        [[{"id": f"{place}", "text": "a slate", **row} for place, row in enumerate(ROWS)]],
        [pd.DataFrame({"id": ["a", "b"], "text": ["a slate", "an agate"], **OBJECTS})],
    ],
    ids=["tables", "rows", "objects"],
)  # fmt: skip
def test_documents_have_the_columns_over_http_that_they_have_in_python(
    server, tmp_path, tiny_model_folder, batches
):
    local = Collection.create("c", root=tmp_path / "local", model=str(tiny_model_folder))
    with client_over(server) as remote:
        for batch in batches:
            local.add(batch)
            remote.add(batch)
    expected, found = metadata_of(tmp_path / "local"), metadata_of(tmp_path / "root")
    assert sorted(map(str, found.schema)) == sorted(map(str, expected.schema))
    for name in set(expected.schema.names) - {"either", "clock"}:
        assert found[name].equals(expected[name]), name
    if "either" in found.schema.names:  # values of several kinds are texts, as each of the two writes them
        assert found["either"].to_pylist()[2:] == ["2024-02-29", "2024-02-29T12:00:00.000250"]


def test_json_is_read_as_the_types_that_it_names(server, tmp_path):
    body = {"types": TYPES, "documents": [document("a", **VALUES), document("b", null=None)]}
    answer = server.post(DOCUMENTS, json=body, params=NOW)
    assert answer.status_code == 200, answer.json()
    assert [each for each in answer.json()["warnings"] if "'null'" in each] == []
    found = metadata_of(tmp_path / "root")
    assert {name: str(found.schema.field(name).type) for name in TYPES} == {
        **TYPES,
        "days": "list<item: date32[day]>",
        "prices": "list<item: decimal128(5, 1)>",
    }
    first, second = found.drop_columns("fine").to_pylist()
    assert first == READ
    assert set(second.values()) == {None}
    assert found["fine"].cast(pa.string()).to_pylist() == ["2024-02-29 12:00:00.123456789", None]


@pytest.mark.parametrize(
    ("types", "metadata", "told"),
    [
        ({"day": "date32[day]"}, {"day": "soon"}, "column 'day' must hold date32[day], got string"),
        ({"n": "int8"}, {"n": 300}, "column 'n' must hold int8, got int64 that does not fit"),
        ({"n": "decimal128(4, 2)"}, {"n": "1.005"}, "column 'n' must hold decimal128(4, 2), got string"),
        ({"at": "timestamp[us]"}, {"at": "2024-02-29T12:00:00Z"}, "column 'at' must hold timestamp[us], got"),
        (
            {"days": "list[date32[day]]"},
            {"days": ["2024-02-30"]},
            "column 'days' must hold list<item: date32",
        ),
        ({"text": "string"}, {}, "metadata must not have Cairn's own name text"),
        ({"n": "integer"}, {"n": 1}, "the type of column 'n' must be one such as string, int64, double"),
        ({"n": "struct"}, {"n": 1}, "the type of column 'n' must be one such as"),
        ({"n": "timestamp[us, tz=Nowhere/City]"}, {"n": 1}, "the type of column 'n' must be one such as"),
        ({"n": "decimal128(99, 2)"}, {"n": 1}, "the type of column 'n' must be one such as"),
        ({"n": f"decimal128({10**20}, 2)"}, {"n": 1}, "the type of column 'n' must be one such as"),
        ({"n": "decimal128(5, 6)"}, {"n": None}, "the type of column 'n' must be one such as"),
    ],
)
def test_values_that_do_not_fit_and_types_that_are_none_are_named_and_nothing_is_stored(
    server, types, metadata, told
):
    body = {"types": types, "documents": [document("a"), document("b", **metadata)]}
    answer = server.post(DOCUMENTS, json=body, params=NOW)
    assert answer.status_code == 422
    problem = answer.json()
    sentences = [each["detail"] for each in problem.get("errors", ())] or [problem["detail"]]
    assert sentences[0].startswith(told)
    assert "retype" not in sentences[0]
    if told.startswith("column"):
        assert [each["pointer"] for each in problem["errors"]] == ["#/documents/1"]
    assert server.get(f"{DOCUMENTS}/a").status_code in (404, 409)


def test_types_of_columns_that_there_are_fit_them_as_those_of_files_do(server, tmp_path):
    first = {"types": {"n": "int8", "day": "date32[day]", "code": "string"}}
    first["documents"] = [document("a", n=1, day="2024-02-29", code="007")]
    assert server.post(DOCUMENTS, json=first, params=NOW).status_code == 200
    second = {"types": {"n": "int64", "day": "timestamp[s]", "code": "int64"}}
    second["documents"] = [document("b", n=2, day="2024-02-29T00:00:00", code=8)]
    assert server.post(DOCUMENTS, json=second, params=NOW).status_code == 200
    found = metadata_of(tmp_path / "root").to_pylist()
    assert found[1] == {"n": 2, "day": dt.date(2024, 2, 29), "code": "8"}
    for name, value in (("n", 300), ("day", "2024-02-29T12:00:00")):
        body = {"types": second["types"], "documents": [document("c", **{name: value})]}
        answer = server.post(DOCUMENTS, json=body, params=NOW)
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["detail"].startswith(f"column {name!r} must hold")


def test_frames_that_arrow_does_not_take_are_refused_before_anything_is_sent(server):
    frame = pl.DataFrame({"id": ["a"], "text": ["a slate"], "n": pl.Series([1], dtype=pl.Int128)})
    with client_over(server) as remote, pytest.raises(UsageError, match="must be what Arrow takes, got"):
        remote.add(frame)


def test_types_are_a_part_of_the_request_that_a_key_names(server):
    body = {"types": {"n": "int8"}, "documents": [document("a", n=1)]}
    headers = {"Idempotency-Key": "types"}
    first, again = (server.post(DOCUMENTS, json=body, params=NOW, headers=headers) for _ in range(2))
    assert first.json()["write"] == again.json()["write"]
    other = server.post(DOCUMENTS, json={**body, "types": {"n": "int16"}}, params=NOW, headers=headers)
    assert other.json()["type"].endswith(":key-reused")


def test_types_outlive_a_kill_in_the_log(tmp_path, tiny_model_folder):
    root = tmp_path / "root"
    begin(root, tiny_model_folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LiveWriter, "_publish", lambda *_: time.sleep(0.01))
        writer = opened(root)
        writer.write([{"title": None, **document("a", **VALUES)}], ServedDocuments(None), types=TYPES)
        assert writer.stop(0)
    with serving(root, tmp_path) as server:
        wait_until(lambda: server.get(f"{DOCUMENTS}/a").status_code == 200)
    assert metadata_of(root).drop_columns("fine").to_pylist() == [READ]
    assert stored(root).schema.field("day").type == pa.date32()
