"""Layouts kept over a restart.

They are found again for the same documents only, and laid out again where a file cannot be trusted.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np
import pytest
from cairn.pipeline.index.generation import Generation, open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.stored_files import SIZES
from cairn.pipeline.serve.maps import corpus_map, map_files
from cairn.pipeline.serve.maps.corpus_map import draw_map
from cairn.pipeline.serve.maps.map_files import MapFiles

PLACES = np.linspace(-1.0, 1.0, 40, dtype=np.float32).reshape(20, 2)


@pytest.fixture
def generation(served_root: Path) -> Generation:
    return open_generation(CollectionLayout(served_root, "stones"), checks=SIZES)


def test_layout_is_found_by_another_server_for_the_same_documents_alone(
    generation: Generation, tmp_path: Path
) -> None:
    MapFiles(tmp_path / "maps").keep(generation, np.arange(20), 20, PLACES)
    files = MapFiles(tmp_path / "maps")
    found = files.find(generation, np.arange(20), 20)
    assert found is not None
    assert np.array_equal(found, PLACES)
    assert files.find(generation, np.arange(19), 19) is None
    assert files.find(generation, np.arange(20)[::2], 10) is None
    assert files.find(generation, np.arange(20), 10) is None


def test_layout_belongs_to_the_vectors_it_was_made_of(
    served_root: Path, generation: Generation, tmp_path: Path
) -> None:
    MapFiles(tmp_path).keep(generation, np.arange(4), 4, PLACES[:4])
    other = open_generation(CollectionLayout(served_root, "pebbles"), checks=SIZES)
    assert MapFiles(tmp_path).find(other, np.arange(4), 4) is None


def test_second_drawing_lays_nothing_out(
    generation: Generation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = draw_map(generation, np.arange(20), MapFiles(tmp_path))
    monkeypatch.delattr(corpus_map, "lay_out")
    second = draw_map(generation, np.arange(20), MapFiles(tmp_path))
    assert np.array_equal(first.places_N2, second.places_N2)
    assert np.array_equal(first.sample_places_S2, second.sample_places_S2)
    assert list(first.clusters) == list(second.clusters)


@pytest.mark.parametrize("damage", ["cut", "a bit flipped", "of another map"])
def test_file_that_cannot_be_trusted_is_passed_over_with_a_warning(
    generation: Generation, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    files = MapFiles(tmp_path)
    files.keep(generation, np.arange(20), 20, PLACES[:7] if damage == "of another map" else PLACES)
    (path,) = tmp_path.glob("*.arrow")
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    if damage == "a bit flipped":
        at = content.index(PLACES[:, 0].tobytes()) + 9
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with caplog.at_level(logging.WARNING, map_files.__name__):
        assert files.find(generation, np.arange(20), 20) is None
    assert "serve.map_not_read" in caplog.text
    files.keep(generation, np.arange(20), 20, PLACES)
    assert files.find(generation, np.arange(20), 20) is not None


def test_folder_that_cannot_be_written_costs_a_warning_only(
    generation: Generation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "maps").write_text("a file where the folder would be", encoding="utf-8")
    with caplog.at_level(logging.WARNING, map_files.__name__):
        drawn = draw_map(generation, np.arange(20), MapFiles(tmp_path / "maps"))
    assert len(drawn.doc_ids) == 20
    assert "serve.map_not_kept" in caplog.text


def test_machine_without_a_home_draws_all_the_same(
    generation: Generation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(map_files, "cache_folder", homeless)
    assert len(draw_map(generation, np.arange(20), MapFiles()).doc_ids) == 20


def test_least_lately_looked_at_layouts_go(
    generation: Generation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(map_files, "MAX_FILES", 2)
    files = MapFiles(tmp_path)
    for size, when in ((3, 1_000), (4, 2_000)):
        files.keep(generation, np.arange(size), size, PLACES[:size])
        newest = max(tmp_path.glob("*.arrow"), key=lambda file: file.stat().st_mtime_ns)
        os.utime(newest, (when, when))
    assert files.find(generation, np.arange(3), 3) is not None  # looked at, so that the other one goes
    files.keep(generation, np.arange(5), 5, PLACES[:5])
    assert [files.find(generation, np.arange(size), size) is None for size in (3, 4, 5)] == [
        False,
        True,
        False,
    ]
