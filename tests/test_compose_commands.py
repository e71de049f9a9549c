"""The command lines in docker-compose.yml have options that the programs know; no process is started."""

from __future__ import annotations

import shlex
from typing import Any

import click
import pytest
from cairn.cli.main import cairn
from ray.scripts.scripts import cli as ray_cli

from tests.test_compose import OURS, SERVICES

PROGRAMS: dict[str, click.Group] = {"cairn": cairn, "ray": ray_cli}


def commands_of(service: dict[str, Any]) -> list[list[str]]:
    """Return the words of each command line of a service, without those of the shell."""
    words = shlex.split(service["command"])
    lines = [line.split() for line in words[2].split("&&")] if words[:2] == ["sh", "-c"] else [words]
    return [line[1:] if line[0] == "exec" else line for line in lines]


def parse(words: list[str]) -> dict[str, Any]:
    """Parse a command line as its program would; click raises for an option that there is not."""
    command: click.Command = PROGRAMS[words[0]]
    name, *rest = words
    while isinstance(command, click.Group):
        name, *rest = rest
        found = command.get_command(click.Context(command), name)
        assert found is not None, name
        command = found
    return command.make_context(name, rest).params


@pytest.mark.parametrize("name", OURS)
def test_command_lines_of_our_containers_are_taken(name: str) -> None:
    assert all(parse(words) for words in commands_of(SERVICES[name]))


def test_shards_are_served_by_ray_at_the_port_that_is_published() -> None:
    service = SERVICES["search-shards"]
    asked = parse(commands_of(service)[-1])
    wanted = {"engine": "ray", "shards": 2, "shard_replicas": 2, "host": "0.0.0.0"}
    assert {name: asked[name] for name in wanted} == wanted
    assert service["ports"] == [f"127.0.0.1:8401:{asked['port']}"]
