"""SIGKILL an ingest at every commit point (reliability.

A reader sees the old or the new generation, never a mix; a rerun converges).
"""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.config import ClusterConfig, ContextConfig, EncoderConfig, IngestConfig
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.lance_index import LanceTables
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import verify_collection
from cairn.pipeline.index.publish import COMMIT_POINTS
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.compatibility import stored_settings

pytestmark = pytest.mark.slow

INGEST_POINTS = ("clusters-written", "context-written", "shard-chunks-written", "shard-written")
LAST_POINT = "sources-recorded"
WORDS = ["stone", "path", "hill", "river", "mark", "way", "old", "mountain", "walk", "mat", "cat"]

# Ingest a corpus into a root with a model.
WORK = """
import cairn.pipeline.encode.documents, cairn.pipeline.model.backbone_loader  # torch first
from test_ingest_kills import settings
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.compatibility import stored_settings
def work(root, corpus, model):
    build_index([corpus], root, "c", settings(Path(model)))
"""


def settings(model: Path) -> IngestConfig:
    return IngestConfig(
        encoder=EncoderConfig(
            model=str(model), landmark_interval=16, window_tokens=64, window_overlap_tokens=16
        ),
        cluster=ClusterConfig(num_clusters=2),
        context=ContextConfig(context_documents=4, max_document_tokens=32),
        shard_characters=300,
    )


def corpus(path: Path, versions: dict[int, int]) -> str:
    rows = []
    for number, version in versions.items():
        rng = np.random.default_rng([number, version])
        rows.append({"id": f"d{number}", "text": " ".join(rng.choice(WORDS, size=12 + number % 9))})
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def visible(root: Path) -> dict[str, tuple[str, int]]:
    """Return what a reader sees.

    Each document's text hash and number of chunks, counted in the chunks themselves.
    """
    layout = CollectionLayout(root, "c")
    generation = open_generation(layout)
    versions = generation.manifest.lance_versions
    tables = LanceTables.open(layout)
    documents = pa.Table.from_batches(
        tables.scan("documents", ["doc_id", "content_sha256"], versions)
    ).to_pylist()
    chunks = pa.Table.from_batches(tables.scan("chunks", ["doc_id"], versions)).column("doc_id").to_pylist()
    assert len(documents) == generation.num_documents == len({row["doc_id"] for row in documents})
    return {row["doc_id"]: (row["content_sha256"], chunks.count(row["doc_id"])) for row in documents}


@pytest.fixture(scope="module")
def world(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_model_folder: Path,
    start_forks: Callable[[str], Callable[..., int]],
) -> dict[str, Any]:
    """Build a collection of an old corpus, and what it becomes with the new one.

    Two documents changed, three added, one gone.
    """
    folder = tmp_path_factory.mktemp("kills")
    old = corpus(folder / "old.parquet", dict.fromkeys(range(14), 0))
    new = corpus(folder / "new.parquet", {**dict.fromkeys(range(1, 17), 0), 3: 1, 7: 1})
    config = settings(tiny_model_folder)
    build_index([old], folder / "old", "c", config)
    shutil.copytree(folder / "old", folder / "both")
    build_index([new], folder / "both", "c", config)
    build_index([new], folder / "new", "c", config)
    roots = {name: folder / name for name in ("old", "both", "new")}
    seen = {f"seen-{name}": visible(root) for name, root in roots.items()}
    return {"roots": roots, "new": new, "model": tiny_model_folder, "ingest": start_forks(WORK), **seen}


def killed_ingest(world: dict[str, Any], root: Path, point: str) -> int:
    return world["ingest"](point, str(root), world["new"], str(world["model"]))


@pytest.mark.parametrize(
    "point",
    [
        *INGEST_POINTS[2:],
        *(point for point in COMMIT_POINTS if not point.endswith("-rolled-back")),
        LAST_POINT,
    ],
)
def test_update_killed_at_a_commit_point_shows_old_or_new_and_a_rerun_converges(
    world: dict[str, Any], tmp_path: Path, point: str
) -> None:
    root = tmp_path / "root"
    shutil.copytree(world["roots"]["old"], root)
    assert killed_ingest(world, root, point) == -signal.SIGKILL
    assert visible(root) in (world["seen-old"], world["seen-both"])
    build_index([world["new"]], root, "c", settings(world["model"]))
    assert visible(root) == world["seen-both"]
    assert verify_collection(CollectionLayout(root, "c")) == []


@pytest.mark.parametrize(
    "point",
    [
        "clusters-written",
        "context-written",
        "shard-written",
        "documents-added",
        "chunks-added",
        "generation-renamed",
    ],
)
def test_first_ingest_killed_at_a_commit_point_shows_nothing_or_all_and_a_rerun_converges(
    world: dict[str, Any], tmp_path: Path, point: str
) -> None:
    root = tmp_path / "root"
    assert killed_ingest(world, root, point) == -signal.SIGKILL
    assert CollectionLayout(root, "c").exists() == (point == "generation-renamed")
    assert stored_settings(root, "c") is None, "the same command line goes on"
    report = build_index([world["new"]], root, "c", settings(world["model"]))
    assert report.rows == report.indexed + report.unchanged
    assert visible(root) == world["seen-new"]
    assert verify_collection(CollectionLayout(root, "c")) == []


def test_rerun_after_a_kill_at_the_last_shard_encodes_nothing_again(
    world: dict[str, Any], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    assert killed_ingest(world, root, "documents-added") == -signal.SIGKILL
    report = build_index([world["new"]], root, "c", settings(world["model"]))
    assert (report.indexed, report.encoded) == (16, 0)


def test_concurrent_ingests_of_one_collection_let_one_work_and_send_the_others_away(
    world: dict[str, Any], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(world["roots"]["old"], root)
    command = [
        sys.executable,
        "-m",
        "cairn.cli.main",
        "ingest",
        world["new"],
        "--collection",
        "c",
        "--root",
        str(root),
        "--quiet",
    ]
    processes = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outcomes = [(process.communicate(timeout=600)[1], process.returncode) for process in processes]
    codes = [code for _, code in outcomes]
    assert codes.count(0) >= 1
    assert all(code in (0, 75) for code in codes), outcomes
    assert all("being written by another run" in error for error, code in outcomes if code == 75)
    assert visible(root) == world["seen-both"]
