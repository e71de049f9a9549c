from __future__ import annotations

import bz2
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.errors import SchemaError, SourceError
from cairn.pipeline.lab.judged_files import corpus_files, find_judged_file, read_columns, read_judged_file
from pyarrow.csv import WriteOptions

QRELS = [{"query_id": "q1", "doc_id": "007", "score": 2}, {"query_id": "2", "doc_id": "1", "score": 0}]
CORPUS = [
    {"id": "007", "title": "12", "text": 'a "path",\tand\nmore'},
    {"id": "1", "title": None, "text": "1"},
]


def write(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    table = pa.Table.from_pylist(list(rows))
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".arrow":
        pyarrow.feather.write_feather(table, path)
    elif path.suffix in (".csv", ".tsv"):
        pyarrow.csv.write_csv(table, path, WriteOptions(delimiter="\t" if path.suffix == ".tsv" else ","))
    else:
        pack = {".gz": gzip.compress, ".bz2": bz2.compress}.get(path.suffix, bytes)
        path.write_bytes(pack(lines))
    return path


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl", "jsonl.gz", "jsonl.bz2", "csv", "tsv"])
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str):
    write(tmp_path / f"corpus.{suffix}", [dict(reversed(row.items())) for row in CORPUS])
    write(tmp_path / f"qrels.{suffix}", QRELS)

    assert read_judged_file(tmp_path, "corpus").select(["id", "title", "text"]).to_pylist() == CORPUS
    assert read_judged_file(tmp_path, "qrels").to_pylist() == QRELS


def test_layout_of_beir_is_read(tmp_path: Path):
    write(tmp_path / "corpus.jsonl", [{"_id": "1", "title": "", "text": "x", "metadata": {"a": {}}}])
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\n1\t1\t1\n")
    (tmp_path / "qrels/train.tsv").write_text("query-id\tcorpus-id\tscore\n2\t2\t2\n")

    assert read_judged_file(tmp_path, "corpus").to_pylist() == [{"id": "1", "text": "x", "title": ""}]
    assert read_judged_file(tmp_path, "qrels").to_pylist() == [{"query_id": "1", "doc_id": "1", "score": 1}]


def test_parquet_is_taken_before_other_formats(tmp_path: Path):
    for suffix in ("csv", "jsonl", "parquet"):
        write(tmp_path / f"corpus.{suffix}", CORPUS)

    assert find_judged_file(tmp_path, "corpus") == tmp_path / "corpus.parquet"


def test_spans_of_csv_without_a_value_are_numbers(tmp_path: Path):
    (tmp_path / "qrels.csv").write_text("query_id,doc_id,score,start,end\nq,d,1,,\n")

    table = read_judged_file(tmp_path, "qrels")
    assert (table.schema.field("start").type, table.column("end").to_pylist()) == (pa.int64(), [None])


def test_folder_of_markdown_is_a_corpus(tmp_path: Path):
    (tmp_path / "a.md").write_text("# Paths\n\nStones mark them.\n")
    (file,) = corpus_files(tmp_path)

    assert read_columns(file, ("id", "text"), ("title",)).column("title").to_pylist() == ["Paths"]


@pytest.mark.parametrize(
    ("name", "content", "error", "sentence"),
    [
        (
            "qrels.csv",
            "a,b\n1,2\n",
            SchemaError,
            "missing: query_id, doc_id, score; it has a, b: rename or add them",
        ),
        ("qrels.tsv", "query_id\tdoc_id\tscore\n", SourceError, "qrels.tsv must hold at least one row"),
        ("qrels.jsonl", "", SourceError, "qrels.jsonl must hold at least one row"),
        ("qrels.csv", "", SourceError, "qrels.csv must hold at least one row"),
        ("qrels.csv", "query_id,doc_id,score\n1,2\n", SourceError, "must have 3 fields, got 2"),
        ("qrels.jsonl", '{"query_id": 1\n', SourceError, "line 1 is not JSON"),
        ("qrels.parquet", "PAR1", SourceError, "qrels.parquet must be a file that can be read whole"),
        (
            "qrels.jsonl",
            '{"query_id": "\\ud800", "doc_id": "a", "score": 1}\n',
            SourceError,
            "must be a file that can be read whole, got: ",
        ),
        (
            "other.csv",
            "",
            SourceError,
            r"must hold qrels.parquet, .arrow, .jsonl, .csv or .tsv or qrels/test.tsv",
        ),
    ],
)
def test_file_that_cannot_be_used_is_refused(
    tmp_path: Path, name: str, content: str, error: type[Exception], sentence: str
):
    (tmp_path / name).write_text(content, "utf-8")

    with pytest.raises(error, match=sentence):
        read_judged_file(tmp_path, "qrels")


def test_column_that_stands_twice_is_refused(tmp_path: Path):
    (tmp_path / "corpus.csv").write_text("id,id,text\n1,2,x\n")
    with pytest.raises(SchemaError, match="one column id, got several"):
        read_judged_file(tmp_path, "corpus")
