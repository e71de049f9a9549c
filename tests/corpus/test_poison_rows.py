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

from tests.corpus.checked_rows import raw_strings, read, reasons

WriteCorpus = Callable[..., Path]


poison = st.sampled_from(
    [
        None,
        b"",
        b" ",
        b"ok",
        "k\u00e4se".encode(),
        b"a\0b",
        b"\xff",
        b"\xed\xa0\x80",
        b"x" * 30,
        b"\xff" * 30,
        b"y" * 200,
        b"\xe2\x80\x83",
    ]
)
poison_rows = st.lists(
    st.tuples(poison, poison, poison, st.sampled_from([None, 1.0, float("nan")])), min_size=1, max_size=25
)


def expected_reason(
    doc_id: bytes | None, text: bytes | None, title: bytes | None, score: float | None
) -> str | None:
    values = [value for value in (doc_id, title, text) if value is not None]

    def decodes(errors: str) -> bool:
        try:
            return all(value.decode("utf-8", errors) is not None for value in values)
        except UnicodeDecodeError:
            return False

    checks = (
        ("null_id", lambda: doc_id is None),
        ("long_id", lambda: doc_id is not None and len(doc_id) > 80),
        ("oversized_field", lambda: title is not None and len(title) > 100),
        ("oversized_text", lambda: text is not None and len(text) > 100),
        ("utf8", lambda: not decodes("strict")),
        ("nul_character", lambda: any(b"\0" in value for value in values)),
        ("empty_id", lambda: doc_id is not None and not doc_id.decode().strip()),
        ("long_id", lambda: doc_id is not None and len(doc_id.decode()) > 20),
        ("null_text", lambda: text is None),
        ("empty_text", lambda: text is not None and not text.decode().strip()),
        ("nan_metadata", lambda: score is not None and score != score),
    )
    return next((reason for reason, applies in checks if applies()), None)


@settings(max_examples=60)
@given(poison_rows, st.integers(1, 9), st.integers(1, 9), st.integers(1, 60), st.booleans())
def test_poison_corpus_loses_no_row_and_names_each_reason(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[tuple[bytes | None, bytes | None, bytes | None, float | None]],
    row_group_size: int,
    batch_rows: int,
    batch_bytes: int,
    use_dictionary: bool,
) -> None:
    path = tmp_path_factory.getbasetemp() / "poison.parquet"
    ids, texts, titles, scores = zip(*rows, strict=True)
    table = pa.table(
        {
            "id": raw_strings(*ids),
            "text": raw_strings(*texts),
            "title": raw_strings(*titles),
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
        patch.setattr(
            parquet, "GROUP_BUDGET_BATCHES", 1 << 20
        )  # batches of a few bytes would make every row group a suspect
        staged, rejected = read(path, config=config)
    expected = [expected_reason(*row) for row in rows]
    utf8 = {"invalid_utf8": "utf8"}
    assert [(index, utf8.get(reason, reason)) for index, reason in reasons(rejected)] == [
        (index, reason) for index, reason in enumerate(expected) if reason is not None
    ]
    assert [(row["doc_id"], row["text"]) for row in staged] == [
        (row[0].decode(), row[1].decode())
        for row, reason in zip(rows, expected, strict=True)
        if reason is None and row[0] is not None and row[1] is not None
    ]
