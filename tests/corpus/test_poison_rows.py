"""Random rows of poison values: each is staged or rejected with the first reason that holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.formats import parquet
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpus.checked_rows import read, reasons

WriteCorpus = Callable[..., Path]


poison = st.sampled_from(
    [
        None,
        b"",
        b" ",
        b"ok",
        "k\u00e4se".encode(),
        b"secret\0",
        b"secret\xff",
        b"\xed\xa0\x80",
        b"secret" * 5,
        b"\xff" * 30,
        b"secret" * 40,
        b"\xe2\x80\x83",
    ]
)
poison_rows = st.lists(
    st.tuples(poison, poison, poison, st.sampled_from([None, 1.0, float("nan")])), min_size=1, max_size=25
)


def raw_strings(*values: bytes | None) -> pa.Array:
    return pa.array(values, pa.binary()).view(pa.string())


def expected_reason(
    doc_id: bytes | None,
    text: bytes | None,
    value: bytes | None = None,
    score: float | None = None,
    column: str = "title",
) -> str | None:
    """Return why a row is refused; its value stands in the column title, query or note."""
    values = [each for each in (doc_id, value, text) if each is not None]
    in_roles = [each for each in (doc_id, None if column == "note" else value, text) if each is not None]

    def decodes() -> bool:
        try:
            return all(each.decode() is not None for each in values)
        except UnicodeDecodeError:
            return False

    sizes = [
        ("oversized_field", lambda: value is not None and len(value) > 100),
        ("oversized_text", lambda: text is not None and len(text) > 100),
    ]
    checks = (
        ("null_id", lambda: doc_id is None),
        ("long_id", lambda: doc_id is not None and len(doc_id) > 80),
        *(sizes if column == "title" else sizes[::-1]),
        ("utf8", lambda: not decodes()),
        ("nul_character", lambda: any(b"\0" in value for value in in_roles)),
        ("empty_id", lambda: doc_id is not None and not doc_id.decode().strip()),
        ("long_id", lambda: doc_id is not None and len(doc_id.decode()) > 20),
        ("null_text", lambda: text is None),
        ("empty_text", lambda: text is not None and not text.decode().strip()),
        ("nan_metadata", lambda: score is not None and score != score),
    )
    return next((reason for reason, applies in checks if applies()), None)


@settings(max_examples=100)
@given(
    poison_rows,
    st.sampled_from(["title", "query", "note"]),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 60),
    st.booleans(),
)
def test_poison_corpus_loses_no_row_and_names_each_reason(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[bytes | None, bytes | None, bytes | None, float | None]],
    column: str,
    row_group_size: int,
    batch_rows: int,
    batch_bytes: int,
    use_dictionary: bool,
) -> None:
    path = tmp_path_factory.getbasetemp() / "poison.parquet"
    ids, texts, values, scores = zip(*rows, strict=True)
    table = pa.table(
        {
            "id": raw_strings(*ids),
            "text": raw_strings(*texts),
            column: raw_strings(*values),
            "score": pa.array(scores, pa.float64()),
        }
    )
    pq.write_table(
        table, path, row_group_size=row_group_size, use_dictionary=use_dictionary, write_statistics=False
    )
    config = CorpusConfig(
        batch_rows=batch_rows, batch_bytes=batch_bytes, max_document_bytes=100, max_id_characters=20
    )
    with pytest.MonkeyPatch.context() as patch:
        # Batches of a few bytes would make every row group a suspect.
        patch.setattr(parquet, "GROUP_BUDGET_BATCHES", 1 << 20)
        staged, rejected = read(path, config=config)
    expected = [expected_reason(*row, column) for row in rows]
    utf8 = {"invalid_utf8": "utf8"}
    assert [(index, utf8.get(reason, reason)) for index, reason in reasons(rejected)] == [
        (index, reason) for index, reason in enumerate(expected) if reason is not None
    ]
    assert not any("secret" in row["detail"] for row in rejected), "a report quotes no document"
    assert [(row["doc_id"], row["text"]) for row in staged] == [
        (row[0].decode(), row[1].decode())
        for row, reason in zip(rows, expected, strict=True)
        if reason is None and row[0] is not None and row[1] is not None
    ]
