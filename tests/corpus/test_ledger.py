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
    published: dict[str, str], shards: list[dict[str, str]], refused: set[str], rows: list[tuple[str, str]]
) -> tuple[list[int], list[str], list[str], list[list[str]]]:
    encoded = {
        doc_id: (content, number) for number, shard in enumerate(shards) for doc_id, content in shard.items()
    }
    seen: dict[str, str] = {}
    codes = list[int]()
    for doc_id, content in rows:
        if doc_id in seen:
            codes.append(DUPLICATE)
            continue
        seen[doc_id] = content
        if published.get(doc_id) == content:
            codes.append(UNCHANGED)
        elif encoded.get(doc_id, ("", 0))[0] == content:
            codes.append(ENCODED)
        else:
            codes.append(CHANGED if doc_id in published else NEW)
    replaced = sorted(
        doc_id for doc_id in published if seen.get(doc_id, published[doc_id]) != published[doc_id]
    )
    vanished = sorted(doc_id for doc_id in published if doc_id not in seen and doc_id not in refused)
    met = [doc_id for doc_id, content in seen.items() if published.get(doc_id) != content]
    current = [
        sorted(doc_id for doc_id in met if encoded.get(doc_id) == (seen[doc_id], number))
        for number in range(len(shards))
    ]
    return codes, replaced, vanished, current


ids = st.sampled_from("abcdef")
contents = st.sampled_from(["1", "2", "3"])


@settings(max_examples=100)
@given(
    st.dictionaries(ids, contents),
    st.lists(st.dictionaries(ids, contents), max_size=3),
    st.sets(ids, max_size=2),
    st.lists(st.tuples(ids, contents), max_size=12),
    st.integers(1, 5),
)
def test_ledger_agrees_with_dictionaries(
    tmp_path_factory: pytest.TempPathFactory,
    published: dict[str, str],
    shards: list[dict[str, str]],
    refused: set[str],
    rows: list[tuple[str, str]],
    batch: int,
) -> None:
    with ledger_of(tmp_path_factory.getbasetemp(), published) as ledger:
        for number, shard in enumerate(shards):
            ledger.load_encoded(number, [*shard], [sha(content) for content in shard.values()])
        ledger.mark_present([*refused])
        codes = [
            code
            for start in range(0, len(rows), batch)
            for code in classify(ledger, rows[start : start + batch])
        ]
        current = [flat(ledger.current_in_shard(number)) for number in range(len(shards))]
        lists = (flat(ledger.replaced_ids()), flat(ledger.vanished_ids()), current)
    assert (codes, *lists) == oracle(published, shards, refused, rows)


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
