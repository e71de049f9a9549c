"""Where a setting comes from: flag > CAIRN_* environment > cairn.toml > the built collection > default.

``jobs.ingest_settings`` composes them. ``cairn.toml`` in the working folder, or the file that
``CAIRN_CONFIG`` names, has a table for each verb with long option names as keys::

    [ingest]
    collection = "handbook"
    text-column = "body"

``root`` and ``collection`` before the first table apply to every verb.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from pipeline.config import DEFAULT_ROOT, EncoderConfig
from pipeline.errors import ConfigError
from pipeline.options import did_you_mean

_Function = TypeVar("_Function", bound=Callable[..., Any])

_SHARED = ("root", "collection")
_EVERYWHERE = ("ingest", "search", "serve", "keys", "status", "plan", "verify", "repair", "compact", "delete")


def load_default_map() -> dict[str, Any]:
    """Read ``cairn.toml`` into click's default map; a missing file is an empty one."""
    named = os.environ.get("CAIRN_CONFIG")
    path = Path(named or "cairn.toml")
    if not path.is_file():
        if named:
            raise ConfigError(f"CAIRN_CONFIG must name a file, got {named!r}")
        return {}
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} must be valid TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} must be nested less deeply; remove the deep table or list") from error
    shared = {_parameter_name(key): value for key, value in content.items() if not isinstance(value, dict)}
    unknown = sorted(set(shared) - set(_SHARED))
    if unknown:
        raise ConfigError(
            f"{path} has no setting {unknown[0]!r} before the first table; there are {', '.join(_SHARED)}"
        )
    verbs = {key: value for key, value in content.items() if isinstance(value, dict)}
    return {
        verb: {**shared, **{_parameter_name(key): value for key, value in verbs.get(verb, {}).items()}}
        for verb in {*_EVERYWHERE, *verbs}
    }


def _parameter_name(option: str) -> str:
    return option.replace("-", "_")


def settings_of_verb(command: click.Command, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a verb's settings of ``cairn.toml`` by parameter, a list where one may be given again.

    A key that the verb does not have is refused: a misspelt setting must not be ignored in silence.
    """
    options = {
        _parameter_name(each.opts[0].removeprefix("--")): each
        for each in command.params
        if isinstance(each, click.Option)
    }
    found: dict[str, Any] = {}
    for key, value in settings.items():
        option = options.get(key)
        if option is not None:
            found[str(option.name)] = [value] if option.multiple and isinstance(value, str) else value
        elif key in _SHARED:
            found[key] = value  # for the verbs of a group, such as `cairn keys create`
        else:
            named = sorted(name.replace("_", "-") for name in options)
            key = key.replace("_", "-")
            raise ConfigError(
                f"cairn.toml: [{command.name}] has no setting {key!r}{did_you_mean(key, named)}"
            )
    return found


def check_tables(settings: Mapping[str, Any], verbs: Collection[str]) -> None:
    """Refuse tables of ``cairn.toml`` that no verb reads."""
    unknown = sorted(set(settings) - set(verbs))
    if unknown:
        raise ConfigError(f"cairn.toml: [{unknown[0]}] is no verb{did_you_mean(unknown[0], verbs)}")


def warn_of_variables(command: click.Command, environment: Mapping[str, str], verbs: Collection[str]) -> None:
    """Name variables such as ``CAIRN_SEARCH_TOPK`` that look like options of the verb and are none."""
    if isinstance(command, click.Group):
        return
    prefix = _variable(str(command.name)) + "_"
    longer = tuple(_variable(verb) + "_" for verb in verbs if _variable(verb).startswith(prefix))
    known = {prefix + str(option.name).upper() for option in command.params if option.envvar is None}
    for name in sorted(environment):
        if name.startswith(prefix) and name not in known and not (longer and name.startswith(longer)):
            click.echo(
                f"warning: {name} sets no option of `cairn {command.name}` and is ignored; see its --help",
                err=True,
            )


def _variable(verb: str) -> str:
    return f"CAIRN_{verb.replace('-', '_').upper()}"


def root_option(function: _Function) -> _Function:
    """Add ``--root``."""
    return click.option(
        "--root",
        envvar="CAIRN_ROOT",
        default=DEFAULT_ROOT,
        show_default=True,
        help="Folder or s3://BUCKET/PREFIX the collections live under.",
    )(function)


def collection_argument(function: _Function) -> _Function:
    """Add ``NAME`` and ``--root``: the collection a verb works on."""
    return click.argument("collection", metavar="NAME")(root_option(function))


def json_option(function: _Function) -> _Function:
    """Add ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")(function)


def warn_of_window(chosen: Mapping[str, Any], encoder: EncoderConfig) -> None:
    """Warn that a chosen window has no effect where every chunk is a row."""
    if "window_tokens" in chosen and encoder.attention == "chunk":
        click.echo(
            "warning: --window-tokens moves nothing with attention chunk, whose rows are chunks; leave "
            "it out, or choose --attention full "
            "or landmark",
            err=True,
        )
