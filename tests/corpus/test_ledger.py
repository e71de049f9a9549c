import sqlite3
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from cairn.pipeline.corpus.ledger import CHANGED, DUPLICATE, ENCODED, NEW, UNCHANGED, Ledger
from cairn.pipeline.corpus.source_record import create_record, sqlite_errors
from cairn.pipeline.errors import DiskFullError
from hypothesis import given, settings
from hypothesis import strategies as st


def sha(content: str) -> str:
    return sha256(content.encode()).hexdigest()


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite") as opened:
        yield opened


def ledger_of(folder: Path, published: dict[str, str]) -> Ledger:
    """Open a ledger of what is published."""
    record = folder / "sources.sqlite"
    create_record(record, "", [([*published], [sha(content) for content in published.values()])])
    return Ledger(folder / "ledger.sqlite", record)


def classify(ledger: Ledger, rows: list[tuple[str, str]]) -> list[int]:
    return ledger.classify([doc_id for doc_id, _ in rows], [sha(content) for _, content in rows]).tolist()


def flat(batches: Iterator[list[str]]) -> list[str]:
    return [doc_id for batch in batches for doc_id in batch]


def oracle(
    published: dict[str, str], encoded: dict[str, str], rows: list[tuple[str, str]]
) -> tuple[list[int], list[str], list[str], list[str]]:
    seen: dict[str, str] = {}
    codes = list[int]()
    for doc_id, content in rows:
        if doc_id in seen:
            codes.append(DUPLICATE)
            continue
        seen[doc_id] = content
        if published.get(doc_id) == content:
            codes.append(UNCHANGED)
        elif encoded.get(doc_id) == content:
            codes.append(ENCODED)
        else:
            codes.append(CHANGED if doc_id in published else NEW)
    replaced = sorted(doc_id for doc_id in published if doc_id in seen and seen[doc_id] != published[doc_id])
    vanished = sorted(doc_id for doc_id in published if doc_id not in seen)
    current = sorted(
        doc_id
        for doc_id in encoded
        if seen.get(doc_id) == encoded[doc_id] and published.get(doc_id) != encoded[doc_id]
    )
    return codes, replaced, vanished, current


ids = st.sampled_from("abcdef")
contents = st.sampled_from(["1", "2", "3"])


@settings(max_examples=60)
@given(
    st.dictionaries(ids, contents),
    st.dictionaries(ids, contents),
    st.lists(st.tuples(ids, contents), max_size=12),
    st.integers(1, 5),
)
def test_ledger_agrees_with_dictionaries(
    tmp_path_factory: pytest.TempPathFactory,
    published: dict[str, str],
    encoded: dict[str, str],
    rows: list[tuple[str, str]],
    batch: int,
) -> None:
    with ledger_of(tmp_path_factory.getbasetemp(), published) as ledger:
        ledger.load_encoded(0, [*encoded], [sha(content) for content in encoded.values()])
        codes = [
            code
            for start in range(0, len(rows), batch)
            for code in classify(ledger, rows[start : start + batch])
        ]
        lists = [flat(ledger.replaced_ids()), flat(ledger.vanished_ids()), flat(ledger.current_in_shard(0))]
    assert (codes, *lists) == oracle(published, encoded, rows)


def test_document_encoded_twice_is_current_in_its_last_shard_alone(ledger: Ledger) -> None:
    ledger.load_encoded(0, ["a", "b"], [sha("1"), sha("1")])
    ledger.load_encoded(3, ["a"], [sha("1")])
    classify(ledger, [("a", "1"), ("b", "1")])
    assert [flat(ledger.current_in_shard(shard)) for shard in (0, 3)] == [["b"], ["a"]]


def test_document_back_at_an_earlier_content_is_encoded_anew(ledger: Ledger) -> None:
    ledger.load_encoded(0, ["a"], [sha("1")])
    ledger.load_encoded(1, ["a"], [sha("2")])
    assert classify(ledger, [("a", "1")]) == [NEW]
    assert [flat(ledger.current_in_shard(shard)) for shard in (0, 1)] == [[], []]


def test_quarantined_id_may_still_come_in_a_good_row(tmp_path: Path) -> None:
    with ledger_of(tmp_path, {"a": "1"}) as ledger:
        ledger.mark_present(["a"])
        assert classify(ledger, [("a", "2")]) == [CHANGED]


def test_batch_larger_than_one_query_is_classified_whole(tmp_path: Path) -> None:
    names = [f"{i:05d}" for i in range(2_500)]
    with ledger_of(tmp_path, dict.fromkeys(names, "1")) as ledger:
        assert ledger.classify(names, [sha("1")] * len(names)).tolist() == [UNCHANGED] * len(names)


def test_opening_forgets_an_older_ledger_even_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"SQLite format 3\0" + b"\xff" * 5_000)
    with Ledger(path) as ledger:
        assert classify(ledger, [("a", "1")]) == [NEW]


def test_full_disk_is_reported_as_try_again() -> None:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    with pytest.raises(DiskFullError, match="writing the ledger"), sqlite_errors():
        raise error


def test_ledger_closed_while_a_list_is_half_read_leaves_no_error(tmp_path: Path) -> None:
    """A commit that fails does that; pytest turns what a collected generator raises into a failure."""
    with ledger_of(tmp_path, {"a": "1"}) as ledger:
        half_read = ledger.vanished_ids()
        assert next(half_read) == ["a"]
    del half_read
