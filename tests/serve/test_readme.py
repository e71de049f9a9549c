"""README's curl lines, sent as they stand: a collection of that name answers every one."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from jobs.build_index import build_index
from pipeline.config import ClusterConfig, ContextConfig, EncoderConfig, IngestConfig
from pipeline.serve.settings import ServeSettings

README = Path(__file__).parents[2] / "README.md"
SECTION = README.read_text(encoding="utf-8").split("### From curl\n")[1].split("\n##")[0]
LINES = re.findall(r"^curl .*$", SECTION, re.MULTILINE)


def parsed(line: str) -> tuple[str, dict[str, str], str | None]:
    """Return (path, headers, body) of a curl line, which may use these options and no others."""
    words = iter(shlex.split(line)[1:])
    path, headers, body = "", {}, None
    for word in words:
        if word == "-s":
            continue
        if word == "-H":
            name, _, value = next(words).partition(": ")
            headers[name] = value
        elif word == "-d":
            body = next(words)
        else:
            assert word.startswith("localhost:8400/"), word
            path = word.removeprefix("localhost:8400")
    return path, headers, body


@pytest.fixture
def sample(tmp_path: Path, tiny_model_folder: Path, serve: Callable[..., TestClient]) -> TestClient:
    """A server over a collection like the one `make demo` makes."""
    rows = pa.table(
        {
            "id": ["stdlib/argparse", "topic/exceptions"],
            "text": ["parse a line", "raise it"],
            "kind": ["module", "topic"],
        }
    )
    pq.write_table(rows, tmp_path / "sample.parquet")
    config = IngestConfig(
        encoder=EncoderConfig(model=str(tiny_model_folder), landmark_interval=16),
        cluster=ClusterConfig(num_clusters=1),
        context=ContextConfig(num_documents=2, max_document_tokens=16),
    )
    build_index([str(tmp_path / "sample.parquet")], tmp_path / "root", "python-docs", config)
    return serve(ServeSettings(root=tmp_path / "root"), base_url="http://localhost:8400")


def test_readme_shows_every_kind_of_address() -> None:
    shown = {re.sub(r"python-docs|stdlib/argparse", "{}", parsed(line)[0]) for line in LINES}
    assert shown == {
        "/v1/collections", "/v1/collections/{}/search", "/v1/collections/{}/documents/{}", "/v1/vector_stores/{}/search", "/v1/embeddings",
    }  # fmt: skip


def test_readme_lines_are_answered(sample: TestClient) -> None:
    for line in LINES:
        path, headers, body = parsed(line)
        response: Any = sample.get(path) if body is None else sample.post(path, content=body, headers=headers)
        assert response.status_code == 200, (line, response.text)
        assert response.json()
