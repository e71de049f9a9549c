"""Compare an ingest with its encoder alone: time, time of an unchanged rerun, memory at ten times the corpus.

Times leave out start-up (imports, loading the model), which does not depend on the size.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.line.build_index import build_index

from tests.benchmarks.timing import timed

pytestmark = pytest.mark.bench

PASSAGES = 5_000
MEMORY_DOCUMENTS = 1_600
MEASURE_PEAK = """
import resource, sys
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.config import IngestConfig
report = build_index([sys.argv[1]], sys.argv[2], "c", IngestConfig())
print(report.rows, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def test_bench_ingest_against_its_encoder(
    tmp_path: Path,
    sample_passages: Callable[[int], list[str]],
    write_passages: Callable[[Path, list[str]], str],
) -> None:
    texts = sample_passages(PASSAGES)
    source = write_passages(tmp_path / "passages.parquet", texts)
    config = IngestConfig()
    encoder = DocumentEncoder(config.encoder)
    encoder.encode(texts[:200])
    seconds: dict[str, list[float]] = {"encoder": [], "ingest": [], "rerun": []}
    for turn in range(2):
        seconds["encoder"].append(timed(lambda: encoder.encode(texts))[0])
        ingest = partial(build_index, [source], tmp_path / f"root-{turn}", "c", config)
        seconds["ingest"].append(timed(ingest)[0])
        seconds["rerun"].append(timed(ingest)[0])
    best = {name: min(values) for name, values in seconds.items()}
    report = build_index([source], tmp_path / "root-0", "c", config)
    print(
        f"\ntokens={report.tokens} encoder={best['encoder']:.2f}s ingest={best['ingest']:.2f}s "
        f"rerun={best['rerun']:.2f}s"
    )
    print(f"ingest / encoder = {best['ingest'] / best['encoder']:.3f}  (goal <= 1.2)")
    print(f"unchanged rerun / ingest = {best['rerun'] / best['ingest']:.4f}  (goal <= 0.05)")
    assert (report.unchanged, report.encoded) == (PASSAGES, 0)


def test_bench_peak_memory_at_ten_times_the_corpus(
    tmp_path: Path,
    sample_passages: Callable[[int], list[str]],
    write_passages: Callable[[Path, list[str]], str],
) -> None:
    texts = sample_passages(10 * MEMORY_DOCUMENTS)
    peaks = []
    for count in (MEMORY_DOCUMENTS, 10 * MEMORY_DOCUMENTS):
        source = write_passages(tmp_path / f"{count}.parquet", texts[:count])
        command = [sys.executable, "-c", MEASURE_PEAK, source, str(tmp_path / f"root-{count}")]
        rows, peak_mib = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert int(rows) == count
        peaks.append(float(peak_mib))
    print(
        f"\npeak {peaks[0]:.0f} MiB at {MEMORY_DOCUMENTS} documents, {peaks[1]:.0f} MiB at "
        f"{10 * MEMORY_DOCUMENTS}"
    )
    print(f"ratio = {peaks[1] / peaks[0]:.3f}  (goal <= 1.2)")
