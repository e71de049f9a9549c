"""SIGKILL a re-contextualisation at its commit points: all vectors of the old context or all of the new one, and a rerun goes on."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.build_index import build_index
from jobs.recontextualise import recontextualise
from pipeline.config import ClusterConfig, ContextConfig, EncoderConfig, IngestConfig
from pipeline.index.generation import open_generation
from pipeline.index.lance_index import LanceTables, vectors_of
from pipeline.index.layout import CollectionLayout
from pipeline.index.maintenance import verify_collection

pytestmark = pytest.mark.slow

WORDS = ["stone", "path", "hill", "river", "mark", "way", "old", "mountain", "walk", "mat", "cat"]

KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[4])
from pipeline import durable
durable.observe_commit_points(lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == sys.argv[3] else None)
from test_recontextualise_kills import settings
from jobs.recontextualise import recontextualise
recontextualise(sys.argv[1], "c", settings(Path(sys.argv[2])))
"""


def settings(model: Path) -> IngestConfig:
    return IngestConfig(
        encoder=EncoderConfig(model=str(model), landmark_interval=16, use_context=True),
        cluster=ClusterConfig(num_clusters=2),
        context=ContextConfig(num_documents=4, max_document_tokens=16),
        shard_characters=300,
    )


def corpus(path: Path, first: int, count: int) -> str:
    rows = []
    for number in range(first, first + count):
        rng = np.random.default_rng(number)
        rows.append({"id": f"d{number}", "text": " ".join(rng.choice(WORDS[number % 3 :: 3], size=12 + number % 9))})
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def visible(root: Path) -> dict[str, np.ndarray]:
    """Return every stored vector of the served generation."""
    layout = CollectionLayout(root, "c")
    versions = open_generation(layout).manifest.lance_versions
    tables = LanceTables.open(layout)
    found: dict[str, np.ndarray] = {}
    for table, key in (("documents", "doc_id"), ("chunks", "chunk_id")):
        for batch in tables.scan(table, [key, "vector"], versions):
            found |= dict(zip(batch.column(key).to_pylist(), vectors_of(batch.column("vector")), strict=True))
    return found


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.allclose(vector, other[key], atol=1e-5) for key, vector in one.items())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("drifted")
    config = settings(tiny_model_folder)
    build_index([corpus(folder / "before.parquet", 0, 6)], folder / "old", "c", config)
    build_index([corpus(folder / "more.parquet", 6, 18)], folder / "old", "c", config)
    shutil.copytree(folder / "old", folder / "new")
    recontextualise(folder / "new", "c", config)
    return {"old": folder / "old", "model": tiny_model_folder, "seen-old": visible(folder / "old"), "seen-new": visible(folder / "new")}


@pytest.mark.parametrize(
    "point",
    ["context-written", "shard-written", "documents-deleted", "chunks-deleted", "documents-added", "chunks-added", "generation-renamed"],
)
def test_killed_run_changes_nothing_and_a_rerun_goes_on(world: dict[str, Any], tmp_path: Path, point: str) -> None:
    root = tmp_path / "root"
    shutil.copytree(world["old"], root)
    assert not any(np.allclose(vector, world["seen-new"][key], atol=1e-4) for key, vector in world["seen-old"].items())
    command = [sys.executable, "-c", KILLED, str(root), str(world["model"]), point, str(Path(__file__).parent)]
    killed = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, check=False, timeout=120)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert same(visible(root), world["seen-old"])
    report = recontextualise(root, "c", settings(world["model"]))
    if point != "context-written":
        assert report.encoded < report.documents
    assert same(visible(root), world["seen-new"])
    assert verify_collection(CollectionLayout(root, "c")) == []


def test_ingest_after_a_killed_run_keeps_the_old_context(world: dict[str, Any], tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(world["old"], root)
    command = [sys.executable, "-c", KILLED, str(root), str(world["model"]), "documents-added", str(Path(__file__).parent)]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, check=False, timeout=120)
    build_index([corpus(tmp_path / "one.parquet", 100, 1)], root, "c", settings(world["model"]))
    assert same({key: vector for key, vector in visible(root).items() if not key.startswith("d100")}, world["seen-old"])
    assert verify_collection(CollectionLayout(root, "c")) == []
