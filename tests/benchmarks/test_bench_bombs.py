"""Measure what hostile and tiny rows cost before anything is encoded: processor time and peak memory.

Run ``python -m pytest -m bench -p no:xdist -s tests/benchmarks/test_bench_bombs.py``. Each corpus is checked,
compared with the ledger and staged in a process of its own. Goals: a bomb of 2.8 GB and twenty million null
rows within 60 s and 700 MB, a million tiny rows within 60 s and 800 MB.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.corpus.test_decode import dictionary_into_gigabytes

pytestmark = pytest.mark.bench

NULL_ROWS, TINY_ROWS = 20_000_000, 1_000_000
STAGER = """
import json, sys, time
from pathlib import Path
from cairn.pipeline.config import CorpusConfig
from cairn.pipeline.corpus.scan import scan_sources
from cairn.pipeline.corpus.ledger import Ledger
from cairn.pipeline.corpus.quarantine import quarantine_writer
from cairn.pipeline.corpus.staging import stage_changes
from cairn.pipeline.types import silent_progress

folder, config = Path(sys.argv[1]), CorpusConfig()
scan = scan_sources([str(folder / "corpus.parquet")], config)
with Ledger(folder / "ledger.sqlite") as ledger, quarantine_writer(folder / "quarantine.parquet") as refused:
    staged = stage_changes(scan, config, ledger, folder / "staged", 1_000_000, refused, silent_progress)
with open("/proc/self/status") as status:
    peak = next(int(line.split()[1]) / 1000 for line in status if line.startswith("VmHWM"))
print(json.dumps({"seconds": time.process_time(), "peak_mb": peak, "staged": str(staged)[:200]}))
"""


def null_rows(path: Path) -> None:
    columns = {"id": np.zeros(NULL_ROWS, np.int64), "text": pa.nulls(NULL_ROWS, pa.string())}
    pq.write_table(pa.table(columns), path, row_group_size=NULL_ROWS)


def tiny_rows(path: Path) -> None:
    columns = {"id": np.arange(TINY_ROWS), "text": [f"tiny {row}" for row in range(TINY_ROWS)]}
    pq.write_table(pa.table(columns), path)


@pytest.mark.parametrize(
    ("corpus", "max_mb"), [(dictionary_into_gigabytes, 700), (null_rows, 700), (tiny_rows, 800)]
)
def test_corpus_is_staged_within_bounds(tmp_path: Path, corpus: Callable[[Path], None], max_mb: int) -> None:
    corpus(tmp_path / "corpus.parquet")
    said = subprocess.run(
        [sys.executable, "-c", STAGER, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr
    found = json.loads(said.stdout)
    print(f"\n{corpus.__name__}: {found['seconds']:.1f} s of processor, {found['peak_mb']:.0f} MB")
    assert found["seconds"] <= 60
    assert found["peak_mb"] <= max_mb
