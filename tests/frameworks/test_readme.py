"""README's Python, run as it stands against a collection of the demo's name."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import uvicorn

from jobs.build_index import build_index
from jobs.ingest_settings import resolve_ingest_config
from pipeline.serve.app import create_app
from pipeline.serve.server import bind
from pipeline.serve.settings import ServeSettings

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
SECTIONS = {"Search from Python": 3, "From Python, over HTTP": 1, "From LangChain": 3}
"""Headings, and how many blocks of Python stand below each."""
ADDRESS = "http://127.0.0.1:8400"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder as `make demo` leaves it, and the address of a server over it."""
    folder = tmp_path_factory.mktemp("demo")
    rows = pa.table(
        {
            "id": ["stdlib/argparse", "topic/exceptions"],
            "text": ["parse a line", "raise it"],
            "kind": ["module", "topic"],
        }
    )
    pq.write_table(rows, folder / "sample.parquet")
    build_index(
        [str(folder / "sample.parquet")],
        folder / "cairn-data",
        "python-docs",
        resolve_ingest_config({}, None),
    )
    settings = ServeSettings(root=folder / "cairn-data", port=0, deadline_seconds=300.0)
    with bind(settings) as listener:
        server = uvicorn.Server(
            uvicorn.Config(create_app(settings), lifespan="on", ws="none", log_config=None, access_log=False)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        yield folder, f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join()


@pytest.mark.parametrize("title", SECTIONS)
def test_readme_runs_as_it_stands(
    title: str, demo: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, address = demo
    monkeypatch.chdir(folder)
    monkeypatch.delenv("CAIRN_ROOT", raising=False)
    section = re.split(rf"^##+ {re.escape(title)}$", README, flags=re.MULTILINE)[1].split("\n##")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == SECTIONS[title]
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block.replace(ADDRESS, address), "README.md", "exec"), names)
    assert capsys.readouterr().out.strip()
    client = getattr(names.get("documentation"), "_client", None)
    if client is not None:
        client.close()
