"""A nightly ingest of a thousand files, none or one of them changed; a tiny model, as few texts are encoded.

All documents but those of the first file are written to the tables without an encoder, with random vectors.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.config import ClusterConfig, ContextConfig, EncoderConfig, IndexConfig, IngestConfig
from cairn.pipeline.corpus.scan import read_checked, scan_sources
from cairn.pipeline.index.lance_index import LanceTables
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.publish import (
    GenerationFacts,
    next_generation_number,
    prepare_writer,
    publish_generation,
)
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.types import IngestReport

from tests.tiny_models import TINY_WORDS

pytestmark = pytest.mark.bench

FILES = 1_000
WORDS_A_TEXT = 30
SETTLED_SECONDS = 3.0
"""A file written within the last two seconds is read again."""


def write_file(folder: Path, number: int, rows: int, version: int = 0) -> None:
    """Write a file; another version differs in its first document."""
    rng = np.random.default_rng(number)
    drawn = rng.choice([word for word in TINY_WORDS if not word.startswith("#")], (rows, WORDS_A_TEXT))
    texts = [" ".join(words) for words in drawn]
    texts[0] += " cat" * version
    ids = [f"document-{number * rows + row:08d}" for row in range(rows)]
    pq.write_table(pa.table({"id": ids, "text": texts}), folder / f"{number:05d}.parquet")


def publish_rest(layout: CollectionLayout, source: Path, config: IngestConfig) -> None:
    """Publish what the source holds beyond its first file."""

    def batches(table: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        scan = scan_sources([str(source)], config.corpus)
        for batch in read_checked(
            replace(scan, files=scan.files[1:], file_rows=scan.file_rows[1:]), config.corpus
        ):
            rows = batch.rows
            count = rows.num_rows
            vectors = (
                np.random.default_rng(count).standard_normal((count, tables.vector_dim)).astype(np.float32)
            )
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            ids = rows.column("doc_id").to_pylist()
            made = {
                "cluster_id": np.zeros(count, int),
                "num_tokens": [WORDS_A_TEXT] * count,
                "num_chunks": np.ones(count, int),
                "chunk_id": [f"{doc_id}#0" for doc_id in ids],
                "ordinal": np.zeros(count, int),
                "start_char": np.zeros(count, int),
                "end_char": [len(text) for text in rows.column("text").to_pylist()],
                "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), tables.vector_dim),
            }
            columns = [rows.column(f.name) if f.name in rows.schema.names else made[f.name] for f in schema]
            arrays = [pa.array(column, f.type) for column, f in zip(columns, schema, strict=True)]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)

    with layout.writer_lock():
        base = prepare_writer(layout)
        assert base is not None
        tables = LanceTables.open(layout)
        num_rows = scan_sources([str(source)], config.corpus).num_rows - base.documents
        readers = {
            name: pa.RecordBatchReader.from_batches(schema, batches(name, schema))
            for name, schema in tables.schemas.items()
        }
        versions = tables.commit(
            generation=next_generation_number(layout),
            **readers,
            expected_documents=num_rows,
            expected_chunks=num_rows,
        )
        facts = GenerationFacts.of(layout, base, "bench")
        publish_generation(layout, tables, versions, facts, IndexConfig(), since=base.lance_versions)


@pytest.mark.parametrize("num_documents", [200_000, 2_000_000])
def test_bench_nightly_ingest_of_a_thousand_files(
    tmp_path: Path, tiny_model_folder: Path, num_documents: int
) -> None:
    source, root = tmp_path / "corpus", tmp_path / "root"
    source.mkdir()
    rows = num_documents // FILES
    for number in range(FILES):
        write_file(source, number, rows)
    config = IngestConfig(
        encoder=EncoderConfig(model=str(tiny_model_folder), landmark_interval=32, window_tokens=64),
        cluster=ClusterConfig(num_clusters=4),
        context=ContextConfig(context_documents=8),
    )
    build_index([str(source / "00000.parquet")], root, "c", config)
    publish_rest(CollectionLayout(root, "c"), source, config)
    time.sleep(SETTLED_SECONDS)

    def ingest(what: str, **settings: bool) -> IngestReport:
        started = time.process_time()
        report = build_index([str(source)], root, "c", replace(config, **settings))
        seconds = " ".join(f"{stage} {each:.2f}" for stage, each in report.stage_seconds.items())
        processor = time.process_time() - started
        print(
            f"{num_documents:,} documents, {what}: {report.seconds:.2f} s, processor {processor:.2f} s; "
            f"{seconds}"
        )
        return report

    print()
    assert ingest("all read").unchanged == num_documents
    assert ingest("nothing changed").unchanged == num_documents
    for version in (1, 2, 3):
        write_file(source, FILES // 2, rows, version)
        time.sleep(SETTLED_SECONDS)
        assert ingest("one file changed").indexed == 1
    assert ingest("all read again", reread=True).unread_files == 0
    size = CollectionLayout(root, "c").sources_path.stat().st_size
    print(f"record: {size / num_documents:.0f} bytes a document")
