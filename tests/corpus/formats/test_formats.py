"""Sources that are no Parquet: the same rows of each format, and the same guarantees."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.scan import read_checked, scan_sources
from cairn.pipeline.errors import SchemaError, SourceError, TryAgainError
from pyarrow import csv

from tests.corpus.checked_rows import read, reasons

ROWS = [
    {"id": "a", "title": "First", "text": "a text, with a comma", "year": 2020, "score": 1.0, "on": True},
    {"id": "b", "title": None, "text": 'a "quoted"\nsecond line', "year": None, "score": 2.5, "on": False},
    {"id": "c", "title": "", "text": "ünï", "year": -3, "score": None, "on": None},
]
TABLE = pa.Table.from_pylist(ROWS)


def write_json(path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))


def write_stream(path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=2)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "rows.jsonl": write_json,
    "rows.jsonl.gz": lambda path: path.write_bytes(
        gzip.compress("".join(json.dumps(row) + "\n" for row in ROWS).encode())
    ),
    "rows.csv": lambda path: csv.write_csv(TABLE, path),
    "rows.tsv": lambda path: csv.write_csv(TABLE, path, csv.WriteOptions(delimiter="\t")),
    "rows.feather": lambda path: pyarrow.feather.write_feather(TABLE, path),
    "rows.arrow": write_stream,
    "rows.parquet": lambda path: pq.write_table(TABLE, path),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("batch_rows", [1, 2, 1_024])
def test_rows_are_the_same_in_every_format(tmp_path: Path, name: str, batch_rows: int) -> None:
    WRITERS[name](tmp_path / name)
    rows, rejected = read(tmp_path, config=CorpusConfig(batch_rows=batch_rows))
    own = [{key: row[key] for key in ("doc_id", "title", "text", "year", "score", "on")} for row in rows]
    assert own == [{"doc_id": row["id"], **{k: v for k, v in row.items() if k != "id"}} for row in ROWS]
    assert rejected == []


def test_damaged_lines_are_quarantined_and_the_others_read(tmp_path: Path) -> None:
    lines = [
        b'{"id": "a", "text": "x"}',
        b"",
        b'{"id": "b", "text": ',
        b"[1]",
        b'{"id": "\xff", "text": "x"}',
    ]
    lines += [
        b"[" * 100_000,
        b'{"id": "c", "text": "' + b"x" * (3 << 20) + b'"}',
        b'{"id": "d", "text": "\\ud800"}',
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([*lines, b'{"id": 5, "text": "last", "n": NaN}']))
    config = CorpusConfig(max_document_bytes=20)
    rows, rejected = read(tmp_path, config=config)
    assert [row["doc_id"] for row in rows] == ["a"]
    assert reasons(rejected) == [
        (1, "damaged_rows"),
        (2, "damaged_rows"),
        (3, "damaged_rows"),
        (4, "damaged_rows"),
        (5, "damaged_rows"),
        (6, "lone_surrogate"),
        (7, "nan_metadata"),
    ]
    assert "line 3 is not JSON" in rejected[0]["detail"]
    assert rejected[4]["detail"] == "line 7 has more than 80 bytes"


def test_values_of_several_kinds_become_texts_and_objects_are_left_out(tmp_path: Path) -> None:
    rows = [
        {"id": 1, "text": "x", "code": 7, "tags": ["a", 1], "size": 1, "big": 2**70, "deep": {"x": 1}},
        {"id": "b", "text": "y", "code": "q", "tags": None, "size": 0.5, "big": True, "deep": None},
        {"id": 2.5, "text": "z"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "b.jsonl").write_text("")
    found, rejected = read(tmp_path)
    assert rejected == []
    assert [row["doc_id"] for row in found] == ["1", "b", "2.5"]
    kept = [{name: row[name] for name in ("code", "tags", "size", "big")} for row in found]
    assert kept == [
        {"code": "7", "tags": ["a", "1"], "size": 1.0, "big": str(2**70)},
        {"code": "q", "tags": None, "size": 0.5, "big": "true"},
        {"code": None, "tags": None, "size": None, "big": None},
    ]
    scan = scan_sources([str(tmp_path)], CorpusConfig())
    (warning,) = scan.warnings
    why = "it holds objects or nested lists; it is left out"
    assert warning == f"column 'deep' of {tmp_path}/a.jsonl cannot be stored: {why}"


def test_files_without_types_agree_on_one_that_holds_all(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,text,code,zip\n1,x,5,01\n")
    (tmp_path / "b.csv").write_text("id;text;code;zip\nb;y;five;02\n")
    rows, _ = read(tmp_path)
    assert [(row["doc_id"], row["code"], row["zip"]) for row in rows] == [
        ("1", "5", "01"),
        ("b", "five", "02"),
    ]
    (tmp_path / "c.csv").write_text("id,text,code\n1,x,5\n")
    with pytest.raises(SchemaError, match=r"column 'zip' must be in every file, got none in .*c\.csv"):
        scan_sources([str(tmp_path)], CorpusConfig())
    (tmp_path / "c.csv").write_text("id,text,id\n1,x,5\n")
    with pytest.raises(SchemaError, match=r"'id' more than once in .*c\.csv"):
        scan_sources([str(tmp_path / "c.csv")], CorpusConfig())


def test_damaged_rows_of_csv_are_quarantined(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'id,text\na,x\nb\nc,\xff\nd,""\ne,\nf,y,z\n,none\ng,"open\nh,x\n')
    rows, rejected = read(tmp_path)
    assert [row["doc_id"] for row in rows] == ["a", "g"] or [row["doc_id"] for row in rows] == ["a"]
    assert sorted(row["reason"] for row in rejected if row["reason"] != "damaged_rows") == [
        "empty_text",
        "invalid_utf8",
        "null_id",
        "null_text",
    ]
    details = [row["detail"] for row in rejected if row["reason"] == "damaged_rows"]
    assert "row 3 must have 2 fields, got 1" in details
    assert "row 7 must have 2 fields, got 3" in details


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_a_file_that_changes_between_the_count_and_the_reading_loses_no_row(
    tmp_path: Path, name: str
) -> None:
    path = tmp_path / name
    lines = {
        "rows.jsonl": [f'{{"id": "{each}", "text": "x"}}\n' for each in "abc"],
        "rows.csv": ["id,text\n", "a,x\n", "b,x\n"],
    }[name]
    path.write_text("".join(lines[:2]))
    scan = scan_sources([str(path)], CorpusConfig())
    for changed in (lines[:1], lines):
        path.write_text("".join(changed))
        with pytest.raises(TryAgainError, match=f"{name} must not change while it is read, got"):
            list(read_checked(scan, CorpusConfig()))


def test_keys_and_values_that_no_column_can_hold_cost_at_most_their_row(tmp_path: Path) -> None:
    lines = [
        '{"id": "a", "text": "x", "deep": ' + "[" * 700 + "]" * 700 + "}",
        '{"\\ud800": 1}',
        '{"id": "b", "text": "y", "deep": [1]}',
    ]
    (tmp_path / "rows.JSONL.GZ").write_bytes(gzip.compress("\n".join(lines).encode()))
    rows, rejected = read(tmp_path)
    assert [row["doc_id"] for row in rows] == ["a", "b"]
    assert reasons(rejected) == [(1, "damaged_rows")]
    assert rejected[0]["detail"] == "line 2 has a key that is not valid Unicode"


def test_files_without_columns_or_with_too_many_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n[1]\n")
    (tmp_path / "0.jsonl").write_text("")
    with pytest.raises(SourceError, match=r"must have columns, got none in any row of .*a\.jsonl"):
        scan_sources([str(tmp_path)], CorpusConfig())
    path.write_text("".join(json.dumps({f"{row}-{n}": n for n in range(101)}) + "\n" for row in range(100)))
    with pytest.raises(SourceError, match=r"a\.jsonl is not .*: a file must have at most 10000 columns"):
        scan_sources([str(path)], CorpusConfig())
    (tmp_path / "a.csv").write_bytes(b"id,text\ra,x\rb,y")
    with pytest.raises(SourceError, match="its header cannot be read: new-line character"):
        scan_sources([str(tmp_path / "a.csv")], CorpusConfig())


@pytest.mark.parametrize("name", ["rows.feather", "rows.arrow", "rows.jsonl.gz"])
def test_a_file_cut_short_is_damaged_and_no_row_is_lost_count_of(tmp_path: Path, name: str) -> None:
    WRITERS["rows.csv"](tmp_path / "whole.csv")
    path = tmp_path / name
    WRITERS[name](path)
    whole = path.read_bytes()
    for size in range(1, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:size])
        rows, rejected = read(tmp_path / "whole.csv", path)
        damaged = [row for row in rejected if row["reason"] in ("damaged_rows", "damaged_file")]
        assert damaged, size
        assert len(rows) >= 3, size


def test_flipped_bytes_of_arrow_files_end_no_process(tmp_path: Path) -> None:
    WRITERS["rows.csv"](tmp_path / "whole.csv")
    for name in ("rows.feather", "rows.arrow"):
        path = tmp_path / name
        WRITERS[name](path)
        whole = path.read_bytes()
        for place in range(0, len(whole), 7):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
            try:
                rows, _ = read(tmp_path / "whole.csv", path)
            except SchemaError:
                continue
            assert len(rows) >= 3, (name, place)


@pytest.mark.parametrize("name", ["a.feather", "a.arrow"])
def test_batches_of_arrow_are_bounded_and_only_wanted_columns_decoded(tmp_path: Path, name: str) -> None:
    wide = pa.array(["x" * (1 << 20)] * 8)
    table = pa.table({"wide": wide, "text": ["t"] * 8, "id": list("abcdefgh")})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    create = pa.ipc.new_file if name == "a.feather" else pa.ipc.new_stream
    with (
        pa.OSFile(str(tmp_path / name), "wb") as sink,
        create(sink, table.schema, options=options) as writer,
    ):
        writer.write_table(table, max_chunksize=4)
    config = CorpusConfig(metadata_columns=())
    scan = scan_sources([str(tmp_path)], config)
    types = {"id": pa.string(), "text": pa.string()}
    before = pa.total_allocated_bytes()
    for batch in scan.files[0].format.read(scan.files[0], types, config):
        assert isinstance(batch, pa.RecordBatch)
        assert pa.total_allocated_bytes() - before < 1 << 20
    assert len(read(tmp_path, config=config)[0]) == 8
    small = CorpusConfig(batch_bytes=1 << 10, max_document_bytes=2_000)
    rows, rejected = read(tmp_path, config=small)
    assert rows == []
    assert reasons(rejected) == [(row, "damaged_rows") for row in range(8)]
    assert "column 'wide' holds" in rejected[0]["detail"]


def test_text_files_are_documents_with_titles(tmp_path: Path) -> None:
    files = {
        "guide/a.md": "Intro\n\n## Reset a password ##\n\nOpen the settings.\n",
        "guide/b.md": "---\nlayout: page\ntitle: 'Invoices'\n---\n# Other\n\ntext",
        "c.txt": "# no heading in plain text",
        "d.markdown": "\ufeffUnderlined\n===\n\nbody",
        "e.md": "---\ntitle:\n---\n#\n# ##\r\n## C and more #\r\n",
        "f.md": "====\n#tag\n\n  ===\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(text.encode())
    (tmp_path / "bad.md").write_bytes(b"caf\xe9")
    (tmp_path / "empty.md").write_bytes(b"")
    (tmp_path / "large.md").write_bytes(b"x" * 101)
    rows, rejected = read(tmp_path, config=CorpusConfig(max_document_bytes=100))
    assert {row["doc_id"]: row["title"] for row in rows} == {
        "c.txt": "c",
        "d.markdown": "Underlined",
        "e.md": "C and more",
        "f.md": "f",
        "guide/a.md": "Reset a password",
        "guide/b.md": "Invoices",
    }
    texts = {name: text.removeprefix("\ufeff") for name, text in files.items()}
    texts |= {"guide/b.md": "# Other\n\ntext", "e.md": "#\n# ##\r\n## C and more #\r\n"}
    assert {row["doc_id"]: row["text"] for row in rows} == texts
    assert {row["doc_id"]: row["reason"] for row in rejected} == {
        "bad.md": "invalid_utf8",
        "empty.md": "empty_text",
        "large.md": "oversized_text",
    }
    (row,), _ = read(tmp_path / "guide" / "a.md")
    assert row["doc_id"] == "a.md"


def test_html_keeps_headings_and_leaves_out_scripts_and_navigation(tmp_path: Path) -> None:
    page = (
        "<html><head><meta charset=latin-1><title> Reset \n a password</title><style>x</style></head><body>"
        "<nav>Home</nav><main><h1>Reset</h1><p>Open <b>settings</b>, caf\xe9.</p><h2>Steps</h2>"
        "<ul><li>one</li><li>two</li></ul><script>alert(1)</script></main><footer>2026</footer></body></html>"
    )
    (tmp_path / "a.html").write_bytes(page.encode("latin-1"))
    (tmp_path / "b.htm").write_text("<p>only text")
    (tmp_path / "deep.html").write_text("<div>" * 20_000 + "x")
    rows, rejected = read(tmp_path)
    assert [(row["doc_id"], row["title"]) for row in rows] == [("a.html", "Reset a password"), ("b.htm", "b")]
    assert rows[0]["text"] == "# Reset\n\nOpen **settings**, café.\n\n## Steps\n\n- one\n- two"
    assert reasons(rejected) == [(0, "damaged_rows")]


def test_html_leaves_out_header_footer_and_navigation_of_a_page_without_main(tmp_path: Path) -> None:
    page = (
        "<body><header>Logo</header><header><h1>Reset</h1></header><div role=navigation>Home</div>"
        "<p>Text.</p><section><p>More.</p><footer>Source: X</footer></section>"
        "<div role=contentinfo>2026</div><footer>Imprint</footer></body>"
    )
    (tmp_path / "a.html").write_text(page)
    ((row,), _) = read(tmp_path)
    assert row["text"] == "# Reset\n\nText.\n\nMore.\n\nSource: X"


@pytest.mark.parametrize("markup", ["<![foo[bar]]>", "<![ CDATA[", "<![1]>"])
def test_html_that_no_parser_takes_is_quarantined_and_the_others_read(tmp_path: Path, markup: str) -> None:
    (tmp_path / "bad.html").write_text(f"<p>text</p>{markup}<p>more</p>")
    (tmp_path / "good.html").write_text("<p>text</p>")
    rows, rejected = read(tmp_path)
    assert [row["doc_id"] for row in rows] == ["good.html"]
    assert [(row["reason"], row["detail"]) for row in rejected] == [
        ("damaged_rows", "its markup cannot be parsed")
    ]


@pytest.mark.parametrize(
    ("name", "start", "unit"),
    [
        ("a.md", "# x", " "),
        ("a.md", "# x", " #"),
        ("a.md", "x", "\n"),
        ("a.md", "x", " \n"),
        ("a.md", "---\ntitle: x", " "),
        ("a.html", "<p>x", " "),
        ("a.html", "<pre>x", " \n"),
    ],
)
def test_time_grows_with_the_length_of_a_document(tmp_path: Path, name: str, start: str, unit: str) -> None:
    def seconds(size: int) -> float:
        (tmp_path / name).write_text(start + unit * (size // len(unit)) + "x")
        begin = time.process_time()
        assert len(read(tmp_path)[0]) == 1
        return time.process_time() - begin

    seconds(1_000)  # what is loaded once
    assert seconds(1 << 20) < 16 * max(seconds(1 << 17), 0.05)  # quadratic time: 64 times


def test_a_folder_is_read_as_the_first_kind_it_holds(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Notes beside data")
    assert [row["doc_id"] for row in read(tmp_path)[0]] == ["README.md"]
    WRITERS["rows.csv"](tmp_path / "rows.csv")
    assert len(read(tmp_path)[0]) == 3
    (tmp_path / "rows.jsonl").write_text('{"id": "j", "text": "x"}')
    (tmp_path / "cache-1.arrow").write_text("what a library left")
    assert [row["doc_id"] for row in read(tmp_path)[0]] == ["j"]
    assert [row["doc_id"] for row in read(tmp_path / "*.md")[0]] == ["README.md"]
    (tmp_path / "none").mkdir()
    with pytest.raises(SourceError, match="holds no file that can be read"):
        scan_sources([str(tmp_path / "none")], CorpusConfig())
