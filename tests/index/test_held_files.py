"""Files of a served generation that another program wants to write into: it waits until searches end."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from cairn.pipeline.errors import DamageError
from cairn.pipeline.index import held_files, tiers
from cairn.pipeline.index.generation import Generation, open_generation, open_latest_intact_generation
from cairn.pipeline.index.layout import CollectionLayout

CUT = "import os, sys; os.truncate(sys.argv[1], 1)"
HOLD = "import sys; file = open(sys.argv[1], 'r+b'); print('open', flush=True); sys.stdin.read()"


pytestmark = pytest.mark.usefixtures("leases")


@pytest.fixture
def layout(layout: CollectionLayout, stones: ModuleType, monkeypatch: pytest.MonkeyPatch) -> CollectionLayout:
    monkeypatch.setattr(tiers, "WHOLE_CHUNKS", 0)
    stones.publish_documents(layout, stones.document_ids(20))
    stones.publish_documents(layout, stones.document_ids(5, "new"))
    return layout


def start(program: str, path: Path) -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", program, str(path)], text=True, **pipes)


def wait_for_damage(generation: Generation) -> str:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            generation.require_whole()
        except DamageError as error:
            return str(error)
        time.sleep(0.01)
    raise AssertionError("nothing was noticed")


def test_file_stays_whole_until_its_generation_is_let_go(layout: CollectionLayout) -> None:
    generation = open_generation(layout)
    path = layout.generation_folder(2) / "chunks.faiss"
    size = path.stat().st_size
    with start(CUT, path) as cutting:
        said = wait_for_damage(generation)
        assert "chunks.faiss of generation 2 is about to be written into by another program" in said
        assert (cutting.poll(), path.stat().st_size) == (None, size)
        assert len(generation.chunks.reconstruct(generation.chunk_documents[:3])) == 3
        del generation
        assert cutting.wait(30) == 0
    assert path.stat().st_size == 1


def test_file_is_released_in_time_though_its_generation_is_held(
    layout: CollectionLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_files, "RELEASE_SECONDS", 0.2)
    generation = open_generation(layout)
    with start(CUT, layout.generation_folder(2) / "chunks.faiss") as cutting:
        wait_for_damage(generation)
        assert cutting.wait(30) == 0
    with pytest.raises(DamageError):
        generation.require_whole()


def test_generation_with_a_file_that_is_open_for_writing_is_not_opened(layout: CollectionLayout) -> None:
    (own,) = layout.generation_folder(2).glob("00000002-*chunks.faiss")
    with start(HOLD, own) as holding:
        assert holding.stdout is not None
        assert holding.stdout.readline() == "open\n"
        assert open_latest_intact_generation(layout).number == 1
        holding.communicate("")
    assert open_latest_intact_generation(layout).number == 2


def test_file_that_another_reader_opens_is_of_no_concern(layout: CollectionLayout) -> None:
    generation = open_generation(layout)
    again = open_generation(layout)
    (layout.generation_folder(2) / "chunks.faiss").read_bytes()
    generation.require_whole()
    again.require_whole()
