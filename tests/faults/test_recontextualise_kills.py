"""SIGKILL a re-contextualisation at its commit points.

All vectors of the old context or all of the new one, and a rerun goes on.
"""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.config import ClusterConfig, ContextConfig, EncoderConfig, IngestConfig
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.lance_index import LanceTables, vectors_of
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import verify_collection
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.recontextualise import recontextualise

pytestmark = pytest.mark.slow

WORDS = ["stone", "path", "hill", "river", "mark", "way", "old", "mountain", "walk", "mat", "cat"]

WORK = """
import cairn.pipeline.line.encoder_worker
from test_recontextualise_kills import settings
from cairn.pipeline.line.recontextualise import recontextualise
def work(root, model):
    recontextualise(root, "c", settings(Path(model)))
"""


def settings(model: Path) -> IngestConfig:
    return IngestConfig(
        encoder=EncoderConfig(model=str(model), landmark_interval=16, use_context=True),
        cluster=ClusterConfig(num_clusters=2),
        context=ContextConfig(context_documents=4, max_document_tokens=16),
        shard_characters=300,
    )


def corpus(path: Path, first: int, count: int) -> str:
    rows = []
    for number in range(first, first + count):
        rng = np.random.default_rng(number)
        rows.append(
            {"id": f"d{number}", "text": " ".join(rng.choice(WORDS[number % 3 :: 3], size=12 + number % 9))}
        )
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
    return one.keys() == other.keys() and all(
        np.allclose(vector, other[key], atol=1e-5) for key, vector in one.items()
    )


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model_folder: Path,
    start_forks: Callable[[str], Callable[..., int]],
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("drifted")
    config = settings(tiny_model_folder)
    build_index([corpus(folder / "before.parquet", 0, 6)], folder / "old", "c", config)
    build_index([corpus(folder / "more.parquet", 6, 18)], folder / "old", "c", config)
    shutil.copytree(folder / "old", folder / "new")
    recontextualise(folder / "new", "c", config)
    roots = {"old": folder / "old", "new": folder / "new"}
    work_and_die = start_forks(WORK)
    return {
        **roots,
        "model": tiny_model_folder,
        "die": work_and_die,
        **{f"seen-{name}": visible(root) for name, root in roots.items()},
    }


@pytest.mark.parametrize(
    "point",
    [
        "context-written",
        "shard-written",
        "documents-deleted",
        "chunks-deleted",
        "documents-added",
        "chunks-added",
        "generation-renamed",
    ],
)
def test_killed_run_changes_nothing_and_a_rerun_goes_on(
    world: dict[str, Any], tmp_path: Path, point: str
) -> None:
    root = tmp_path / "root"
    shutil.copytree(world["old"], root)
    assert not any(
        np.allclose(vector, world["seen-new"][key], atol=1e-4) for key, vector in world["seen-old"].items()
    )
    assert world["die"](point, str(root), str(world["model"])) == -signal.SIGKILL
    assert same(visible(root), world["seen-old"])
    report = recontextualise(root, "c", settings(world["model"]))
    if point != "context-written":
        assert report.encoded < report.documents
    assert same(visible(root), world["seen-new"])
    assert verify_collection(CollectionLayout(root, "c")) == []


def test_ingest_after_a_killed_run_keeps_the_old_context(world: dict[str, Any], tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(world["old"], root)
    assert world["die"]("documents-added", str(root), str(world["model"])) == -signal.SIGKILL
    build_index([corpus(tmp_path / "one.parquet", 100, 1)], root, "c", settings(world["model"]))
    assert same(
        {key: vector for key, vector in visible(root).items() if not key.startswith("d100")},
        world["seen-old"],
    )
    assert verify_collection(CollectionLayout(root, "c")) == []
