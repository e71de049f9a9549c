"""The sample is real, long enough, reproducible, and never in the way of anybody's files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.corpus import sample
from cairn.pipeline.corpus.sample import (
    MIN_BODY_CHARACTERS,
    ROW_GROUP_DOCUMENTS,
    SAMPLE_SCHEMA,
    SampleReport,
    write_sample,
)
from cairn.pipeline.errors import UsageError

# The whole sample takes seconds to make, so that one worker makes it.
pytestmark = pytest.mark.xdist_group("sample")

LIBRARY = {
    "alpha.py": '''
        """Alpha is a module whose docstring is comfortably long enough."""
        import antigravity_that_does_not_exist
        def greet(name: str, *, loud=False) -> str:
            """Greet somebody by name, loudly when asked to do it so."""
            def inner():
                """Stay hidden, although this docstring is long enough."""
        def short():
            """Too short."""
        def _private():
            """Stay hidden, because the name begins with an underscore."""
        class Bell(Base):
            """Ring when it is struck, and keep on ringing for a while."""
            def ring(self):
                """Ring once, and return how loud the ringing has become."""
            def echo(self):
                """Ring once, and return how loud the ringing has become."""
        try:
            from _alpha import fast
        except ImportError:
            async def fast(x):
                """Do in Python what the C module would have done faster."""
    ''',
    "solo.py": 'def alone():\n    """Stand alone in a module that says nothing about itself."""\n',
    "beta/__init__.py": '"""Beta is a package whose docstring is comfortably long enough."""\n',
    "beta/__main__.py": '"""Beta run as a program, which is no documentation for anybody."""\n',
    "beta/test/case.py": '"""Tests speak about themselves, so they are not documentation."""\n',
    "gamma.py": "def broken(:\n",
    "delta.py": '"""Delta spells a lone surrogate, \\udc80, which UTF-8 cannot hold."""\n',
}


def rows_of(files: Sequence[Path]) -> list[dict[str, Any]]:
    return pa.concat_tables([pq.read_table(path) for path in files]).to_pylist()


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand a tiny tree in for the standard library."""
    root = tmp_path / "lib"
    for name, source in LIBRARY.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source.replace("\n        ", "\n").strip() + "\n")
    monkeypatch.setattr(sample.sysconfig, "get_path", lambda name: str(root))
    return root


@pytest.fixture
def small(small_library: Path, tmp_path: Path) -> SampleReport:
    return write_sample(tmp_path / "sample")


def test_library_is_split_into_pages_and_public_definitions(small: SampleReport):
    assert [Path(name).name for name in small.unparsable_files] == ["gamma.py"]
    rows = {row["id"]: row for row in rows_of(small.files) if row["kind"] != "topic"}
    assert [*rows] == [
        "stdlib/alpha",
        "stdlib/alpha.greet",
        "stdlib/alpha.Bell",
        "stdlib/alpha.Bell.ring",
        "stdlib/alpha.fast",
        "stdlib/beta",
        "stdlib/delta",
        "stdlib/solo.alone",
    ]
    assert rows["stdlib/alpha.greet"] == {
        "id": "stdlib/alpha.greet",
        "title": "alpha.greet",
        "text": "greet(name: str, *, loud=False) -> str\n\nGreet somebody by name, loudly when asked to "
        "do it so.",
        "module": "alpha",
        "kind": "function",
        "package": "alpha",
        "lineno": 3,
    }
    page, ring = (rows[f"stdlib/alpha{name}"]["text"] for name in ("", ".Bell.ring"))
    parts = (
        "Alpha is|greet(name|Greet some|short()|class Bell(Base)|Bell.ring(self)|Bell.echo(self)|async fast"
    )
    places = [page.index(part) for part in parts.split("|")]
    assert places == sorted(places), "a page holds the documentation of everything public"
    assert "hidden" not in page
    assert ring in page


def test_kinds_and_numbers_of_documents_are_as_asked_in_their_usual_order(
    small: SampleReport, tmp_path: Path
):
    everything = rows_of(small.files)

    drawn = [row["id"] for row in rows_of(write_sample(tmp_path / "drawn", max_documents=9).files)]
    of_kinds = write_sample(tmp_path / "kinds", kinds=("class", "function"))

    assert len(drawn) == 9
    assert drawn == [row["id"] for row in everything if row["id"] in set(drawn)]
    assert rows_of(of_kinds.files) == [row for row in everything if row["kind"] in ("class", "function")]
    assert of_kinds.kinds == {"class": 1, "function": 3}


def test_foreign_file_in_the_folder_is_refused_and_kept(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")

    with pytest.raises(
        UsageError, match=r"must be new, empty or hold an earlier sample, got .* with notes\.txt"
    ):
        write_sample(tmp_path)

    assert bytes_of(tmp_path) == {"notes.txt": b"mine"}


def test_earlier_sample_and_a_killed_runs_leftover_are_replaced(small: SampleReport, small_library: Path):
    folder = small.files[0].parent
    (folder / ".python.parquet.4711.tmp").write_bytes(b"half")
    before = {name: content for name, content in bytes_of(folder).items() if name.endswith(".parquet")}

    (small_library / "beta/__init__.py").write_text(
        '"""Beta has been written anew since the sample was made last."""\n'
    )
    write_sample(folder)

    after = bytes_of(folder)
    assert [name for name in sorted(after) if after[name] != before.get(name)] == ["python.parquet"]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> SampleReport:
    return write_sample(tmp_path_factory.mktemp("full"))


@pytest.fixture(scope="module")
def second_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """Write the sample in another process with another hash seed.

    Return its folder and the modules it loaded.
    """
    folder = tmp_path_factory.mktemp("second")
    program = (
        "import json, sys; from pathlib import Path; from cairn.pipeline.corpus.sample import write_sample\n"
        "write_sample(Path(sys.argv[1])); print(json.dumps(sorted(sys.modules)))"
    )
    command = [sys.executable, "-W", "error", "-c", program, str(folder)]
    output = subprocess.run(
        command, capture_output=True, check=True, text=True, env={**os.environ, "PYTHONHASHSEED": "4711"}
    ).stdout
    return folder, set(json.loads(output))


def test_sample_is_the_same_bytes_in_another_process(full: SampleReport, second_run: tuple[Path, set[str]]):
    assert bytes_of(second_run[0]) == bytes_of(full.files[0].parent)


def test_library_is_parsed_without_being_imported(second_run: tuple[Path, set[str]]):
    assert second_run[1].isdisjoint({"antigravity", "this", "tkinter", "turtle", "idlelib", "wave"})


def test_rows_are_unique_long_enough_and_counted_in_bounded_row_groups(full: SampleReport):
    rows = rows_of(full.files)
    assert (full.documents, full.characters) == (len(rows), sum(len(row["text"]) for row in rows))
    assert min(len(row["text"].strip()) for row in rows) >= MIN_BODY_CHARACTERS
    assert len({row["id"] for row in rows}) == len({row["text"] for row in rows}) == len(rows)
    file = pq.ParquetFile(full.files[0])
    assert file.schema_arrow.equals(SAMPLE_SCHEMA, check_metadata=True)
    groups = range(file.num_row_groups)
    assert max(file.metadata.row_group(group).num_rows for group in groups) <= ROW_GROUP_DOCUMENTS
