"""Command-line options made from the options of a dataclass (``pipeline/options.py``), and what was chosen.

Environment and ``cairn.toml`` come with them: click reads ``CAIRN_<VERB>_<NAME>`` and the default map of
``cli/settings.py`` for every option a command has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import click
from cairn.cli.terminal import echo
from cairn.pipeline.options import MAX_NUMBER, MAX_SEED, Option, check_value, options_of, shown
from click.core import ParameterSource
from typing_extensions import override

_Function = TypeVar("_Function", bound=Callable[..., Any])


class NamedPath(click.Path):
    """A path that is not empty: an empty one would be the working folder."""

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path."""
        if value == "":
            self.fail("a path must name a file or a folder, got ''; leave the option out", param, ctx)
        return super().convert(value, param, ctx)


class NumbersType(click.ParamType):
    """``32,64,128`` or, in ``cairn.toml``, ``[32, 64, 128]``."""

    name = "number,…"

    @override
    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        """Return the numbers; their limits are the configuration's business."""
        try:
            return tuple(_whole(part) for part in (value.split(",") if isinstance(value, str) else value))
        except (TypeError, ValueError):
            self.fail(
                f"{shown(value)} must be whole numbers with commas between them, as in 32,64,128", param, ctx
            )


class PrefixType(click.ParamType):
    r"""A text whose ``\n`` is a line break, as in TOML: a shell hands it on as two characters."""

    name = "text"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text."""
        return str(value).replace("\\n", "\n")


def _whole(part: Any) -> int:
    """Return a whole number, read where it is a text; another number is not rounded."""
    if isinstance(part, str):
        return int(part)
    if isinstance(part, bool) or not isinstance(part, int):
        raise TypeError
    return part


_SHOWS_ALL: Final = "cairn.help_all"
COUNT: Final = click.IntRange(1, MAX_NUMBER)
SEED: Final = click.IntRange(0, MAX_SEED)
"""Of options that no dataclass has."""

_TYPES: Final[Mapping[Any, Any]] = {
    str: str,
    int: int,
    float: float,
    Path: NamedPath(path_type=Path, dir_okay=False),
    tuple[str, ...]: str,
    tuple[int, ...]: NumbersType(),
}


_PREFIXES: Final = frozenset({"query_prefix", "document_prefix"})


class FieldOption(click.Option):
    """An option that may stand under a heading of the help of a :class:`GroupedCommand`.

    ``field`` is that of the dataclass it is made of, None for another.
    """

    def __init__(
        self, *args: Any, heading: str | None = None, field: Option | None = None, **kwargs: Any
    ) -> None:
        """Keep both beside what click knows."""
        super().__init__(*args, **kwargs)
        self.heading, self.field = heading, field


class GroupedCommand(click.Command):
    """A command whose ``--help`` shows the options in ``first``, and ``--help-all`` all, under headings."""

    def __init__(self, *args: Any, first: Collection[str], **kwargs: Any) -> None:
        """Keep the names beside what click knows, and add ``--help-all``."""
        super().__init__(*args, **kwargs)
        self.first = first
        self.params.append(
            click.Option(
                ["--help-all"],
                is_flag=True,
                is_eager=True,
                expose_value=False,
                callback=self._show_all,
                help="Show every option and exit.",
            )
        )

    def _show_all(self, ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value:
            ctx.meta[_SHOWS_ALL] = True
            echo(ctx.get_help())
            ctx.exit()

    @override
    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for each heading, in the order of the options."""
        shows_all = _SHOWS_ALL in ctx.meta
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            if not (shows_all or param.name in self.first or {"--help", "--help-all"} & {*param.opts}):
                continue
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                heading = param.heading if shows_all and isinstance(param, FieldOption) else None
                sections.setdefault(heading or "Options", []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def filter_option(does: str) -> Callable[[_Function], _Function]:
    """Add ``--filter``; ``does`` says in its help what becomes of matching documents."""
    return click.option(
        "--filter",
        "filters",
        multiple=True,
        metavar="COLUMN=VALUE",
        help=f"{does} matching documents; =, !=, >, >=, <, <=, ~ (contains), or JSON; repeat.",
    )


def add_options(
    *kinds: type,
    but: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
    heading: str | None = None,
) -> Callable[[_Function], _Function]:
    """Add the options of dataclasses that have a help text, in their order, without those named in ``but``.

    ``defaults`` are those of this command, where they differ from the dataclass's. The help of a
    :class:`GroupedCommand` shows them under ``heading``.
    """
    made = [
        click_option(each, (defaults or {}).get(name), heading)
        for kind in kinds
        for name, each in options_of(kind).items()
        if each.about.help and name not in but
    ]

    def add(function: _Function) -> _Function:
        for decorate in reversed(made):
            function = decorate(function)
        return function

    return add


def click_option(
    each: Option, default: Any = None, heading: str | None = None
) -> Callable[[_Function], _Function]:
    """Return what adds an option to a command; what is not chosen is None, or the command's ``default``."""
    about, flag = each.about, each.flag
    settings: dict[str, Any] = {"envvar": about.variable, "required": each.is_required}
    if each.kind is bool:
        flag = f"{flag}/{about.off_flag}" if about.off_flag else flag
        settings |= {"is_flag": True, "default": default if about.off_flag else False}
    else:
        kind: Any = click.Choice(each.choices) if each.choices else _TYPES[each.kind]
        if each.name in _PREFIXES:
            kind = PrefixType()
        is_list = each.kind == tuple[str, ...]
        settings |= {"type": kind, "multiple": is_list, "metavar": about.metavar}
        if default is not None:  # click takes None for one, and then requires nothing
            settings |= {"default": default, "callback": _checked(each, default)}
    text = each.default_text if default is None else None  # click shows the command's own
    help_text = about.help if text is None else f"{about.help}  [default: {text}]"
    return click.option(
        flag, each.name, cls=FieldOption, field=each, heading=heading, help=help_text, **settings
    )


def _checked(each: Option, default: Any) -> Callable[[click.Context, click.Parameter, Any], Any]:
    def check(_ctx: click.Context, _param: click.Parameter, value: Any) -> Any:
        check_value(each, value, str(default))  # here, as the dataclass knows another default
        return value

    return check


def given(ctx: click.Context) -> dict[str, Any]:
    """Return the parameters that flag, environment or ``cairn.toml`` set, without defaults."""
    return {
        name: value
        for name, value in ctx.params.items()
        if ctx.get_parameter_source(name) not in (ParameterSource.DEFAULT, None) and value not in (None, ())
    }


def chosen(ctx: click.Context, kind: type) -> dict[str, Any]:
    """Return the options of a dataclass that were set, by field."""
    return {name: value for name, value in given(ctx).items() if name in options_of(kind)}
