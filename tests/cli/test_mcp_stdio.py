"""`cairn mcp` as a model's host runs it: a process, asked over its stdin by the SDK's own client."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import click
import pytest
from cairn.cli.main import cairn, run
from mcp import Client, StdioServerParameters

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_host_searches_a_collection(stones_root: Path) -> None:
    repository = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": repository, "PYTHONWARNINGS": "ignore"}
    arguments = ["-m", "cairn.cli.main", "mcp", "stones", "--root", str(stones_root)]
    server = StdioServerParameters(command=sys.executable, args=arguments, env=environment)
    async with Client(server) as client:
        found = (await client.call_tool("search", {"query": "granite", "top_k": 2})).structured_content
        assert found is not None
        assert found["documents"]


def test_configuration_in_the_guide_is_json_that_the_command_line_takes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guide" / "frameworks.md").read_text(encoding="utf-8")
    hosted = json.loads(page.split("```json\n")[1].split("```")[0])
    for server in hosted["mcpServers"].values():
        assert server["command"].endswith("/cairn")
        verb, *arguments = server["args"]
        command = cairn.get_command(click.Context(cairn), verb)
        assert command is not None
        assert command.make_context(verb, arguments).params["collection"] == "handbook"


def test_collection_that_is_not_there_is_one_sentence(
    stones_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(cairn, ["mcp", "pebbles", "--root", str(stones_root)], "cairn") == 2
    assert capsys.readouterr().err.startswith("error: ")
