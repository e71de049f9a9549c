"""Limits that pages state are those of the code, and README's figures are those of the measurements."""

from __future__ import annotations

import re

import pytest
from cairn.jobs.ray_cluster import pool
from cairn.jobs.schedule.history import KEPT_RUNS
from cairn.pipeline import search_options as options
from cairn.pipeline.cluster.asymmetric_kmeans import MAX_CLUSTERS
from cairn.pipeline.config import ClusterConfig, CorpusConfig, IndexConfig
from cairn.pipeline.context import drift
from cairn.pipeline.index.faiss_build import MAX_LISTS
from cairn.pipeline.index.lease import LEASE_SECONDS
from cairn.pipeline.model.landmark_reader import INITIAL_GATE
from cairn.pipeline.serve.maps import corpus_map, map_cache, map_files
from cairn.pipeline.serve.schemas import MAX_QUERIES
from cairn.pipeline.serve.settings import MAX_BODY_BYTES

from tests.docs.pages import DOCS, README, tables

CLUSTER, CORPUS, INDEX = ClusterConfig(), CorpusConfig(), IndexConfig()
STATED = {
    "guide/ingest.md": [
        f"| id too long | {CORPUS.max_id_characters:,} characters |",
        f"| text too large | {CORPUS.max_document_bytes >> 20} MiB |",
        f"up to {INDEX.flat_max_vectors:,} vectors",
        f"from {INDEX.rabitq_min_vectors:,} on",
    ],
    "guide/search.md": [
        f"| a query | {options.MAX_QUERY_BYTES:,} bytes in UTF-8 |",
        f"1 to {options.MAX_TOP_K} |",
        f"0 to {options.MAX_PASSAGES} |",
    ],
    "guide/serve.md": [
        f"| body of a request | {MAX_BODY_BYTES >> 20} MiB |",
        f"| queries in a list | {MAX_QUERIES} |",
    ],
    "guide/nightly.md": [f"the last {KEPT_RUNS:,} runs"],
    "concepts/context.md": [
        f"up to {CLUSTER.max_sample_documents:,} documents",
        f"takes {CLUSTER.num_iterations} iterations of K-means",
        f"at most {MAX_CLUSTERS}.",
        f"| none | fewer than {drift.SLIGHT_DISTANCE:.0%} ".replace("%", " %"),
        f"| re-contextualise | {drift.LARGE_DISTANCE:.0%} ".replace("%", " %"),
    ],
    "design/decisions/landmark-attention.md": [f"starts at {INITIAL_GATE:g},"],
    "design/decisions/kmeans-run.md": [
        f"takes {CLUSTER.num_iterations} iterations",
        f"at most {MAX_CLUSTERS}",
    ],
    "design/decisions/clusters-in-one-process.md": [f"sample of {CLUSTER.max_sample_documents:,} documents"],
    "design/decisions/map-on-demand.md": [
        f"{corpus_map.FIRST_SAMPLE:,} evenly spread documents",
        f"Up to {corpus_map.MAX_SAMPLE:,} begin between",
        f"up to {corpus_map.MAX_DOCUMENTS:,}",
        f"at most {map_cache.MAX_ENTRIES} in memory and {map_files.MAX_FILES} over a restart",
    ],
    "design/object-store.md": [f"It lasts {LEASE_SECONDS:g} s"],
    "design/scale.md": [f"stop at {MAX_LISTS:,} lists"],
    "design/ray.md": [
        {4: "cost four workers"}[pool.MAX_ATTEMPTS],
        {60.0: "at least a minute"}[pool.LEAST_DEADLINE_SECONDS],
        {10.0: "ten times what the slowest shard took"}[pool.DEADLINE_FACTOR],
    ],
}


@pytest.mark.parametrize("page", STATED)
def test_figures_that_a_page_states_are_those_of_the_code(page: str) -> None:
    text = " ".join((DOCS / page).read_text("utf-8").split())
    assert [phrase for phrase in STATED[page] if phrase not in text] == []


def test_quality_in_readme_is_the_mean_of_the_measurements() -> None:
    columns = ["chunks", "chunks and BM25", "Cairn, vectors", "Cairn"]
    measured = [
        [dict(zip(head, row, strict=True))[column] for column in columns]
        for head, rows in tables(DOCS / "measurements.md")
        if head[0] == "set" and set(columns) <= set(head)
        for row in rows
        if row[0] == "mean"
    ]
    shown = [
        [row[head.index(column)].strip("*") for column in columns]
        for head, rows in tables(README)
        if head[0] == "measure"
        for row in rows
    ]
    assert len(shown) == 2
    assert shown == measured


def test_means_of_the_measurements_are_means() -> None:
    for head, rows in tables(DOCS / "measurements.md"):
        if head[0] == "set" and rows[-1][0] == "mean":
            for column in range(1, len(head)):
                values = [float(row[column]) for row in rows]
                assert abs(sum(values[:-1]) / len(values[:-1]) - values[-1]) < 0.001, head[column]


def test_speed_in_readme_is_in_the_measurements() -> None:
    page = (DOCS / "measurements.md").read_text("utf-8")
    rows = [row for head, rows in tables(README) if head[:2] == ["what", "compared with"] for row in rows]
    figures = [figure for row in rows for figure in re.findall(r"\d+\.\d+", row[-1])]
    assert len(figures) >= 8
    assert [figure for figure in figures if figure not in page] == []
