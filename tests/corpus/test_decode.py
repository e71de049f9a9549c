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


def dictionary_of_one(path: Path) -> None:
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(500, np.int32)), pa.array([LONG]))
    pq.write_table(pa.table({"id": np.arange(500), "text": text}), path, store_schema=False)


def dictionary_after_short_rows(path: Path) -> None:
    indices = np.zeros(20_000, np.int32)
    indices[-500:] = 1
    text = pa.DictionaryArray.from_arrays(pa.array(indices), pa.array(["short", LONG]))
    pq.write_table(pa.table({"id": np.arange(20_000), "text": text}), path)


def run_of_nulls(path: Path) -> None:
    pq.write_table(
        pa.table({"id": np.zeros(1_000_000, np.int64), "text": pa.nulls(1_000_000, pa.string())}),
        path,
        row_group_size=1_000_000,
    )


def page_of_one_letter(path: Path) -> None:
    pq.write_table(
        pa.table({"id": ["a", "b"], "text": ["short", "y" * 120_000_000]}),
        path,
        compression="zstd",
        use_dictionary=False,
    )


def document_too_large(path: Path) -> None:
    random = np.random.default_rng(0).integers(97, 123, 50_000_000, np.uint8).tobytes().decode()
    pq.write_table(
        pa.table({"id": np.arange(50), "text": ["short"] * 25 + [random] + ["short"] * 24}),
        path,
        compression="none",
    )


def list_of_equal_numbers(path: Path) -> None:
    pq.write_table(
        pa.table({"id": ["a"], "text": ["t"], "numbers": [np.zeros(50_000_000, np.int64)]}),
        path,
        compression="zstd",
    )


def list_of_equal_strings(path: Path) -> None:
    # The dictionary comes after leading rows that have no element, and one row holds it 500 times.
    tags = pa.array([[]] * 100 + [[LONG] * 500, ["a"]], pa.list_(pa.string()))
    pq.write_table(
        pa.table({"id": np.arange(102), "text": ["t"] * 102, "tags": tags}), path, compression="zstd"
    )


def prefixes_of_prefixes(path: Path) -> None:
    columns = {"id": np.arange(500), "text": [LONG] * 500}
    pq.write_table(
        pa.table(columns), path, use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"}
    )


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize(
    ("bomb", "rows", "reasons"),
    [
        (dictionary_of_one, 500, {}),
        pytest.param(dictionary_after_short_rows, 20_000, {}, marks=pytest.mark.slow),
        pytest.param(run_of_nulls, 0, {"null_text": 1_000_000}, marks=pytest.mark.slow),
        (page_of_one_letter, 0, {"damaged_rows": 2}),
        (document_too_large, 49, {"oversized_text": 1}),
        (list_of_equal_numbers, 0, {"damaged_rows": 1}),
        pytest.param(list_of_equal_strings, 101, {"oversized_field": 1}, marks=pytest.mark.slow),
        pytest.param(prefixes_of_prefixes, 500, {}, marks=pytest.mark.slow),
    ],
)
def test_bomb_is_read_within_the_memory_budget(
    tmp_path: Path, bomb: Callable[[Path], None], rows: int, reasons: dict[str, int]
) -> None:
    path = tmp_path / "bomb.parquet"
    bomb(path)
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
