"""Fault matrix 1: a writer killed anywhere, whether it adds a segment, merges or makes all again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from cairn.pipeline.index import tiers
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.publish import COMMIT_POINTS
from cairn.pipeline.index.verify import verify_collection

from tests.index import stones
from tests.index.stones import served
from tests.nightly.forks import forked

pytestmark = pytest.mark.slow

OLD = stones.document_ids(20)
NEW = sorted([*OLD, *stones.document_ids(10, "n")])
KINDS = ("whole", "added", "merged")
FIRST_POINTS = tuple(point for point in COMMIT_POINTS if not point.endswith("-deleted"))
"""A first publication replaces nothing."""


def change(root: Path, kind: str) -> None:
    """Publish a change that makes all again, adds a segment, or merges it with the other one."""
    if kind != "whole":
        tiers.WHOLE_CHUNKS, tiers.MAX_DELETED_SHARE = 0, 0.8
        tiers.FACTOR, tiers.tier_of = 100 if kind == "added" else 2, lambda rows: 0
    stones.publish_change(CollectionLayout(root, "stones"), "n")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("template")
    stones.publish_documents(CollectionLayout(root, "stones"), OLD, with_tokens=True)
    return root


@pytest.mark.parametrize("point", COMMIT_POINTS)
@pytest.mark.parametrize("kind", KINDS)
def test_writer_killed_at_a_commit_point_leaves_one_whole_generation_and_a_rerun_converges(
    layout: CollectionLayout, kind: str, point: str
) -> None:
    assert forked(change, layout.root, kind, kill=point).signal == signal.SIGKILL
    is_published = COMMIT_POINTS.index(point) >= COMMIT_POINTS.index("current-replaced")
    assert served(layout) == sorted(NEW if is_published else OLD)
    forked(change, layout.root, kind).value_of("the same again")
    assert served(layout) == NEW
    assert (len(open_generation(layout).segments) > 1) == (kind == "added")
    assert verify_collection(layout) == []


@pytest.mark.parametrize("point", FIRST_POINTS)
def test_first_writer_killed_at_a_commit_point_is_completed_by_a_rerun(tmp_path: Path, point: str) -> None:
    layout = CollectionLayout(tmp_path, "stones")
    assert forked(change, tmp_path, "whole", kill=point).signal == signal.SIGKILL
    stones.publish_change(layout, "n")
    assert served(layout) == sorted([*stones.document_ids(10, "n"), "d0"])
    assert verify_collection(layout) == []
