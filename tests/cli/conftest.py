from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.cli.main import cairn, run


@pytest.fixture(autouse=True)
def quiet_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run in an empty folder, without settings of the machine the tests run on."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("CAIRN_") or name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
            monkeypatch.delenv(name)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return what runs a command line in this process and gives its exit code, stdout and stderr."""

    def invoke(*arguments: str) -> tuple[int, str, str]:
        code = run(cairn, arguments, "cairn")
        return code, *capsys.readouterr()

    return invoke


@pytest.fixture
def refused(call: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Return what runs a command line that must end with this exit code in one sentence, and gives that."""

    def refuse(*arguments: str, code: int = 2) -> str:
        found, out, err = call(*arguments)
        assert (found, out, err.count("\n")) == (code, "", 1), (arguments, err)
        assert err.startswith("error: ")
        assert "Traceback" not in err
        return err

    return refuse


def write_corpus(folder: Path) -> str:
    texts = [
        "a cairn marks the way over the hill",
        "the river runs past the old stone mill",
        "snow lies on the ridge until june",
    ]
    columns = {"id": list("abc"), "title": ["Cairns", "Mills", "Snow"], "text": texts}
    pq.write_table(pa.table({**columns, "year": [2001, 2002, 2003]}), folder / "corpus.parquet")
    return str(folder / "corpus.parquet")


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    return write_corpus(tmp_path)


@pytest.fixture(scope="session")
def ingested_root(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("ingested")
    options = ["--collection", "c", "--model", str(tiny_model_folder), "--landmark-interval", "16", "--quiet"]
    words = ["ingest", write_corpus(folder), *options, "--root", str(folder / "root"), "--json"]
    assert run(cairn, words, "cairn") == 0
    return folder / "root"


@pytest.fixture
def ingested(ingested_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Lay a copy of the corpus as collection ``c`` into the folder."""
    shutil.copytree(ingested_root, tmp_path / "cairn-data")
    capsys.readouterr()


@pytest.fixture
def ingest_options(tiny_model_folder: Path) -> list[str]:
    return ["--collection", "c", "--model", str(tiny_model_folder), "--landmark-interval", "16"]


@pytest.fixture
def ingest(call: Callable[..., tuple[int, str, str]], ingest_options: list[str]) -> Callable[..., str]:
    """Return what ingests rows of these columns into collection ``c`` and gives what is said."""

    def run_ingest(*options: str, **columns: Sequence[object]) -> str:
        pq.write_table(pa.table({name: [*values] for name, values in columns.items()}), "rows.parquet")
        code, _, said = call("ingest", "rows.parquet", *ingest_options, "--quiet", *options)
        assert code == 0, said
        return said

    return run_ingest


@pytest.fixture
def pairs_file(tmp_path: Path) -> Path:
    """Return sixty pairs of two sources to train on, two to a page, as JSON lines."""
    pairs = [
        {
            "query": f"the {word} a{number}",
            "document": f"old {word} on the path a{number}",
            "title": f"way {number // 2}",
            "source": word,
        }
        for word in ("stone", "river")
        for number in range(30)
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path
