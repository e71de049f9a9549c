"""An option added in one place is found on every surface."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import click
import httpx2
import numpy as np
import pytest
from cairn.cli.options import add_options, chosen
from cairn.cli.settings import name_variables, settings_of_verb
from cairn.jobs.engine import EngineConfig
from cairn.pipeline.client.clients import CairnClient
from cairn.pipeline.client.errors import ServerFailedError
from cairn.pipeline.config import (
    ClusterConfig,
    ContextConfig,
    CorpusConfig,
    EncoderConfig,
    IndexConfig,
    IngestConfig,
)
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.options import About, check_value, option, options_of
from cairn.pipeline.search_options import SearchOptions
from cairn.pipeline.serve.schemas import Request, option_fields
from cairn.pipeline.serve.settings import ServeSettings
from click.testing import CliRunner
from pydantic import create_model

from tests.docs.reference_pages import command_reference

ABOUT = About("How far a stone may roll.", low=1, high=9)


@dataclass(frozen=True, kw_only=True)
class RollingEncoder(EncoderConfig):
    roll_metres: int = option(3, ABOUT)


@dataclass(frozen=True, kw_only=True)
class RollingSearch(SearchOptions):
    roll_metres: int = option(3, ABOUT)


BOTH = pytest.mark.parametrize("kind", [RollingEncoder, RollingSearch])


def command_of(kind: type) -> click.Command:
    @click.command(name="verb")
    @add_options(kind, but=("filters", "weights"))
    @click.pass_context
    def verb(ctx: click.Context, **_: Any) -> None:
        click.echo(json.dumps(chosen(ctx, kind)))

    name_variables(verb, "CAIRN_VERB")
    return verb


def run(kind: type, *arguments: str, **settings: Any) -> dict[str, Any]:
    result = CliRunner().invoke(command_of(kind), arguments, **settings)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


@BOTH
def test_added_option_is_a_flag_a_variable_a_key_and_a_line_of_the_reference(kind: type) -> None:
    assert run(kind, "--roll-metres", "4") == {"roll_metres": 4}
    assert run(kind) == {}
    shown = " ".join(CliRunner().invoke(command_of(kind), ["--help"]).output.split())
    assert "--roll-metres INTEGER How far a stone may roll. [default: 3]" in shown
    assert run(kind, env={"CAIRN_VERB_ROLL_METRES": "5"}) == {"roll_metres": 5}
    command = command_of(kind)
    assert settings_of_verb(command, {"roll_metres": 6}) == {"roll_metres": 6}
    assert run(kind, default_map={"roll_metres": 6}) == {"roll_metres": 6}
    page = "\n".join(command_reference(command, click.Context(command, info_name="verb")))
    assert "| `--roll-metres INTEGER` | How far a stone may roll. [default: 3] |" in page
    assert json.dumps(kind(roll_metres=np.int64(4)).roll_metres) == "4"


@BOTH
@pytest.mark.parametrize("value", [0, 10, "3", True, None, 2.5])
def test_added_option_is_checked_by_its_bounds_and_named(kind: type, value: object) -> None:
    with pytest.raises(
        ConfigError, match=r"^roll_metres must be a whole number from 1 to 9, got .*default: 3"
    ):
        kind(roll_metres=value)


def test_added_search_option_is_a_field_of_the_request_and_its_description() -> None:
    model = create_model("Rolling", __base__=Request, **option_fields(RollingSearch))
    described = model.model_json_schema()["properties"]["roll_metres"]
    assert described == {
        "default": 3, "description": "How far a stone may roll.", "maximum": 9, "minimum": 1,
        "title": "Roll Metres", "type": "integer",
    }  # fmt: skip
    assert model.model_validate({"roll_metres": 4}).model_dump()["roll_metres"] == 4
    with pytest.raises(ValueError, match="less than or equal to 9"):
        model.model_validate({"roll_metres": 10})


def test_added_search_option_is_sent_by_the_client() -> None:
    parameters: Any = {"roll_metres": 4}
    sent: list[httpx2.Request] = []
    transport = httpx2.MockTransport(lambda request: sent.append(request) or httpx2.Response(500))
    with CairnClient(transport=transport) as client, pytest.raises(ServerFailedError):
        client.collection("stones").search("which rolls", **parameters)
    assert json.loads(sent[0].content) == {"query": "which rolls", "roll_metres": 4}


NUMBERS = {
    f"{kind.__name__}.{name}": each
    for kind in (
        CorpusConfig, ClusterConfig, ContextConfig, EncoderConfig, IndexConfig, IngestConfig, EngineConfig,
        SearchOptions, ServeSettings, TrainConfig,
    )
    for name, each in options_of(kind).items()
    if each.kind in (int, float)
}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_number_of_any_option_is_bounded_above(name: str) -> None:
    each = NUMBERS[name]
    assert not any(each.accepts(each.kind(value)) for value in (10**300, 1e300))
    with pytest.raises(ConfigError, match=r"must be .*, got a number of more than 18 digits"):
        check_value(each, 10**5000, None)
