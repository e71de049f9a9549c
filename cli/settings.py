"""Where a setting comes from: flag > CAIRN_* environment > file > the built collection > default.

``cairn.pipeline.line.ingest_settings`` composes them. The file is that of ``--config``, else of
``CAIRN_CONFIG``, else ``cairn.toml`` in the working folder. :mod:`cairn.pipeline.settings_file` reads it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from cairn.cli.options import FieldOption, NamedPath, NumbersType
from cairn.cli.terminal import warn
from cairn.pipeline.config import DEFAULT_ROOT
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.options import check_value, did_you_mean
from cairn.pipeline.settings_file import SHARED, check_setting, read_settings_file
from click.core import ParameterSource

_Function = TypeVar("_Function", bound=Callable[..., Any])

_FILE: Final = Path("cairn.toml")
_TEXTS: Final = (click.types.StringParamType, click.Choice, NamedPath)
"""Types of options whose value in the file is a text."""
_SET_ELSEWHERE = frozenset({"CAIRN_CACHE"})
"""Variables of other parts of Cairn that are spelt like an option's."""


def config_option() -> click.Option:
    """Return ``--config`` of a verb.

    It comes before the other options are read: a misspelt setting must not be reported as a missing option.
    """
    return click.Option(
        ["--config", "settings_file"],
        envvar="CAIRN_CONFIG",
        type=NamedPath(path_type=Path),
        is_eager=True,
        expose_value=False,
        callback=_read_settings,
        help="File of settings, TOML.  [default: cairn.toml, if any]",
        show_default=False,
    )


def _read_settings(ctx: click.Context, option: click.Parameter, named: Path | None) -> None:
    """Make the settings of the file the defaults of a verb."""
    if ctx.parent is None or not isinstance(ctx.parent.command, click.Group):
        return  # a verb that a program reads by itself, without the others of its file
    verbs = ctx.parent.command.list_commands(ctx.parent)
    path = named or _FILE
    if named is not None and not named.is_file():
        is_flag = ctx.get_parameter_source(str(option.name)) is ParameterSource.COMMANDLINE
        raise ConfigError(f"{'--config' if is_flag else 'CAIRN_CONFIG'} must name a file, got {str(named)!r}")
    ctx.default_map = read_settings(path, ctx.command, verbs) if path.is_file() else {}
    warn_of_variables(ctx.command, os.environ, verbs)


def read_settings(path: Path, command: click.Command, verbs: Collection[str]) -> dict[str, Any]:
    """Return what a file says for a verb, by parameter; refuse tables that no verb reads."""
    file = read_settings_file(path)
    for table in file.tables:
        if table not in verbs:
            raise ConfigError(f"{path}: [{table}] is no verb{did_you_mean(table, verbs)}")
    return settings_of_verb(command, {**file.shared, **file.tables.get(str(command.name), {})}, path)


def settings_of_verb(
    command: click.Command, settings: Mapping[str, Any], path: Path = _FILE
) -> dict[str, Any]:
    """Return a verb's settings by parameter, a list where one may be given again.

    A key that the verb does not have is refused, and so is a value of another type than the option's: a
    setting must not be ignored or changed in silence.
    """
    options = {_key_of(each): each for each in _options(command) if each.expose_value}
    arguments = {
        str(each.name): tuple[str, ...] if each.nargs == -1 else str
        for each in command.params
        if isinstance(each, click.Argument)
    }
    found: dict[str, Any] = {}
    for key, value in settings.items():
        option, shown_key = options.get(key), key.replace("_", "-")
        where = f"{path}: [{command.name}]"
        if key in arguments:
            check_setting(f"{where} {shown_key}", arguments[key], value)
            found[key] = value
        elif option is not None:
            value = [value] if option.multiple and isinstance(value, str) else value
            _check(f"{where} {shown_key}", option, value)
            found[str(option.name)] = value
        elif key in SHARED:
            found[key] = value  # for the verbs of a group, such as `cairn keys create`
        else:
            on = {off: on for on, each in options.items() for off in each.secondary_opts}.get(
                f"--{shown_key}"
            )
            known = sorted(name.replace("_", "-") for name in options)
            meant = (
                did_you_mean(shown_key, known) if on is None else f"; write {on.replace('_', '-')} = false"
            )
            raise ConfigError(f"{where} has no setting {shown_key!r}{meant}")
    return found


def _check(what: str, option: click.Option, value: Any) -> None:
    """Refuse a value that the option must not have; ``what`` begins the sentence."""
    if isinstance(option.type, NumbersType):
        return  # which reads it itself
    if isinstance(option, FieldOption) and option.field is not None and option.field.is_checked:
        check_value(replace(option.field, name=what, is_optional=False), value, None)
    elif option.is_flag:
        check_setting(what, bool, value)
    elif isinstance(option.type, click.types.IntParamType):
        check_setting(what, int, value)
    elif isinstance(option.type, _TEXTS):
        check_setting(what, tuple[str, ...] if option.multiple or option.nargs > 1 else str, value)


def name_variables(command: click.Command, prefix: str) -> None:
    """Give each option of a verb, and of the verbs below it, its one variable: ``CAIRN_<VERB>_<FLAG>``.

    An option that names a variable of its own keeps it, and is set by no other.
    """
    for option in _options(command):
        option.envvar = option.envvar or _variable(prefix, option)
    for name, verb in command.commands.items() if isinstance(command, click.Group) else ():
        name_variables(verb, variable_prefix(name, prefix))


def variables_of(command: click.Command, prefix: str) -> dict[str, str]:
    """Return the variables that an option could be expected to have, each with the one that sets it."""
    found: dict[str, str] = {}
    for option in _options(command):
        guesses = {_variable(prefix, option), _variable("CAIRN", option)} - _SET_ELSEWHERE
        found |= dict.fromkeys((*guesses, str(option.envvar)), str(option.envvar))
    for name, verb in command.commands.items() if isinstance(command, click.Group) else ():
        found |= variables_of(verb, variable_prefix(name, prefix))
    return found


def warn_of_variables(command: click.Command, environment: Mapping[str, str], verbs: Collection[str]) -> None:
    """Name variables such as ``CAIRN_SEARCH_TOPK`` that look like options of the verb and set none."""
    prefix = variable_prefix(str(command.name))
    longer = tuple(
        f"{variable_prefix(verb)}_" for verb in verbs if variable_prefix(verb).startswith(f"{prefix}_")
    )
    variables = variables_of(command, prefix)
    for name in sorted(environment):
        is_of_verb = name.startswith(prefix + "_") and not (longer and name.startswith(longer))
        if variables.get(name) == name or not (is_of_verb or name in variables):
            continue
        meant = get_close_matches(name, variables, n=1)
        hint = f"did you mean {variables[meant[0]]}?" if meant else "see its --help"
        warn(f"{name} sets no option of `cairn {command.name}` and is ignored; {hint}")


def variable_prefix(verb: str, above: str = "CAIRN") -> str:
    """Return how the variables of a verb begin."""
    return f"{above}_{verb.replace('-', '_').upper()}"


def _variable(prefix: str, option: click.Option) -> str:
    return f"{prefix}_{_key_of(option).upper()}"


def _options(command: click.Command) -> Iterator[click.Option]:
    return (each for each in command.params if isinstance(each, click.Option))


def _key_of(option: click.Option) -> str:
    """Return an option's flag as a name, ``top_k`` of ``--top-k``."""
    return option.opts[0].removeprefix("--").replace("-", "_")


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
