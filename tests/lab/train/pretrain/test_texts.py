from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.errors import SchemaError, SourceError
from cairn.pipeline.lab.train.training_files import read_texts


def test_read_texts_takes_parquet_and_json_lines_in_the_order_of_their_names(tmp_path: Path):
    pq.write_table(
        pa.table({"text": ["b", "c", " "], "language": ["de", None, "de"]}), tmp_path / "b.parquet"
    )
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"text": "b", "language": "en"}\n{"text": "a"}\n')
    found = read_texts([tmp_path / "a.jsonl", tmp_path / "b.parquet"])
    assert found.texts == ("a", "b", "c")
    assert found.languages == ("", "en", "")
    assert found.skipped == {"repeated text": 2, "empty text": 1}


@pytest.mark.parametrize("line", ['{"txt": "a"}', '{"text": 3}', '["a"]', '{"text": "a", "language": 1}'])
def test_read_texts_line_of_another_kind_is_refused(tmp_path: Path, line: str):
    (tmp_path / "a.jsonl").write_text(f"{line}\n")
    with pytest.raises(SchemaError, match=r"line 1 of a\.jsonl must be a JSON object with a text"):
        read_texts([tmp_path / "a.jsonl"])


def test_read_texts_line_that_is_no_json_is_refused(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text"\n')
    with pytest.raises(SourceError, match=r"line 2 of a\.jsonl"):
        read_texts([tmp_path / "a.jsonl"])


def test_read_texts_line_that_is_nested_too_deep_is_refused(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("[" * 200_000)
    with pytest.raises(SourceError, match=r"line 1 of a\.jsonl must be a JSON object, got an unreadable one"):
        read_texts([tmp_path / "a.jsonl"])


def test_read_texts_with_half_a_surrogate_pair_are_counted(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text(
        '{"text": "a \\ud800"}\n{"text": "b"}\n{"text": "c", "language": "\\ud800"}\n'
    )
    found = read_texts([tmp_path / "a.jsonl"])
    assert found.texts == ("b",)
    assert found.skipped == {"text that is not valid Unicode": 2}


def test_read_texts_parquet_without_text_is_refused(tmp_path: Path):
    pq.write_table(pa.table({"body": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(SchemaError, match="must have the columns text, got body"):
        read_texts([tmp_path])


def test_read_texts_that_are_not_there_or_empty_are_refused(tmp_path: Path):
    with pytest.raises(SourceError, match="does not exist"):
        read_texts([tmp_path / "none.jsonl"])
    (tmp_path / "a.jsonl").write_text('{"text": "  "}\n')
    with pytest.raises(SourceError, match="must hold at least one, got 1 with empty text; name others"):
        read_texts([tmp_path])
