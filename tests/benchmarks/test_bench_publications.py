"""What many small publications cost beside one bulk ingest, and what they do to searches in between.

``CAIRN_BENCH_PUBLICATIONS`` (1,000) of ten documents each, onto ``CAIRN_BENCH_CHUNKS`` (200,000) chunks of
synthetic vectors; no encoder. Searches are of one other process, which opens each new generation and asks
FAISS from one thread, as :mod:`cairn.pipeline.search.searcher` does for one query.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.tables import TABLES, open_pinned_dataset

from tests.benchmarks.test_bench_segments import CHUNKS_A_DOCUMENT, publish

pytestmark = pytest.mark.bench

PUBLICATIONS = int(os.environ.get("CAIRN_BENCH_PUBLICATIONS", "1000"))
CHUNKS = int(os.environ.get("CAIRN_BENCH_CHUNKS", "200000"))
DOCUMENTS_A_PUBLICATION = 10
QUIET_SECONDS = 20.0
STEADY = 20
"""Publications after which memory is looked at first."""

# Search argv[2] until a line comes; answer with the median in ms, MiB resident and open files; and so on.
SEARCHER = """
import select, sys, time
import numpy as np, psutil
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_bench_segments import TOPICS_TV, vectors_of
from cairn.pipeline.index.faiss_index import one_faiss_thread
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.search.candidates import nominate_by_chunk, nominate_by_document
layout = CollectionLayout(Path(sys.argv[2]), "bench")
rng, generation, seconds, here = np.random.default_rng(1), open_generation(layout), [], psutil.Process()
while True:
    if layout.current_generation_number() != generation.number:
        generation = open_generation(layout)
    query = vectors_of(rng, rng.integers(0, len(TOPICS_TV), 1))
    started = time.perf_counter()
    with one_faiss_thread():
        nominate_by_document(generation, query, 50, None)
        nominate_by_chunk(generation, query, 200, 50, None)
    seconds.append(time.perf_counter() - started)
    time.sleep(0.02)
    if select.select([sys.stdin], [], [], 0)[0]:
        if not sys.stdin.readline():
            break
        print(1e3 * np.median(seconds), here.memory_info().rss >> 20, here.num_fds(), flush=True)
        seconds.clear()
"""


def test_bench_many_small_publications(tmp_path: Path) -> None:
    first, added = CHUNKS // CHUNKS_A_DOCUMENT, PUBLICATIONS * DOCUMENTS_A_PUBLICATION
    bulk, many = (CollectionLayout(tmp_path / name, "bench") for name in ("bulk", "many"))
    for layout in (bulk, many):
        publish(layout, 0, first)
    bulk_seconds = publish(bulk, first, first + added)
    command = [sys.executable, "-c", SEARCHER, str(Path(__file__).parent), str(many.root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as searcher:
        assert searcher.stdin is not None
        assert searcher.stdout is not None

        def ask() -> tuple[float, int, int]:
            print("asked", file=searcher.stdin, flush=True)
            p50, mebibytes, files = searcher.stdout.readline().split()
            return float(p50), int(mebibytes), int(files)

        ask()
        time.sleep(QUIET_SECONDS)
        quiet = ask()
        seconds, steady = 0.0, psutil.Process().memory_info().rss
        for number in range(PUBLICATIONS):
            begin = first + number * DOCUMENTS_A_PUBLICATION
            seconds += publish(many, begin, begin + DOCUMENTS_A_PUBLICATION)
            if number == STEADY:
                steady = psutil.Process().memory_info().rss
        busy = ask()
        searcher.stdin.close()
    here = psutil.Process()
    generation = open_generation(many)
    tables = [
        open_pinned_dataset(many.lance_folder, name, generation.manifest.lance_versions[name])
        for name in TABLES
    ]
    print(
        f"\n{CHUNKS:,} chunks, {PUBLICATIONS:,} publications of {DOCUMENTS_A_PUBLICATION} documents: "
        f"{seconds:.1f} s, in bulk {bulk_seconds:.1f} s, {seconds / bulk_seconds:.1f} x (goal <= 6); p50 of "
        f"a search {quiet[0]:.2f} ms, with them {busy[0]:.2f} ms, {busy[0] / quiet[0]:.2f} x (goal <= 1.3)\n"
        f"afterwards {len(generation.segments)} segments, {sum(1 for _ in many.folder.rglob('*'))} files, "
        f"Lance fragments {[len(table.get_fragments()) for table in tables]} and versions "
        f"{[len(table.versions()) for table in tables]}; the writer {here.num_fds()} descriptors and "
        f"{(here.memory_info().rss - steady) >> 20} MiB more than after {STEADY} publications; the searcher "
        f"{quiet[2]} and {busy[2]} descriptors, {quiet[1]} and {busy[1]} MiB"
    )
