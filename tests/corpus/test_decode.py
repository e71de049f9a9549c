"""Parquet bombs, read in a process of their own so that its peak memory is theirs alone."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.formats.format import DECODE_ERRORS
from cairn.pipeline.corpus.formats.parquet import (
    check_column_metadata,
    leaves_of,
    open_parquet,
    plan_reads,
)

BUDGET_BYTES = 300 << 20

READER = """
import collections, json, sys
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.scan import read_checked, scan_sources

def peak_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

before = peak_bytes()
config = CorpusConfig()
rows, reasons = 0, collections.Counter()
for batch in read_checked(scan_sources([sys.argv[1]], config), config):
    rows += batch.rows.num_rows
    reasons.update(batch.rejected.column("reason").to_pylist())
print(json.dumps({"rows": rows, "reasons": reasons, "grown_bytes": peak_bytes() - before}))
"""

LONG = "x" * 1_000_000
SLOW = pytest.mark.slow


def repeated(*entries: str, indices: np.ndarray) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(indices), pa.array(entries))


def large(num_bytes: int) -> str:
    return np.random.default_rng(0).integers(97, 123, num_bytes, np.uint8).tobytes().decode()


BOMBS: dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any]]]] = {
    "dictionary of one": lambda: (
        {"id": np.arange(500), "text": repeated(LONG, indices=np.zeros(500, np.int32))},
        {"store_schema": False},
    ),
    "dictionary after short rows": lambda: (
        {
            "id": np.arange(20_000),
            "text": repeated("short", LONG, indices=(np.arange(20_000) >= 19_500).astype(np.int32)),
        },
        {},
    ),
    "run of nulls": lambda: (
        {"id": np.zeros(1_000_000, np.int64), "text": pa.nulls(1_000_000, pa.string())},
        {"row_group_size": 1_000_000},
    ),
    "page of one letter": lambda: (
        {"id": ["a", "b"], "text": ["short", "y" * 120_000_000]},
        {"compression": "zstd", "use_dictionary": False},
    ),
    "document too large": lambda: (
        {"id": np.arange(50), "text": ["short"] * 25 + [large(50_000_000)] + ["short"] * 24},
        {"compression": "none"},
    ),
    "list of equal numbers": lambda: (
        {"id": ["a"], "text": ["t"], "numbers": [np.zeros(50_000_000, np.int64)]},
        {"compression": "zstd"},
    ),
    # The dictionary comes after leading rows that have no element, and one row holds it 500 times.
    "list of equal strings": lambda: (
        {"id": np.arange(102), "text": ["t"] * 102, "tags": [[]] * 100 + [[LONG] * 500, ["a"]]},
        {"compression": "zstd"},
    ),
    "prefixes of prefixes": lambda: (
        {"id": np.arange(500), "text": [LONG] * 500},
        {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}},
    ),
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize(
    ("bomb", "rows", "reasons"),
    [
        ("dictionary of one", 500, {}),
        pytest.param("dictionary after short rows", 20_000, {}, marks=SLOW),
        pytest.param("run of nulls", 0, {"null_text": 1_000_000}, marks=SLOW),
        ("page of one letter", 0, {"damaged_rows": 2}),
        ("document too large", 49, {"oversized_text": 1}),
        ("list of equal numbers", 0, {"damaged_rows": 1}),
        pytest.param("list of equal strings", 101, {"oversized_field": 1}, marks=SLOW),
        pytest.param("prefixes of prefixes", 500, {}, marks=SLOW),
    ],
)
def test_bomb_is_read_within_the_memory_budget(
    tmp_path: Path, bomb: str, rows: int, reasons: dict[str, int]
) -> None:
    path = tmp_path / "bomb.parquet"
    columns, options = BOMBS[bomb]()
    pq.write_table(pa.table(columns), path, **options)
    result: dict[str, Any] = json.loads(
        subprocess.run(
            [sys.executable, "-c", READER, str(path)], check=True, capture_output=True, text=True
        ).stdout
    )
    assert (result["rows"], result["reasons"]) == (rows, reasons)
    assert result["grown_bytes"] < BUDGET_BYTES


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([f"{i:07d}" * 50_000 for i in range(100)], (48, [])),  # 16 MiB of 350,000 bytes each
        ([LONG] * 100, (1_024, ["text"])),
        ([None] * 200 + [LONG] * 100, (1_024, ["text"])),
    ],
    ids=["long rows", "long entries", "long entries behind nulls"],
)
def test_plan_takes_few_long_rows_at_a_time_and_keeps_dictionaries_of_long_entries(
    tmp_path: Path, texts: list[str | None], expected: tuple[int, Sequence[str]]
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), path)
    with path.open("rb") as file, pa.PythonFile(file) as stream:
        metadata = pq.read_metadata(path)
        rows, as_dictionary = plan_reads(
            stream, metadata, 0, leaves_of(metadata, ["id", "text"]), CorpusConfig()
        )
    assert (rows, as_dictionary) == (pytest.approx(expected[0], abs=1), expected[1])


def test_damaged_column_metadata_raises_before_arrow_ends_the_process(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": ["a", None]}), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    raised = set[str]()
    for position in range(len(content) - 8 - int.from_bytes(content[-8:-4], "little"), len(content) - 8):
        stream = pa.BufferReader(
            content[:position] + bytes([content[position] ^ 2]) + content[position + 1 :]
        )
        try:
            metadata = open_parquet(stream).metadata
            for index in range(metadata.num_row_groups):
                check_column_metadata(stream, metadata, index, leaves_of(metadata, ["id"]))
                metadata.row_group(index).column(0)  # ends the process on damage
        except DECODE_ERRORS as error:
            raised.add(str(error))
    assert any("histogram size mismatch" in sentence for sentence in raised)
