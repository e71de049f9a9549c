"""SIGKILL an ingest and a new context at every commit point.

A reader sees the old or the new generation, never a mix, and a rerun converges.
"""

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.publish import COMMIT_POINTS
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.compatibility import stored_settings
from cairn.pipeline.line.recontextualise import recontextualise

from tests import small_ingests
from tests.nightly.forks import forked
from tests.small_ingests import WINDOWS, text_of, write_rows
from tests.stored_collections import same, stored

pytestmark = pytest.mark.slow

ENCODE_POINTS = ("shard-chunks-written", "shard-written")
UPDATE_POINTS = (
    *ENCODE_POINTS,
    *(point for point in COMMIT_POINTS if not point.endswith("-rolled-back")),
    "sources-recorded",
)
FIRST_POINTS = ("clusters-written", "context-written", "shard-written", "documents-added", "chunks-added")
CONTEXT_POINTS = ("context-written", "shard-written", "documents-deleted", "chunks-deleted")


def settings(model: Path) -> IngestConfig:
    return small_ingests.settings(model, shard_characters=300, use_context=True, **WINDOWS)


def ingest(root: Path, model: Path, source: str) -> Any:
    return build_index([source], root, "c", settings(model))


def new_context(root: Path, model: Path) -> Any:
    return recontextualise(root, "c", settings(model))


def corpus(path: Path, versions: dict[int, int]) -> str:
    texts = {number: text_of([number, version], 12 + number % 9) for number, version in versions.items()}
    return write_rows(path, [{"id": f"d{each}", "text": text, "year": 2000} for each, text in texts.items()])


def old_and_both(folder: Path, model: Path, *, num_new: int) -> Path:
    """Ingest an old corpus, and it and a new one after it; return the new one.

    Two documents change, one goes, and those from 14 to ``num_new`` come.
    """
    old = corpus(folder / "old.parquet", dict.fromkeys(range(14), 0))
    new = corpus(folder / "new.parquet", {**dict.fromkeys(range(1, num_new), 0), 3: 1, 7: 1})
    ingest(folder / "old", model, old)
    shutil.copytree(folder / "old", folder / "both")
    ingest(folder / "both", model, new)
    return new


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> dict[str, Any]:
    """Build a collection of an old corpus, and what it becomes with the new one, or a new context.

    Two documents changed, three added, one gone.
    """
    folder = tmp_path_factory.mktemp("kills")
    new = old_and_both(folder, tiny_model_folder, num_new=17)
    ingest(folder / "new", tiny_model_folder, new)
    shutil.copytree(folder / "both", folder / "context")
    new_context(folder / "context", tiny_model_folder)
    seen = {name: stored(folder / name) for name in ("old", "both", "new", "context")}
    assert not same(seen["both"], seen["context"])
    return {"folder": folder, "new": new, "model": tiny_model_folder, "seen": seen}


@pytest.mark.parametrize(
    ("work", "point"),
    [*((ingest, point) for point in UPDATE_POINTS), *((new_context, point) for point in CONTEXT_POINTS)],
)
def test_update_killed_at_a_commit_point_shows_old_or_new_and_a_rerun_converges(
    world: dict[str, Any], tmp_path: Path, work: Callable[..., Any], point: str
) -> None:
    root = tmp_path / "root"
    before, after = ("old", "both") if work is ingest else ("both", "context")
    arguments = (root, world["model"], world["new"])[: 3 if work is ingest else 2]
    shutil.copytree(world["folder"] / before, root)
    assert forked(work, *arguments, kill=point).signal == signal.SIGKILL
    assert any(same(stored(root), world["seen"][name]) for name in (before, after))
    work(*arguments)
    assert same(stored(root), world["seen"][after])
    assert verify_collection(CollectionLayout(root, "c")) == []


@pytest.mark.parametrize("point", [*FIRST_POINTS, "generation-renamed"])
def test_first_ingest_killed_at_a_commit_point_shows_nothing_or_all_and_a_rerun_converges(
    world: dict[str, Any], tmp_path: Path, point: str
) -> None:
    root = tmp_path / "root"
    assert forked(ingest, root, world["model"], world["new"], kill=point).signal == signal.SIGKILL
    assert CollectionLayout(root, "c").exists() == (point == "generation-renamed")
    assert stored_settings(root, "c") is None, "the same command line goes on"
    report = ingest(root, world["model"], world["new"])
    assert report.rows == report.indexed + report.unchanged
    if point == "documents-added":
        assert (report.indexed, report.encoded) == (16, 0), "nothing is encoded again"
    assert same(stored(root), world["seen"]["new"])
    assert verify_collection(CollectionLayout(root, "c")) == []


def test_ingest_after_a_killed_new_context_keeps_the_old_one(world: dict[str, Any], tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(world["folder"] / "both", root)
    assert forked(new_context, root, world["model"], kill="documents-added").signal == signal.SIGKILL
    ingest(root, world["model"], corpus(tmp_path / "one.parquet", {100: 0}))
    seen = stored(root)
    del seen["d100"]
    assert same(seen, world["seen"]["both"])
    assert verify_collection(CollectionLayout(root, "c")) == []


def test_concurrent_ingests_of_one_collection_let_one_work_and_send_the_others_away(
    world: dict[str, Any], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    shutil.copytree(world["folder"] / "old", root)
    options = ["--collection", "c", "--root", str(root), "--quiet"]
    command = [sys.executable, "-m", "cairn.cli.main", "ingest", world["new"], *options]
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(3)]
    outcomes = [(process.communicate(timeout=600)[1], process.returncode) for process in processes]
    codes = [code for _, code in outcomes]
    assert codes.count(0) >= 1
    assert all(code in (0, 75) for code in codes), outcomes
    assert all("being written by another run" in error for error, code in outcomes if code == 75)
    assert same(stored(root), world["seen"]["both"])
