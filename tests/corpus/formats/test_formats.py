"""Sources that are no Parquet: the same rows of each format, and the same guarantees."""

from __future__ import annotations

import csv
import gzip
import json
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.formats.csv import CsvFormat
from cairn.pipeline.corpus.formats.encodings import encoding_of
from cairn.pipeline.corpus.formats.format import SourceFile
from cairn.pipeline.corpus.formats.html import converted
from cairn.pipeline.corpus.scan import read_checked, scan_sources
from cairn.pipeline.errors import SchemaError, SourceError, TryAgainError
from cairn.pipeline.types import once
from pyarrow import csv as arrow_csv
from pyarrow.fs import LocalFileSystem

from tests.corpus.checked_rows import checked, read, reasons

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
    "rows.csv": lambda path: arrow_csv.write_csv(TABLE, path),
    "rows.tsv": lambda path: arrow_csv.write_csv(TABLE, path, arrow_csv.WriteOptions(delimiter="\t")),
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
    blank = None if name.endswith("sv") else ""  # CSV knows no empty text
    expected = [{**row, "title": blank if row["title"] == "" else row["title"]} for row in ROWS]
    assert own == [{"doc_id": row["id"], **{k: v for k, v in row.items() if k != "id"}} for row in expected]
    assert rejected == []


LINES = [
    b'{"id": "a", "text": "x"}',
    b"",
    b'{"id": "b", "text": ',
    b"[1]",
    b'{"id": "\xff", "text": "x"}',
    b"[" * 100_000,
    b'{"id": "c", "text": "' + b"x" * (3 << 20) + b'"}',
    b'{"id": "d", "text": "\\ud800"}',
    b'{"id": 5, "text": "last", "n": NaN}',
    b'{"\\ud800": 1}',
    b'{"id": "c", "text": "one", "text": "two"}',
    b'{"id": "e", "text": "y", "deep": ' + b"[" * 700 + b"]" * 700 + b"}",
]


def test_damaged_lines_are_quarantined_and_the_others_read(tmp_path: Path) -> None:
    (tmp_path / "rows.JSONL.GZ").write_bytes(gzip.compress(b"\n".join(LINES)))
    rows, rejected = read(tmp_path, config=CorpusConfig(max_document_bytes=400))
    assert [row["doc_id"] for row in rows] == ["a", "e"]
    assert [(row["row_index"], row["reason"], row["detail"][:44]) for row in rejected] == [
        (1, "damaged_rows", "line 3 is not JSON: Expecting value at colum"),
        (2, "damaged_rows", "line 4 must be an object, got list"),
        (3, "invalid_utf8", "column 'id' is not valid UTF-8"),
        (4, "damaged_rows", "line 6 has more than 1600 characters"),
        (5, "damaged_rows", "line 7 has more than 1600 characters"),
        (6, "invalid_utf8", "column 'text' is not valid UTF-8"),
        (7, "nan_metadata", "column 'n' holds NaN or infinity"),
        (8, "damaged_rows", "line 10 has a key that is not valid Unicode"),
        (9, "damaged_rows", "line 11 is not JSON: key 'text' stands twice"),
    ]


def test_values_of_several_kinds_become_texts_and_objects_are_left_out(tmp_path: Path) -> None:
    rows = [
        {"id": 1, "text": "x", "code": 7, "tags": ["a", 1], "size": 1, "big": 2**70, "deep": {"x": 1}},
        {"id": "b", "text": "y", "code": "q", "tags": {}, "size": 0.5, "big": True, "deep": None},
        {"id": 2.5, "text": "z"},
        {"id": {"$oid": "f"}, "text": "z"},
        {"id": "e", "text": ["z"]},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "b.jsonl").write_text("")
    found = checked(tmp_path)
    assert reasons(found.rejected) == [(None, "damaged_file"), (3, "unfit_value"), (4, "unfit_value")]
    assert "column 'text' must hold texts, got list<item: string>" in found.rejected[2]["detail"]
    assert [row["doc_id"] for row in found.rows] == ["1", "b", "2.5"]
    kept = [{name: row[name] for name in ("code", "tags", "size", "big")} for row in found.rows]
    assert kept == [
        {"code": "7", "tags": ["a", "1"], "size": 1.0, "big": str(2**70)},
        {"code": "q", "tags": None, "size": 0.5, "big": "true"},
        {"code": None, "tags": None, "size": None, "big": None},
    ]
    why = "it holds objects or nested lists"
    mixed = f"as in {tmp_path}/a.jsonl: all are kept as texts, and filters compare them as such"
    assert found.scan.warnings == (
        f"column 'code' holds numbers and texts, {mixed}",
        f"column 'tags' holds numbers and texts, {mixed}",
        f"values of column 'tags' in {tmp_path}/a.jsonl are left out: {why}",
        f"column 'big' holds booleans and integers beyond 64 bits, {mixed}",
        f"column 'deep' of {tmp_path}/a.jsonl cannot be stored: {why}; it is left out",
    )


def test_files_without_types_agree_on_one_that_holds_all(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,text,code,zip\n1,x,5,01\n")
    (tmp_path / "b.csv").write_text("id;text;code;zip\nb;y;five;02\n")
    (tmp_path / "c.jsonl").write_text('{"id": "c", "text": "z", "code": 7, "more": [1]}\n')
    rows, _ = read(tmp_path)
    assert [(row["doc_id"], row["code"], row["zip"], row["more"]) for row in rows] == [
        ("1", "5", "01", None),
        ("b", "five", "02", None),
        ("c", "7", None, [1]),
    ]
    (tmp_path / "c.csv").write_text("id,text,id\n1,x,5\n")
    with pytest.raises(SchemaError, match=r"'id' more than once in .*c\.csv"):
        scan_sources([str(tmp_path / "c.csv")], CorpusConfig())


def test_damaged_rows_of_csv_are_quarantined_where_they_stand(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(
        b'id,text\na,\xc3\xbc\nb\n\nc,\xff\nd,""\nf,y,z\n,none\n"g" x,y\nh,"two\nlines"\ni,"open\nj,x\n'
    )
    rows, rejected = read(tmp_path)
    assert [row["doc_id"] for row in rows] == ["a", "h"]
    quote = "a quote that opens in line 12"
    assert [(row["row_index"], row["reason"], row["detail"]) for row in rejected] == [
        (1, "damaged_rows", "line 3 must have 2 fields, got 1"),
        (2, "invalid_utf8", "column 'text' is not valid UTF-8"),
        (3, "null_text", "the text is null"),
        (4, "damaged_rows", "line 7 must have 2 fields, got 3"),
        (5, "null_id", "the id is null"),
        (6, "damaged_rows", "line 9 cannot be read: ',' expected after '\"'"),
        (
            8,
            "damaged_rows",
            f"{quote} is never closed: what stands behind it is not read",
        ),
    ]


@pytest.mark.parametrize(
    ("name", "end", "texts", "doubts"),
    [
        ("a.tsv", 'ends"', {"1": '"Unbalanced', "2": "second", "3": 'ends"', "4": "fourth"}, []),
        ("a.tsv", '5" ends', {"1": '"Unbalanced', "2": "second", "3": '5" ends', "4": "fourth"}, []),
        (
            "a.csv",
            'ends"',
            {"1": "Unbalanced\n2,second\n3,ends", "4": "fourth"},
            ["lines 2 to 4 are one row"],
        ),
    ],
)
def test_rows_that_a_quote_may_have_swallowed_are_told(
    tmp_path: Path, name: str, end: str, texts: dict[str, str], doubts: list[str]
) -> None:
    lines = ["id,text", '1,"Unbalanced', "2,second", f"3,{end}", "4,fourth", ""]
    (tmp_path / name).write_text("\n".join(lines).replace(",", "\t" if name == "a.tsv" else ","))
    found = checked(tmp_path)
    assert {row["doc_id"]: row["text"] for row in found.rows} == texts
    assert [each.partition(": ")[2].partition(" by")[0] for each in found.doubts] == doubts


@pytest.mark.parametrize("quote", ["", '"'])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl"])
def test_file_that_is_cut_anywhere_in_its_last_row_is_told(tmp_path: Path, name: str, quote: str) -> None:
    rows = [["id", "text"], ["1", "a stone"], ["2", "a path"]]
    delimiter = "\t" if name == "a.tsv" else ","
    lines = [delimiter.join(f"{quote}{field}{quote}" for field in row) for row in rows]
    if name == "a.jsonl":
        lines = [json.dumps(dict(zip(rows[0], row, strict=True))) for row in rows[1:]]
    stop = len(lines[-1]) + (name != "a.jsonl")  # an object that closes is whole without a line end
    for size in range(1, stop):
        (tmp_path / name).write_text("\n".join([*lines[:-1], lines[-1][:size]]))
        found = checked(tmp_path)
        assert found.doubts or "damaged_rows" in {row["reason"] for row in found.rejected}, lines[-1][:size]
    (tmp_path / name).write_text("\n".join([*lines, ""]))
    found = checked(tmp_path)
    assert found.doubts == found.rejected == []


@pytest.mark.parametrize(
    ("name", "raw"),
    [
        ("a.csv", b"id,text\r1,x\r"),
        ("a.csv", b"sep=;\r\nid;text\r\n1;x\r\n"),
        ("a.csv", b"id|text\n1|x\n"),
        ("a.csv", b"# of 2024\n# by a tool\nid,text\n1,x\n"),
        ("a.csv", b"# by a tool, in 2024; whole\n#v2\nid,text\n1,x\n"),
        ("a.csv", "# a\u2028# b\x0b# c\x0c# d\x85# e\r\nid;text\r\n1;x\r\n".encode()),
        ("a.csv", b'id, text\n1, "x"\n'),
        ("a.csv", "\ufeffid,text\n1,x\n".encode()),
        ("a.csv", "id,text\n1,x\n".encode("utf-16")),
        ("a.csv", "id,text\n1,x\n".encode("utf-16-be")),
        ("a.jsonl", '{"id": "1", "text": "x"}\n'.encode("utf-16-le")),
        ("a.jsonl", b'{"id": "1", "text": "x"}\r'),
        ("a.jsonl", '{"id": "1", "text": "x"}\r\n'.encode("utf-16")),
        ("a.jsonl", b'\x1e{"id": "1", "text": "x"}\r\n'),
        ("a.jsonl", b"\n" * (3 << 20) + b'{"id": "1", "text": "x"}'),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_dialects_are_told_by_the_file(tmp_path: Path, name: str, raw: bytes) -> None:
    (tmp_path / name).write_bytes(raw)
    rows, rejected = read(tmp_path)
    assert [(row["doc_id"], row["text"]) for row in rows] == [("1", "x")]
    assert rejected == []


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ("#text\na\nb\n", ["#text"]),
        ('# by a tool\n#id,text\n1,"x, y"\n', ["#id", "text"]),
        ("#text\n", ["#text"]),
        ("# a\x0c# b\n", ["# a\x0c# b"]),
        (f"# {'long' * 100}\n# {'b' * 150}\n# {'c' * 150}\nid,text\n", ["id", "text"]),
    ],
)
def test_header_that_looks_like_a_comment_and_comments_that_are_long_are_told_apart(
    tmp_path: Path, content: str, names: list[str]
) -> None:
    (tmp_path / "a.csv").write_text(content)
    path = str(tmp_path / "a.csv")
    file = SourceFile(filesystem=LocalFileSystem(), path=path, name=path, source=path, format=CsvFormat())
    footer = CsvFormat().read_footer(file, CorpusConfig(max_document_bytes=100))
    assert footer.schema.names == names


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1252", "L'été était très sec, et ça coûte 10 €."),
        ("cp1250", "Zażółć gęślą jaźń. Książka leży na stole."),
        ("cp1251", "Съешь же ещё этих мягких французских булок."),
        ("cp866", "Съешь же ещё этих мягких французских булок."),
        ("cp1256", "هذا نص عربي طويل بما يكفي لكي يخمن الترميز منه بشكل صحيح"),
        ("cp874", "นี่คือข้อความภาษาไทยที่ยาวพอสมควรเพื่อให้สามารถเดาการเข้ารหัสได้"),
        ("shift_jis", "日本語の文章です。これはテストです。"),
        ("cp932", "①予算の件、髙橋さんが確認します。②㈱山田へ連絡すること。"),
        ("gb18030", "①预算的事情由镕先生确认。②请联系③号㈱公司的朱镕基。"),
        ("euc_jp", "香りが良く、毎日飲めます。"),
        ("gb18030", "水獭住在河边，吃鱼。它们很会游泳。"),  # noqa: RUF001
        ("big5", "水獺住在河邊，吃魚。它們很會游泳。"),  # noqa: RUF001
        ("cp949", "수달은 강가에 살며 물고기를 먹는다."),
        ("koi8_u", "Видра живе біля річки і їсть рибу."),  # noqa: RUF001
        ("iso8859_5", "Съешь же ещё этих мягких французских булок."),
        ("cp1253", "Η βίδρα ζει κοντά στο ποτάμι."),  # noqa: RUF001
        ("cp1254", "Su samuru nehir kenarında yaşar ve balık yer."),  # noqa: RUF001
        ("cp1255", "הלוטרה חיה ליד הנהר ואוכלת דגים."),
        ("cp1257", "Ūdra gyvena prie upės ir minta žuvimis."),
        ("cp1250", "A vidra a folyó mellett él, és őszi időben is úszik."),
        ("iso8859_2", "Wydra żyje nad rzeką i łowi ryby ośmiornicą."),
        ("mac_roman", "La loutre vit près de la rivière à l'été."),
        ("cp850", "Der Otter lebt am Fluß und mag Äste und Größe für Höhlen."),
        ("iso2022_jp", "日本語の文章です。これはテストです。"),
        ("utf-16-le", "Съешь же ещё этих мягких французских булок."),
        ("utf-16-be", "L'été était très sec, et ça coûte 10 €."),
        ("utf-16-le", "每年春天候鸟会飞回北方的湖泊。 \n"),
        ("utf-16-be", "봄이면 철새가 북쪽 호수로 돌아온다 \n"),
    ],
)
def test_a_text_that_is_no_utf8_is_read_as_what_it_looks_like_and_told_of(
    tmp_path: Path, encoding: str, text: str
) -> None:
    files = {
        "a.txt": text,
        "a.md": text,
        "a.csv": f"id,text\n1,{text.rstrip()}\n".replace(", ", " "),
        "a.html": f"<p>{text}",
    }
    for name, written in files.items():
        (tmp_path / name).write_bytes(written.encode(encoding))
    (tmp_path / "b.txt").write_bytes(text.encode("utf-32"))
    found = checked(tmp_path)
    assert {row["text"].replace(",", "").rstrip() for row in found.rows} == {text.replace(",", "").rstrip()}
    assert len(found.rows) == 5
    assert {*found.encodings} == {None, encoding.replace("shift_jis", "cp932")}


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("cp1252", "It costs £100 and that’s all"),  # noqa: RUF001
        ("cp1252", "Ø 20 mm, 5 µm × 3"),  # noqa: RUF001
        ("cp1252", "cœur"),
        ("cp1250", "Łódź"),
        ("cp850", "Señor Núñez"),
        ("cp1251", "МОСКВА"),  # noqa: RUF001
        ("koi8_r", "Привет"),
        ("gb18030", "北京市"),
        ("cp949", "서울"),
    ],
)
def test_the_encoding_of_a_few_words_is_told_by_their_letters(encoding: str, text: str) -> None:
    raw = text.encode(encoding)
    assert raw.decode(encoding_of(raw)[0]) == text


@pytest.mark.parametrize(
    ("delimiter", "columns"),
    [
        (",", {"on": ("True", [True]), "off": ("FALSE", [False])}),
        (",", {"price": (".5", [0.5]), "zip": ("007", ["007"])}),
        # Beside decimal commas, a point stands between thousands.
        (";", {"price": ("1,50|2,25", ["1,50", "2,25"]), "pieces": ("1.000|12.500", ["1.000", "12.500"])}),
        (";", {"price": ("9,99 €|12", ["9,99 €", "12"]), "pieces": ("2.000|-1", ["2.000", "-1"])}),
        (";", {"price": ("9,99 €|NA", ["9,99 €", "NA"]), "pieces": ("2.000|10.000", ["2.000", "10.000"])}),
        (",", {"salary": ("85,000|92,500", ["85,000", "92,500"]), "rating": ("4.5|3.25", [4.5, 3.25])}),
        (",", {"big": (f"{2**60 + 1}|-5|9199999999999999999", [2**60 + 1, -5, 9199999999999999999])}),
        (",", {"score": ("NA|3.5|NULL", [None, 3.5, None]), "yes": ("TRUE|\\N|NA", [True, None, None])}),
        (",", {"land": ("NA|DE|FR", ["NA", "DE", "FR"]), "gone": ("NA|NA|", ["NA", "NA", None])}),
        (",", {"text": ("x|NA|y", ["x", "NA", "y"]), "note": ("n||7", ["n", None, "7"])}),
    ],
)
def test_fields_of_csv_are_values_as_programs_write_them(
    tmp_path: Path, delimiter: str, columns: dict[str, tuple[str, list[object]]]
) -> None:
    written = {name: fields.split("|") for name, (fields, _) in columns.items()}
    num_rows = len(next(iter(written.values())))
    written = {"id": [*map(str, range(num_rows))], "text": ["x"] * num_rows, **written}
    with (tmp_path / "a.csv").open("w") as file:
        csv.writer(file, delimiter=delimiter).writerows([[*written], *zip(*written.values(), strict=True)])
    rows, _ = read(tmp_path)
    assert {name: [row[name] for row in rows] for name in columns} == {
        name: kept for name, (_, kept) in columns.items()
    }


def test_columns_of_a_name_are_numbered_and_rows_of_empty_fields_are_none(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,text,x,x,x_2,x,,\n1,t,1,2,a,,,\n,,,,,,,\n,,\n\n")
    [row], rejected = read(tmp_path)
    assert (row["x"], row["x_2"], row["x_3"], rejected) == (1, "a", 2, [])


@pytest.mark.parametrize("raw", ["id text\n1 foo\n", "1,foo\n2,bar\n", "Report,\nid,text\n1,foo\n"])
def test_a_csv_that_names_no_columns_in_its_first_line_is_told_so(tmp_path: Path, raw: str) -> None:
    (tmp_path / "a.csv").write_text(raw)
    with pytest.raises(SchemaError, match="let its first line name the columns, with"):
        read(tmp_path / "a.csv")


def write_values(folder: Path, kind: str, values: Sequence[str], num_files: int) -> None:
    """Write documents with a value each, as they stand there; one of front matter has a file of its own."""
    for place in range(num_files):
        name, own = str(place), values[place::num_files]
        if kind == "csv":
            rows = "".join(f'{place}-{row},t,"{value}"\n' for row, value in enumerate(own))
            (folder / f"{name}.csv").write_text(f"id,text,v\n{rows}")
        elif kind == "jsonl":
            lines = [f'{{"id": "{name}-{row}", "text": "t", "v": {value}}}' for row, value in enumerate(own)]
            (folder / f"{name}.jsonl").write_text("\n".join(lines))
        else:
            fence, sign = {"yaml": ("---", ": "), "toml": ("+++", " = ")}[kind]
            for row, value in enumerate(own):
                (folder / f"{name}-{row}.md").write_text(f"{fence}\nv{sign}{value}\n{fence}\ntext")


@pytest.mark.parametrize("num_files", [1, 2])
@pytest.mark.parametrize("batch_rows", [1, 1_024])
@pytest.mark.parametrize(
    ("kinds", "values", "kept"),
    [
        ("csv jsonl yaml toml", ["3.9", "3.10", "3.11"], ["3.9", "3.10", "3.11"]),
        ("csv jsonl yaml toml", ["1.5", "2.50", "3"], [1.5, 2.5, 3.0]),
        ("csv jsonl yaml toml", ["1.5", "1.50", "2.00"], [1.5, 1.5, 2.0]),
        ("jsonl yaml toml", ["[3.9, 3.10]", "[3.9]"], [["3.9", "3.10"], ["3.9"]]),
        ("jsonl yaml toml", ["[1.5, 2.50]", "3"], [[1.5, 2.5], [3.0]]),
        ("jsonl yaml toml", ["3.10", '"next"'], ["3.10", "next"]),
        ("csv", ["12E3", "7E2", "1E1"], ["12E3", "7E2", "1E1"]),
        ("jsonl", ["1e400", '"x"', "0.10"], ["1e400", "x", "0.10"]),
        ("jsonl", ["1.5", "1700000000123456"], [1.5, 1700000000123456.0]),
    ],
)
def test_names_that_look_like_numbers_stay_as_they_are_written(
    tmp_path: Path, kinds: str, values: list[str], kept: list[object], batch_rows: int, num_files: int
) -> None:
    for kind in kinds.split():
        (tmp_path / kind).mkdir()
        write_values(tmp_path / kind, kind, values, num_files)
        rows, rejected = read(tmp_path / kind, config=CorpusConfig(batch_rows=batch_rows))
        assert rejected == []
        expected = [value for place in range(num_files) for value in kept[place::num_files]]
        assert [row["v"] for row in rows] == expected, kind


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


@pytest.mark.parametrize(
    ("name", "raw", "told"),
    [
        ("a.csv", b"PK\x03\x04" + bytes(40), "a zip archive, and not .csv: unpack it, or name it what it is"),
        ("a.csv", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(40), "of an Office before 2007, or encrypted"),
        ("a.tsv", b"<html><body>Sign in", "HTML or XML, and not .tsv: name it .html or what it is"),
        ("a.jsonl", gzip.compress(b'{"id": 1}', mtime=0), "compressed by gzip, and not .jsonl: unpack it"),
        ("a.jsonl.gz", b'{"id": 1}\n', "a text, and not .jsonl.gz: name it .txt, .csv or what it is"),
        ("a.csv.gz", gzip.compress(b"%PDF-1.7", mtime=0), "PDF, and not .csv.gz: name it .pdf"),
        ("a.parquet", b"id,text\n1,x\n", "a text, and not .parquet: name it .txt, .csv or what it is"),
        ("a.arrow", b"PAR1\x15" + bytes(40), "Parquet, and not .arrow: name it .parquet"),
    ],
)
def test_a_table_that_is_of_another_kind_than_its_name_says_is_quarantined_with_what_it_is(
    tmp_path: Path, name: str, raw: bytes, told: str
) -> None:
    (tmp_path / name).write_bytes(raw)
    (tmp_path / "b.txt").write_text("PK is a zip, PAR1 Parquet and BZh9 bzip2")
    rows, [rejected] = read(tmp_path)
    assert [row["doc_id"] for row in rows] == ["b.txt"]
    assert rejected["reason"] == "damaged_file"
    assert rejected["detail"].startswith(f"it is {told}")


def test_files_without_columns_or_with_too_many_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("{}\n[1]\n")
    (tmp_path / "0.jsonl").write_text("")
    with pytest.raises(SourceError, match=r"must have columns, got none in any row of .*a\.jsonl"):
        scan_sources([str(tmp_path)], CorpusConfig())
    path.write_text("".join(json.dumps({f"{row}-{n}": n for n in range(101)}) + "\n" for row in range(100)))
    with pytest.raises(SourceError, match=r"a\.jsonl is not .*: a file must have at most 10000 columns"):
        scan_sources([str(path)], CorpusConfig())
    other = "it is a JSON array or has objects of several lines, and must be JSON lines"
    arrays = ('[{"id": "1"}]', '[\n  {\n  "id": "1"\n  }\n]', '{\n  "id": "1"\n}\n')
    for written, said in [
        *((array, other) for array in arrays),
        ('{"id": 1}{"id": 2}', "line 1 is not JSON"),
    ]:
        path.write_text(written)
        with pytest.raises(SourceError, match=said):
            scan_sources([str(path)], CorpusConfig())


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


def test_a_stream_that_is_cut_is_told_of(tmp_path: Path) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=1)
    whole = sink.getvalue().to_pybytes()
    (tmp_path / "a.arrow").write_bytes(whole)
    (tmp_path / "b.arrow").write_bytes(whole[:-8].replace(b"abc", b"def"))
    told = f"{tmp_path}/b.arrow: nothing marks its end, so it may be cut; write it again"
    assert checked(tmp_path).doubts == [told]
    (tmp_path / "a.arrow").write_bytes(whole[:-20])
    told = rf"; the {len(TABLE) - 1} rows of whole batches before it are left out as well; write it again$"
    with pytest.raises(SourceError, match=told):
        read(tmp_path / "a.arrow")


def test_a_key_that_stands_twice_among_many_is_found_in_one_pass() -> None:
    compared = 0

    class Key(str):
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    names = [*range(1_000), 999]
    with pytest.raises(ValueError, match="key '999' stands twice"):
        once([(Key(name), None) for name in names])
    assert compared < 3 * len(names)


def test_flipped_bytes_of_arrow_files_end_no_process(tmp_path: Path) -> None:
    WRITERS["rows.csv"](tmp_path / "whole.csv")
    for name in ("rows.feather", "rows.arrow"):
        path = tmp_path / name
        WRITERS[name](path)
        whole = path.read_bytes()
        for place in range(0, len(whole), 17):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
            try:
                rows, _ = read(tmp_path / "whole.csv", path)
            except SchemaError:
                continue
            assert len(rows) >= 3, (name, place)


@pytest.mark.parametrize("name", ["a.feather", "a.arrow"])
def test_rows_of_arrow_are_bounded_and_only_wanted_columns_decoded(tmp_path: Path, name: str) -> None:
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
    file = scan_sources([str(tmp_path)], config).files[0].file
    types = {"id": pa.string(), "text": pa.string()}
    before = pa.total_allocated_bytes()
    for batch in file.format.read(file, types, config):
        assert isinstance(batch, pa.RecordBatch)
        assert pa.total_allocated_bytes() - before < 1 << 20
    assert len(read(tmp_path, config=config)[0]) == 8
    small = CorpusConfig(batch_bytes=1 << 10, max_document_bytes=2_000)
    rows, rejected = read(tmp_path, config=small)
    assert rows == []
    assert reasons(rejected) == [(row, "oversized_field") for row in range(8)]


LOGO = "# Logo\n![it](data:image/png;base64,%s)\n"
CENTRED = '<!-- no\n# -->\n\n<h1 align="center">\n  <b>Centred</b> &amp; big\n</h1>\n\n## Later\n'
PICTURES = "![a](data:a/b;base64,%s) <img src='data:a/b;base64,%s'> data:x/y;base64,NO x\n"


@pytest.mark.parametrize(
    ("name", "content", "title", "text"),
    [
        ("guide/a.md", "Intro\n\n## Reset a password ##\n\nOpen.\n", "Reset a password", None),
        (
            "guide/b.md",
            "---\nlayout: page\ntitle: 'Invoices'\n---\n# Other\n\ntext",
            "Invoices",
            "# Other\n\ntext",
        ),
        ("c.txt", "# no heading in plain text", "c", None),
        ("d.markdown", "\ufeffUnderlined\n===\n\nbody", "Underlined", "Underlined\n===\n\nbody"),
        (
            "e.md",
            "---\ntitle:\n---\n#\n# ##\r\n## C and more #\r\n",
            "C and more",
            "#\n# ##\r\n## C and more #\r\n",
        ),
        ("f.md", "====\n#tag\n\n  ***\n", "f", None),
        ("g.md", "```sh\n# not this\n```\n\n # C#\n", "C#", None),
        ("h.md", "Title {#title}\n-----\n", "Title", None),
        ("i.md", '+++\ntitle = "TOML"\n+++\n# Other\n', "TOML", "# Other\n"),
        ("j.md", '{"title": "JSON"}\n# Other\n', "JSON", "# Other\n"),
        ("k.md", LOGO % ("iVBO" * 400), "Logo", LOGO % ""),
        ("l.md", "# The **bold** [link](http://x) &amp; `C#`\n", "The bold link & C#", None),
        ("m.md", CENTRED, "Centred & big", None),
        ("n.md", "# Kramdown<a id=x></a> {: #id .cls }\n", "Kramdown", None),
        ("o.md", PICTURES % ("R0lG", "R0lG=="), "o", PICTURES % ("", "")),
        ("bad.md", b"\xc3\xbccaf\xe9", "bad", "ücaf\ufffd"),
    ],
)
def test_text_files_are_documents_with_titles(
    tmp_path: Path, name: str, content: str | bytes, title: str, text: str | None
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    [row], rejected = read(tmp_path)
    assert (row["doc_id"], row["title"], row["text"]) == (name, title, content if text is None else text)
    [named], _ = read(tmp_path / name)
    assert (named["doc_id"], rejected) == (Path(name).name, [])


def test_text_that_is_empty_or_too_large_is_quarantined(tmp_path: Path) -> None:
    (tmp_path / "empty.md").write_bytes(b"")
    (tmp_path / "large.md").write_bytes(b"x" * 2_001)
    rows, rejected = read(tmp_path, config=CorpusConfig(max_document_bytes=2_000))
    assert (rows, [row["reason"] for row in rejected]) == ([], ["empty_text", "oversized_text"])


def test_html_keeps_headings_and_leaves_out_scripts_and_navigation(tmp_path: Path) -> None:
    page = (
        "<html><head><meta charset=latin-1><title> Reset \n a password</title><style>x</style></head><body>"
        "<nav>Home</nav><main><h1>Reset</h1><p>Open <b>settings</b>, caf\xe9.</p><h2>Steps</h2>"
        "<ul><li>one</li><li>two</li></ul><script>alert(1)</script></main><footer>2026</footer></body></html>"
    )
    (tmp_path / "a.html").write_bytes(page.encode("latin-1"))
    (tmp_path / "b.htm").write_text("<p>only text")
    (tmp_path / "deep.html").write_text("<div>" * 20_000 + "x")
    (tmp_path / "deep_headers.html").write_text("<header>" * 20_000 + "<h1>x")
    rows, rejected = read(tmp_path)
    assert [(row["doc_id"], row["title"]) for row in rows] == [("a.html", "Reset a password"), ("b.htm", "b")]
    assert rows[0]["text"] == "# Reset\n\nOpen **settings**, café.\n\n## Steps\n\n- one\n- two"
    assert reasons(rejected) == [(0, "damaged_rows")] * 2


TEX = "<math><mi>x</mi><annotation encoding=application/x-tex>x^2</annotation></math>"


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<body><header>Logo</header><header><h1>Reset</h1></header><p>Text.</p></body>", "# Reset\n\nText."),
        ("<div role=navigation>Home</div><p>Text.</p><div role=contentinfo>2026</div>", "Text."),
        (
            "<section><p>More.<footer>Source: X</footer></section><footer>Imprint</footer>",
            "More.\n\nSource: X",
        ),
        ("<p>Battery.</p><article>Nice colour.</article>", "Battery.\n\nNice colour."),
        ("<form><h1>Leave</h1><p>Days.</p></form><form><input> Find</form>", "# Leave\n\nDays."),
        ("<main id=top></main><main hidden>Old</main><main>New</main><p>More", "New\n\nMore"),
        ("<div>Menu</div><main><h1>Guide</h1>Text.</main>", "# Guide\n\nText."),
        ("<div>Menu</div><main>A long text.</main>", "A long text."),
        ("<h1>Vacuum</h1><p>Dust.<main>Nice colour, good.</main>", "# Vacuum\n\nDust.\n\nNice colour, good."),
        ("<p>price €10, Łódź", "price €10, Łódź"),
        ("<main><p>Text.<aside>Note</aside></main><aside><h2>Related</h2></aside>", "Text.\n\nNote"),
        ("<p>Text.<aside>A note</aside><aside>See <a>Install</a> <a>Use</a></aside>", "Text.\n\nA note"),
        ("<p>x<button>Go</button>y<select><option>A<option>B</select>", "x Go y  A  B"),
        ("<p>a<img src=x alt=' Map  of\nRome '>b<img src=y alt=''>c", "a Map of Rome bc"),
        ("<p>c<a href=z><img alt=Next></a>", "c [Next](z)"),
        ("<h2>Set<a href=#set>¶</a></h2><p>x<a href=#n>1</a>", "## Set\n\nx[1](#n)"),
        ("<p>x<a href=#m><img alt=Map></a><a href=#r>↩</a> <a href=#o>+</a>", "x [Map](#m)  [+](#o)"),
        (f"<p>so <span><span>{TEX}</span><span aria-hidden=true>x2</span></span>", "so x^2"),
        ("<p><math><mi>y</mi></math>", "y"),
        ("<p><i><math>x</math></i><img alt='x squared' aria-hidden=true>", "*x*"),
        ("<p><math>x</math><p aria-hidden=true>Shown", "x\n\nShown"),
        (f"<p>so <span><u>{TEX}</u> <img alt=x^2></span>.", "so x^2 ."),
        ("<math alttext=z><mi>z</mi></math><img alt=z> <img alt=y>", "z  y"),
        ("<math><mfrac><mn>3</mn> <mn>4</mn></mfrac></math>", "3/4"),
        ("<math><mfrac><mrow>a+b</mrow><msup><mi>c</mi><mn>2</mn></msup></mfrac></math>", "(a+b)/(c^2)"),
        ("<math><msup>10 <mn>10</mn><mn>6</mn></msup> <msqrt><mi>y</mi></msqrt></math>", "10^6 sqrt(y)"),
        ("<math><munderover><mo>∑</mo><mrow>i=1</mrow><mi>n</mi></munderover></math>", "∑_(i=1)^n"),
        ("<math><mroot><mi>x</mi><mn>3</mn></mroot></math>", "x^(1/3)"),
        (
            "<math><msup><mrow>(a+b)</mrow><mn>2</mn></msup> <msub><mi>x</mi><mn>0</mn></msub></math>",
            "(a+b)^2 x_0",
        ),
        (
            "<math><mtable><mtr><mtd>a</mtd><mtd>b</mtd></mtr><mtr><mtd>c</mtd></mtr></mtable></math>",
            "a, b; c",
        ),
        (
            "<math><msup><mi>n</mi><mn>2</mn></msup><msub><mi>x</mi><mi>i</mi></msub><mo>+</mo></math>",
            "n^2 x_i+",
        ),
        ("<p>see <a href=#s>§</a><a href=#>§</a><a href=#a><a href=#b>¶</a></a>", "see [§](#s)[§](#)"),
        ("<section id=m><a href=#m>§</a><h4>T<a href=#x>#</a></h4></section>", "#### T"),
        ("<p><ruby>漢<rp>(</rp><rt>kan</rt><rp>)</rp>字</ruby>", "漢字"),
        ("<p>max_open_files *all*", "max_open_files *all*"),
        ("<ol reversed><li>a<li value=7>b<li>c</ol>", "3. a\n7. b\n6. c"),
        ("<ol start=3><li>a<li>b<ul><li>c</ul></ol>", "3. a\n4. b\n   - c"),
        ("<table><tr><th>a<th>b<tr><td>c<td>d</table>", "| a | b |\n| --- | --- |\n| c | d |"),
        ("<table><tr><th><h3>total</h3>amount</table>", "| total amount |\n| --- |"),
        ("<table><tr><th>t<tr><td><h5>only</h5><h6>heads</h6>a</table>", "| t |\n| --- |\n| only  heads a |"),
        ("<table><tr><th>t<tr><td>a<figure>b</figure>c</table>", "| t |\n| --- |\n| a b c |"),
        (
            "<table><tr><th>Land<th>City<tr><td rowspan=2>France<td>Paris<tr><td>Lyon</table>",
            "| Land | City |\n| --- | --- |\n| France | Paris |\n| France | Lyon |",
        ),
        (
            "<table><tr><th>a<th>b<th>c<tr><td>1<td rowspan=9 colspan=2>a|b <code>c|d</code><tr><td>2",
            "| a | b | c |\n| --- | --- | --- |\n| 1 | a\\|b `c\\|d` | |\n| 2 | a\\|b `c\\|d` | |",
        ),
        (
            f"<table><tr><th>a<th>b<th>c<tr><td rowspan=0>{'x' * 101}<td>1<td rowspan=2>2<tr><tr><td>3",
            f"| a | b | c |\n| --- | --- | --- |\n| {'x' * 101} | 1 | 2 |\n|  |  | 2 |\n|  | 3 |",
        ),
        (
            "<table><tr><th colspan=2>a.py<tr><td><pre>1\n2</pre><td><pre>if a:\n  b|c</pre></table>",
            "a.py\n\n```\nif a:\n  b|c\n```",
        ),
        (
            "<table><tr><td>x<td><pre>1\n2</pre><tr><td>y<td>z</table>",
            "|  |  |\n| --- | --- |\n| x | ``` 1 2 ``` |\n| y | z |",
        ),
        ("<title>T</title>text", "text"),
        (
            "<html><head><title>T</title>Stray<p>a</p></head><body><p>c</body> d</html>\n<p>e",
            "Stray\n\na\n\nc d\n\ne",
        ),
        ("<html><head><title>U</head><body id=x><h2>f</h2></body></html> g", "## f\n\ng"),
        ('<?xml-stylesheet href="a.css"?><p>a</p><?php echo 1 ?>', "a"),
        ("<pre>a<br>b\n\n\n\nc</pre>\n\n\nd", "```\na\nb\n\n\n\nc\n```\n\nd"),
        ("<x-card><template shadowrootmode=open><p>Shown</p></template></x-card>", "Shown"),
        ("<p>a<template>not</template>", "a"),
        ("<pre>open(<a href=x>File</a> f)</pre><div class='top navbar'>Home</div>", "```\nopen(File f)\n```"),
        ("<p>10<sup>6</sup> m<sup>-2</sup> 1<sup>st</sup> H<sub>2</sub>O", "10^6 m^-2 1st H2O"),
        ("<p><sup>1</sup>Note", "1Note"),
        ("<p>(a)<sup>2</sup>", "(a)^2"),
        ("<style>.a{color:red;vertical-align:super}</style><p>10<span class=a>6</span>", "10^6"),
        ("<style>.b{text-decoration:line-through}</style><p><span class='x b'>100</span>", "~~100~~"),
        ("<style>.c .d,.e:hover{text-decoration:line-through}</style><p><span class='d e'>80</span>", "80"),
        ("<p>10<span style='vertical-align: super'>9</span>", "10^9"),
        ("<p>See <a href='data:text/plain;base64,aGVsbG8='>the <b>file</b></a>.", "See the **file**."),
        ("<figure><img alt='A  lens'><figcaption aria-hidden=true>A lens</figcaption></figure>", "A lens"),
        ("<figure><img alt=Lens><figcaption>A lens</figcaption></figure>", "Lens \n\nA lens"),
        ("<p>x<p>y<dl><dt>t<dd>d</dl>", "x\n\ny\n\nt\n:   d"),
        ("<dialog>Shut</dialog><dialog open>Open</dialog>", "Shut\n\nOpen"),
        ("<main>One</main><main>Two</main>", "One\n\nTwo"),
        ("<ul><li><input type=checkbox checked> done</ul>", "- [x] done"),
        ("<ul><li><label><input type=checkbox>open</label></ul>", "- [ ] open"),
        ("<ul class=inline-task-list><li class=checked>a<li>b</ul>", "- [x] a\n- [ ] b"),
        ("<ul><li><i class='checkbox checkbox-on'></i> c</ul>", "- [x] c"),
        (
            "<table><tr><th>a<tr><td><div class='checkbox checkbox-off'></div></table>",
            "| a |\n| --- |\n| [ ] |",
        ),
        ("<table><thead><tr><th>a<tbody><tr><td>1<tbody><tr><td>2</table>", "| a |\n| --- |\n| 1 |\n| 2 |"),
        ("<table><tr><th>a<tfoot><tr><td>sum<tbody><tr><td>1</table>", "| a |\n| --- |\n| 1 |\n| sum |"),
        ("<table><tr><th>a<tr><td>0</tr><tbody><tr><td>1</tbody></table>", "| a |\n| --- |\n| 0 |\n| 1 |"),
        ("<pre><span class=linenos>1</span>def f(x: <i class=mi>2</i>)</pre>", "```\ndef f(x: 2)\n```"),
        ("<p>a<iframe srcdoc='<title>T</title><p>b <img alt=c>'></iframe>", "a\n\nb  c"),
        ("<p>a<iframe src=d>e</iframe>", "a"),
        ("<p>a<map><area alt=b></map><input type=image alt=c>", "a b  c"),
        ("<svg><title>¶</title></svg><h1>Page</h1>", "# Page"),
        (b"<meta charset=utf-8><p>Gr\xc3\xb6\xc3\x9fe \xff", "Größe \ufffd"),
        ("<meta charset=iso-2022-jp><p>日本".encode("iso-2022-jp"), "日本"),
        ("<p>Łódź".encode("utf-8-sig"), "Łódź"),
        ("<meta charset=iso-8859-1><p>„Größe“ €".encode("cp1252"), "„Größe“ €"),
        (b"<meta charset=iso-8859-1><p>Gr\xf6\xdfe \x81 \x93", "Größe \x81 “"),
        (b"<meta charset=windows-1254><p>\xdd\xfe \x8e", "İş \x8e"),
        ("<meta charset=gb2312><p>镕基".encode("gb18030"), "镕基"),
        ("<meta charset=x-unknown><p>Größe".encode("cp1252"), "Größe"),
        (b"<meta charset=base64><p>plain", "plain"),
        (b"<p><![if !supportLists]>1.<![endif]> one</p>", "1. one"),
        ("int &ref; const Foo &foo; R&D; a &&b; c", "int &ref; const Foo &foo; R&D; a &&b; c"),
        ("?a=1&copy=2&order=asc&num=1&lang=en&image=a", "?a=1©=2&order=asc&num=1&lang=en&image=a"),
        ("&notit; &amp &lt;b&gt; &eacute;&eacute &hellip;", "¬it; & <b> éé …"),
        ('<a href="/x?a=1&copy=2&lang=en">to</a>', "[to](/x?a=1&copy=2&lang=en)"),
        ('<h2>Use<a href="#use">\uf0c1</a></h2>', "## Use"),
    ],
)
def test_html_keeps_the_text_of_a_page_alone(tmp_path: Path, page: str | bytes, text: str) -> None:
    (tmp_path / "a.html").write_bytes(page.encode() if isinstance(page, str) else page)
    ((row,), _) = read(tmp_path)
    assert row["text"] == text
    assert "¶" not in row["title"]


@pytest.mark.parametrize("store_schema", [True, False])
def test_uuids_are_ids_and_values_and_other_extensions_what_they_are_stored_as(
    tmp_path: Path, store_schema: bool
) -> None:
    ids = [uuid.UUID(int=1), uuid.UUID(int=2)]
    column = pa.array([each.bytes for each in ids], pa.uuid())
    notes = pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1}', None]))
    both = pa.ListArray.from_arrays(pa.array([0, 2, 2]), column, mask=pa.array([False, True]))
    table = {"id": column, "text": ["x", "y"], "owner": column, "j": notes, "both": both}
    # DuckDB and others write no schema of Arrow beside that of Parquet.
    pq.write_table(pa.table(table), tmp_path / "a.parquet", store_schema=store_schema)
    rows, rejected = read(tmp_path)
    assert [(row["doc_id"], row["owner"], row["j"], row["both"]) for row in rows] == [
        (str(ids[0]), str(ids[0]), '{"a": 1}', [str(each) for each in ids]),
        (str(ids[1]), str(ids[1]), None, None),
    ]
    assert rejected == []


def test_numbers_of_an_unknown_extension_are_left_out_and_an_index_in_metadata_alone_is_told_of(
    tmp_path: Path,
) -> None:
    period = pa.field("per", pa.int64(), metadata={"ARROW:extension:name": "pandas.period"})
    range_index = {"index_columns": [{"kind": "range", "name": "id", "start": 1, "stop": 2, "step": 1}]}
    fields = [pa.field("key", pa.string()), pa.field("text", pa.string()), period]
    schema = pa.schema(fields, metadata={"pandas": json.dumps(range_index)})
    pq.write_table(pa.table([["a"], ["x"], [648]], schema=schema), tmp_path / "a.parquet")
    scan = scan_sources([str(tmp_path)], CorpusConfig(id_column="key"))
    assert scan.metadata_fields == ()
    assert "cannot be stored: its type is struct<pandas.period: int64>" in scan.warnings[0]
    with pytest.raises(
        SchemaError, match=r"pandas keeps beside the columns: write `frame.reset_index\(\)`, or"
    ):
        scan_sources([str(tmp_path)], CorpusConfig())


@pytest.mark.parametrize("kind", [pl.Int128, pl.UInt128])
def test_a_column_of_polars_wide_integers_is_left_out_of_parquet(tmp_path: Path, kind: Any) -> None:
    wide = {
        "wide": pl.Series([5, 2**80], dtype=kind),
        "list": pl.Series([[5], None], dtype=pl.List(kind)),
    }
    array = pl.Series([[0.5] * 128] * 2, dtype=pl.Array(pl.Float32, 128))
    at = pl.Series([1, 2], dtype=pl.Datetime("ns", "Europe/Berlin"))
    frame = pl.DataFrame({"id": ["a", "b"], "text": "x", **wide, "array": array, "at": at, "n": [1, 2]})
    frame.write_parquet(tmp_path / "a.parquet")
    found = checked(tmp_path)
    assert [(row["doc_id"], row["n"], row["array"]) for row in found.rows] == [
        ("a", 1, [0.5] * 128),
        ("b", 2, [0.5] * 128),
    ]
    assert found.rejected == []
    assert found.rows[0].keys().isdisjoint(wide)
    assert str(found.scan.metadata_fields[1].type) == "timestamp[ns, tz=UTC]"
    told = " ".join(found.scan.warnings)
    assert all(f"column {name!r} of" in told for name in wide)
    frame.write_ipc(tmp_path / "b.arrow")
    with pytest.raises(SourceError, match=r"64 bits not implemented; without such columns, write it again$"):
        read(tmp_path / "b.arrow")


@pytest.mark.parametrize(
    ("values", "kept", "told"),
    [
        (["1152921504606846977", "0.5"], None, ""),
        (["1152921504606846977", "7"], [1152921504606846977, 7], ""),
        (["850705917302346158658436518575", "7"], None, "integers beyond 64 bits"),
        (["850705917302346158658436518575", "x"], None, ""),
    ],
)
@pytest.mark.parametrize("batch_rows", [1, 9])
def test_long_integers_of_csv_are_kept_whole_and_told_of(
    tmp_path: Path, values: list[str], kept: list[int] | None, told: str, batch_rows: int
) -> None:
    rows = "".join(f"{place},x,{value}\n" for place, value in enumerate(values))
    (tmp_path / "a.csv").write_text(f"id,text,n\n{rows}")
    found = checked(tmp_path, config=CorpusConfig(batch_rows=batch_rows))
    assert [row["n"] for row in found.rows] == (kept or values)
    if batch_rows == 1 and values[1] == "0.5":  # else the sample of a first ingest tells of it
        told = "integers beyond 53 bits and numbers"
    assert [told in each for each in found.scan.warnings] == ([True] if told else [])


def test_a_header_that_cannot_be_decoded_names_its_line_byte_and_column_and_what_to_do(
    tmp_path: Path,
) -> None:
    rows = "1,schöne Grüße aus Köln,3\n" * 5
    (tmp_path / "a.csv").write_bytes(b"# made\nid,text,Gr\xf6\xdfe\n" + rows.encode())
    with pytest.raises(
        SourceError, match=r"a.csv is not a file that can be read: its header, in line 2, must"
    ) as told:
        read(tmp_path / "a.csv")
    assert str(told.value).endswith("utf-8, got the byte 0xF6 in column 3; write the file again in UTF-8")
    (tmp_path / "a.csv").write_text(f"# made\nid,text,Größe\n{rows}")
    assert read(tmp_path / "a.csv")[0][0]["Größe"] == 3


def test_a_document_with_damaged_characters_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_bytes(b"<meta charset=utf-8><p>Gr\xc3\xb6\xc3\x9fe \xff")
    (tmp_path / "b.html").write_bytes("<meta charset=iso-8859-1><p>Größe".encode("latin-1"))
    (tmp_path / "c.txt").write_bytes("cut".encode("utf-16")[:-1])
    (tmp_path / "d.md").write_bytes("---\nname: Größe\n---\ncafé ".encode() + b"\xe9")
    (tmp_path / "e.txt").write_bytes("Ein caf\xe9 und ein Text mit einem \0 darin".encode("latin-1"))
    found = checked(tmp_path)
    assert found.encodings == [
        f"{name} with U+FFFD for damaged characters" if name else None
        for name in ("utf-8", "", "utf-16", "utf-8", "utf-8")
    ]
    assert reasons(found.rejected) == [(0, "nul_character")]


@pytest.mark.parametrize(
    "line", ["# -*- coding: latin-1 -*-\n", "#!/usr/bin/python\n# vim: set fileencoding=latin-1 :\n"]
)
def test_code_is_read_in_the_encoding_that_it_declares(tmp_path: Path, line: str) -> None:
    text = f"{line}x = '\u00fe \u00fd'\n"
    (tmp_path / "a.py").write_bytes(text.encode("latin-1"))
    found = checked(tmp_path)
    assert (found.rows[0]["text"], found.encodings) == (text, [None])


def test_a_large_integer_beside_a_float_keeps_its_digits_in_a_column_of_integers(tmp_path: Path) -> None:
    values = {"a": 2**63 - 2, "b": 1.5, "c": 2.0}
    rows = "".join(f'{{"id": "{name}", "text": "x", "n": {value}}}\n' for name, value in values.items())
    (tmp_path / "a.jsonl").write_text(rows)
    found = checked(tmp_path, stored=[pa.field("n", pa.int64())])
    assert [row["n"] for row in found.rows] == [2**63 - 2, 2]
    assert [row["doc_id"] for row in found.rejected] == ["b"]


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


@pytest.mark.parametrize(
    "units",
    [("<ol>", "<li>x"), ("<p>", "<math>x</math>", "</p>", "<!---->"), ("<table>", "<tr><td rowspan=9999>x")],
)
def test_time_of_a_list_formulas_or_spans_grows_with_their_number(units: tuple[str, ...]) -> None:
    def seconds(items: int) -> float:
        begin = time.process_time()
        converted("".join(unit * (items if place % 2 else 1) for place, unit in enumerate(units)))
        return time.process_time() - begin

    seconds(10)
    assert seconds(8_000) < 9 * seconds(2_000)  # quadratic time: 16 times


@pytest.mark.parametrize(
    ("name", "content", "end"),
    [
        ("a.jsonl", b"[\n{}]", "> NEW.jsonl` writes them"),
        ("a.parquet", b"a text", ": name it .txt, .csv or what it is"),
        ("a.arrow", b"\0\1\2", "; check the path or write the file again"),
        (
            "README",
            b"The cat sat.\n",
            "it is a text, and its name has no suffix: name it .txt, .csv or what it is",
        ),
    ],
)
def test_advice_stands_once_where_no_file_can_be_read(
    tmp_path: Path, name: str, content: bytes, end: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError) as refusal:
        scan_sources([str(tmp_path / name)], CorpusConfig())
    assert str(refusal.value).endswith(end)


def test_nan_beside_texts_in_json_is_quarantined(tmp_path: Path) -> None:
    values = ['"a"', "NaN", '["b", -Infinity]', "[1.5]"]
    lines = [f'{{"id": "{place}", "text": "x", "v": {value}}}' for place, value in enumerate(values)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    rows, rejected = read(tmp_path)
    assert [row["v"] for row in rows] == [["a"], ["1.5"]]
    assert [(row["reason"], row["detail"]) for row in rejected] == [
        ("nan_metadata", "column 'v' holds NaN or infinity")
    ] * 2
