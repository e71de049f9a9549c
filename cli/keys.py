"""`cairn keys create|list|revoke`: the API keys of `cairn serve`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from cairn.cli.options import NamedPath, filter_option
from cairn.cli.settings import json_option, root_option
from cairn.cli.terminal import echo, table, warn
from cairn.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from cairn.pipeline.serve.keys import ApiKey, KeyFile

_Function = TypeVar("_Function", bound=Callable[..., Any])


@click.group()
@click.pass_context
def keys(ctx: click.Context) -> None:
    """Make, list and revoke API keys of `cairn serve`."""
    # What cairn.toml says for every verb is meant for the verbs below as well.
    ctx.default_map = {name: dict(ctx.default_map or {}) for name in keys.commands}


def _place_options(function: _Function) -> _Function:
    named = click.option(
        "--keys-file",
        type=NamedPath(path_type=Path, dir_okay=False),
        help="File of API keys.  [default: ROOT/keys.json]",
    )
    return root_option(named(function))


@keys.command(context_settings={"show_default": True})
@click.argument("name")
@_place_options
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    default=("search",),
    help="search, embed, write, admin (metrics) or principal (asks for named readers); repeat.",
)
@click.option(
    "--for",
    "collections",
    multiple=True,
    metavar="COLLECTION",
    help="Collection the key is for; repeat.  [default: all]",
)
@filter_option("Show only")
@click.option(
    "--from-env",
    "variable",
    metavar="VARIABLE",
    help="Take the key from this variable; one that is there stays as it is.",
)
@json_option
def create(
    *,
    name: str,
    root: str,
    variable: str | None,
    keys_file: Path | None,
    scopes: tuple[str, ...],
    collections: tuple[str, ...],
    filters: tuple[str, ...],
    as_json: bool,
) -> None:
    """Make a key called NAME, which no other good key is called, and show it, once."""
    if variable is not None and not os.environ.get(variable):
        raise ConfigError(
            f"variable {variable} must hold a key, got nothing; leave --from-env out to make one"
        )
    given = os.environ[variable] if variable else None
    restriction = _restriction(Path(root), collections, filters)
    key, token = _file(root, keys_file).create(
        name, scopes=scopes, collections=collections or None, restriction=restriction, token=given
    )
    if collections:
        _warn_of_missing(Path(root), collections)
    if as_json:
        echo(json.dumps(_shown(key) if given else {**_shown(key), "key": token}))
    elif given:
        echo(f"key {key.key_id} may {_may(key)}", err=True)
    else:
        echo(token)
        kept = "it is shown this once: keep it where secrets are kept"
        echo(f"key {key.key_id} may {_may(key)}; {kept}", err=True)


@keys.command(name="list", context_settings={"show_default": True})
@_place_options
@json_option
def list_keys(*, root: str, keys_file: Path | None, as_json: bool) -> None:
    """List the keys there are, without the keys themselves."""
    file = _file(root, keys_file)
    file.require_kept()
    found = file.read()
    rows = [
        ("id", "name", "may", "made", "revoked"),
        *((k.key_id, k.name, _may(k), k.created_at, k.revoked_at or "") for k in found),
    ]
    say = table(rows) if found else "no keys"
    echo(json.dumps([_shown(key) for key in found]) if as_json else say)


@keys.command(context_settings={"show_default": True})
@click.argument("key", metavar="ID|NAME")
@_place_options
def revoke(*, key: str, root: str, keys_file: Path | None) -> None:
    """Make the key of this id or name worthless, at once and for good."""
    revoked = _file(root, keys_file).revoke(key)
    echo(f"{revoked.key_id} ({revoked.name}) is revoked")


def _file(root: str, keys_file: Path | None) -> KeyFile:
    from cairn.pipeline.serve.keys import KeyFile
    from cairn.pipeline.serve.settings import ServeSettings

    return KeyFile(ServeSettings(root=Path(root), keys_file=keys_file).keys_path)


def _restriction(root: Path, collections: tuple[str, ...], filters: tuple[str, ...]) -> dict[str, Any] | None:
    """Read COLUMN=VALUE by the columns of the collections the key is for, which must agree."""
    if not filters:
        return None
    if not collections:
        raise ConfigError("a key with a filter must be for named collections, got none; say --for COLLECTION")
    from cairn.pipeline.index.generation import open_latest_intact_generation
    from cairn.pipeline.index.layout import SIZES, CollectionLayout
    from cairn.pipeline.search.filters import parse_filter

    schemas = [
        open_latest_intact_generation(CollectionLayout.at(root, name), checks=SIZES).document_schema
        for name in collections
    ]
    parsed = [parse_filter(filters, schema) for schema in schemas]
    if any(other != parsed[0] for other in parsed):
        raise ConfigError(
            "the collections of a key with a filter must have its columns in one type; make a key for each"
        )
    return parsed[0]


def _warn_of_missing(root: Path, collections: tuple[str, ...]) -> None:
    from cairn.pipeline.index.layout import list_states

    for missing in sorted(set(collections) - set(list_states(root))):
        warn(f"there is no collection {missing} under {root}; the key holds once there is")


def _may(key: ApiKey) -> str:
    where = "everywhere" if key.collections is None else f"in {', '.join(key.collections)}"
    return f"{', '.join(key.scopes)} {where}" + (
        "" if key.restriction is None else f" where {json.dumps(key.restriction)}"
    )


def _shown(key: ApiKey) -> dict[str, Any]:
    return {name: value for name, value in asdict(key).items() if name != "sha256"}
