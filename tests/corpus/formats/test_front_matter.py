"""Front matter of Markdown: keys that become columns, and blocks that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.formats.text import FRONT_MATTER_CHARACTERS, FrontMatter, read_front_matter
from cairn.pipeline.corpus.scan import scan_sources
from cairn.pipeline.errors import SchemaError

from tests.corpus.checked_rows import checked, read, reasons


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name}.md").write_text(text)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("x: A", "A"),
        ("x: 2020", 2020),
        ("x: 1.50", "1.50"),
        ("x: false", False),
        ("x: 007", "007"),
        ("x: 2024-05-01", "2024-05-01"),
        ("x: yes", "yes"),
        ("x: 1:30", "1:30"),
        ("x: '12'", "12"),
        ("x:", None),
        ("x: [a, 1]", ["a", 1]),
        ("x: {name: Jo}", {}),
        ("x: 1e3", "1e3"),
        ("x: !!int x", "x"),
        ("x: !!str 1.10", "1.10"),
        ("x: [!!str 7, 7]", ["7", 7]),
    ],
)
def test_scalars_are_read_as_yaml_1_2_and_a_leading_zero_or_a_date_is_a_text(
    line: str, value: object
) -> None:
    raw = f"---\n{line}\nid: page\ntext: 1\n---\nbody"
    expected = {"x": value, "front_matter_id": "page", "front_matter_text": 1}
    assert read_front_matter(raw) == FrontMatter(expected, len(raw) - 4)


@pytest.mark.parametrize(
    ("text", "text_start", "fault"),
    [
        ("---\n---\nx", 8, None),
        ("---\r\na: 1\r\n...\r\nx", 16, None),
        ("---\nonly a text\n---\nx", 0, None),
        ("---\n\n# A heading\n\n---\nx", 0, None),
        ("---\na: 1\nno end", 0, None),
        ("----\na: 1\n---\n", 0, None),
        (
            "---\ntitle: a: b\n---\nx",
            0,
            "line 2: mapping values are not allowed here; put a value with a colon into quotes",
        ),
        ("---\n? [a]\n: 1\n---\nx", 0, "a key must be printable text of at most 256 characters"),
        ('---\n"\\ud800": 1\n---\nx', 0, "a key must be printable text of at most 256 characters"),
        ("---\n" + "[" * 60_000 + "\n---\nx", 0, "it is nested too deeply"),
        ("---\n" + "- " * 30_000 + "\n---\nx", 0, "it is nested too deeply"),
    ],
)
def test_what_is_no_mapping_is_text_and_what_is_no_yaml_has_a_fault(
    text: str, text_start: int, fault: str | None
) -> None:
    found = read_front_matter(text)
    assert (found.text_start, found.fault) == (text_start, fault)


def test_aliases_and_merge_keys_build_nothing() -> None:
    levels = "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 60))
    found = read_front_matter(f"---\na0: &a0 {{x: 1}}\n{levels}b: &b [*b]\n---\nx")
    assert found.fault is None
    assert found.values["a59"] == found.values["b"] == {}
    found = read_front_matter("---\na: &a [&x 1, 2]\nb: *a\nc: [*x]\nd: &d y\ne: *d\nf: [&z w, *z]\n---\n")
    assert found.values == {"a": [1, 2], "b": {}, "c": {}, "d": "y", "e": {}, "f": {}}


def test_json_whose_objects_have_the_same_keys_is_front_matter() -> None:
    text = '{"year": 1, "of": [{"year": "year"}, {"year": 3}]}\nbody'
    assert read_front_matter(text).values == {"year": 1, "of": {}}


def test_keys_become_columns_and_files_without_them_have_nulls(tmp_path: Path) -> None:
    write(
        tmp_path,
        a="---\ntitle: First\nyear: 2020\ntags: [x, y]\n---\n\n# Head\n",
        b="---\ntitle: 7\nyear: 21a\ntags: z\nid: own\n---\nbody",
        c="no front matter",
    )
    (tmp_path / "d.txt").write_text("---\nyear: 1\n---\nplain")
    rows, rejected = read(tmp_path)
    columns = ("doc_id", "title", "text", "year", "tags", "front_matter_id")
    assert [tuple(row[name] for name in columns) for row in rows] == [
        ("a.md", "First", "# Head\n", "2020", ["x", "y"], None),
        ("b.md", "7", "body", "21a", ["z"], "own"),
        ("c.md", "c", "no front matter", None, None, None),
        ("d.txt", "d", "---\nyear: 1\n---\nplain", None, None, None),
    ]
    assert rejected == []


def test_a_key_can_be_the_id_and_a_file_without_it_is_quarantined(tmp_path: Path) -> None:
    write(tmp_path, a="---\nslug: one\nheadline: One\n---\nbody", b="body")
    config = CorpusConfig(id_column="slug", title_column="headline")
    rows, rejected = read(tmp_path, config=config)
    assert [(row["doc_id"], row["title"], row["id"]) for row in rows] == [("one", "One", "a.md")]
    assert reasons(rejected) == [(0, "null_id")]
    with pytest.raises(SchemaError, match=r"id column 'slgu' must be there.*did you mean 'slug'"):
        read(tmp_path, config=CorpusConfig(id_column="slgu"))
    with pytest.raises(SchemaError, match="in their front matter, leave the option out to take paths as ids"):
        read(tmp_path, config=CorpusConfig(id_column="number"))
    with pytest.raises(SchemaError, match="metadata column 'yaer' must be there"):
        read(tmp_path, config=CorpusConfig(metadata_columns=("yaer",)))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("---\ntitle: one\ntitle: two\n---\nbody", "line 3: key 'title' stands twice"),
        ('{"a": {"year": "{year"},\n"year": 1,\n"year": 2}\nbody', "key 'year' stands twice in an object"),
        ('{"b": [{"year": 0,\n\n"y\\u0065ar": 1}]}\n', "key 'year' stands twice in an object"),
        ('{"a": 1, "a": 2} is what we send.\n', None),
        ('{"a": {"b": 1, "b": 2}, broken\n', None),
    ],
)
def test_a_block_with_a_key_that_stands_twice_is_warned_of_and_is_text(
    tmp_path: Path, text: str, told: str | None
) -> None:
    write(tmp_path, a=text)
    found = checked(tmp_path)
    assert [each.partition("left in the text: ")[2] for each in found.scan.warnings] == (
        [f"{tmp_path}/a.md: {told}"] if told else []
    )
    assert found.rows[0]["text"] == text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("num_characters", [25_000, 65_000, 70_000])
def test_a_long_block_is_columns_or_stays_in_the_text(
    tmp_path: Path, encoding: str, num_characters: int
) -> None:
    text = f"---\nsummary: {'日本の山道 ' * (num_characters // 6)}end\nauthor: 山田\n---\nbody\n"
    (tmp_path / "a.md").write_bytes(text.encode(encoding))
    [row] = read(tmp_path)[0]
    if num_characters < FRONT_MATTER_CHARACTERS:
        assert (row["text"], row["author"], row["summary"][-3:]) == ("body\n", "山田", "end")
    else:
        assert row["text"] == text
        assert "author" not in row


def test_a_block_stays_in_the_text_where_the_rest_of_the_file_changes_its_encoding(tmp_path: Path) -> None:
    head, rest = "---\nauthor: 山田\n---\n".encode(), b"x" * 300_000 + b"\xe9" * 20_000
    (tmp_path / "a.md").write_bytes(head + rest)
    [row] = read(tmp_path)[0]
    assert row["author"] is None
    assert row["text"].startswith("---\nauthor: ")


def test_a_title_that_is_no_text_is_kept_as_a_column_or_told_of(tmp_path: Path) -> None:
    objects = "---\ntitle: {en: A}\n---\nbody"
    write(tmp_path, a="---\ntitle: [A, B]\n---\nbody", b=objects, c=objects)
    [warning] = scan_sources([str(tmp_path)], CorpusConfig()).warnings
    where = f"{tmp_path}/b.md and 1 more"
    assert warning.startswith(f"values of column 'front_matter_title' in {where} are left out")
    rows, _ = read(tmp_path)
    told = [(row["title"], row["front_matter_title"]) for row in rows]
    assert told == [("a", ["A", "B"]), ("b", None), ("c", None)]
    (tmp_path / "a.md").unlink()
    [warning] = scan_sources([str(tmp_path)], CorpusConfig()).warnings
    assert warning.startswith(f"column 'front_matter_title' of {where} cannot be stored")


def test_broken_yaml_is_warned_of_and_stays_in_the_text(tmp_path: Path) -> None:
    broken = "---\ntitle: a: b\n# comment\n---\n# Head\n"
    write(tmp_path, a=broken, b=broken, c="---\nmeta: {a: 1}\nempty:\nno: []\n---\nx", d="---\nx: 1\n---\n\n")
    found = checked(tmp_path)
    first, second, third = found.scan.warnings
    told = "line 2: mapping values are not allowed here; put a value with a colon into quotes"
    told = "; ".join(f"{tmp_path}/{name}.md: {told}" for name in "ab")
    assert first == f"front matter that cannot be read was left in the text: {told}"
    assert found.rows[0]["title"] == "Head"
    assert second == (
        f"column 'meta' of {tmp_path}/c.md cannot be stored: it holds objects or nested lists, or "
        "aliases; it is left out"
    )
    where = f"column 'no' of {tmp_path}/c.md"
    assert third == f"{where} cannot be stored: all of its lists are empty; it is left out"
    assert [(row["doc_id"], row["text"]) for row in found.rows] == [
        ("a.md", broken),
        ("b.md", broken),
        ("c.md", "x"),
    ]
    assert reasons(found.rejected) == [(0, "empty_text")]
    assert found.scan.files[0].identity is None  # so that it is read, and warned of, each time


STORED = [
    pa.field("year", pa.int64()),
    pa.field("tags", pa.list_(pa.string())),
    pa.field("lang", pa.string()),
]


def test_the_columns_of_a_collection_decide_and_what_does_not_fit_costs_its_document(tmp_path: Path) -> None:
    write(tmp_path, a="---\nyear: 2020.0\ntags: one\nmood: good\n---\nx", b="---\nyear: late\n---\nx", c="x")
    write(tmp_path, d="---\ntags:\n- {name: red}\n---\nx")
    found = checked(tmp_path, stored=STORED)
    assert [*found.scan.metadata_fields] == [*STORED, pa.field("mood", pa.string())]
    assert [(row["doc_id"], row["year"], row["tags"], row["lang"], row["mood"]) for row in found.rows] == [
        ("a.md", 2020, ["one"], None, "good"),
        ("c.md", None, None, None, None),
        ("d.md", None, None, None, None),
    ]
    assert [(row["doc_id"], row["reason"]) for row in found.rejected] == [("b.md", "unfit_value")]
    [warning] = found.scan.warnings
    where = f"values of column 'tags' in {tmp_path}/d.md are left out: "
    assert warning == f"{where}it holds objects or nested lists, or aliases"


def test_times_of_toml_are_texts_with_their_signs(tmp_path: Path) -> None:
    lines = ["at = 2024-01-01T10:00:00Z", "east = 2024-01-01T10:00:00+02:00", "days = [2024-01-01]"]
    write(tmp_path, a="\n".join(["+++", *lines, "+++", "text"]))
    rows, _ = read(tmp_path)
    assert {name: rows[0][name] for name in ("at", "east", "days")} == {
        "at": "2024-01-01T10:00:00Z", "east": "2024-01-01T10:00:00+02:00", "days": ["2024-01-01"],
    }  # fmt: skip
