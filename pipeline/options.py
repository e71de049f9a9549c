"""Options: fields of a settings dataclass that carry all that any surface says of them.

    @dataclass(frozen=True, kw_only=True, slots=True)
    class EncoderConfig:
        dims: int | None = option(None, About("Keep the first dimensions.", low=1, default_text="all"))

From such a field are made its flag, its ``CAIRN_*`` variable, its key in ``cairn.toml`` and its lines in
the reference (``cli/options.py``), its field of the HTTP schema (``pipeline/serve/schemas.py``), and the
check of its value (:func:`check_options`). An option without ``help`` is for Python only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from cairn.pipeline.counted import counted
from cairn.pipeline.errors import ConfigError

_Value = TypeVar("_Value")
_METADATA_KEY: Final = "option"
_MAX_SHOWN_CHARACTERS: Final = 80

MAX_NUMBER: Final = 10**9
"""Of an option that names no bound of its own: more would overflow somewhere, at the latest in a C int."""
MAX_SEED: Final = 2**31 - 1
"""FAISS keeps the seed of a K-means in a C int."""


@dataclass(frozen=True, slots=True)
class About:
    """What is said of an option beyond its name, type and default.

    ``low`` and ``high`` are inclusive bounds, ``above`` is an exclusive one. ``default_text`` says what holds
    where nothing is chosen, if that is not the default itself. ``is_infinity_allowed`` takes inf beyond the
    bounds. ``is_column`` names a column of documents, which the search checks. ``flag`` replaces the field's
    name on the command line, ``off_flag`` turns a flag off, ``variable`` replaces ``CAIRN_<VERB>_<NAME>``.
    """

    help: str = ""
    _: KW_ONLY
    low: float | None = None
    high: float = MAX_NUMBER
    above: float | None = None
    is_infinity_allowed: bool = False
    is_column: bool = False
    default_text: str | None = None
    flag: str | None = None
    off_flag: str | None = None
    variable: str | None = None
    metavar: str | None = None


def metadata_of(about: About) -> Mapping[str, About]:
    """Return the metadata of a required option: ``steps: int = field(metadata=metadata_of(About("…")))``."""
    return {_METADATA_KEY: about}


def option(default: _Value, about: About) -> _Value:
    """Return a dataclass field with a default and what is said of it."""
    return field(default=default, metadata=metadata_of(about))


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """An option of a dataclass: ``kind`` is its type without ``None``; a required one has no default."""

    name: str
    kind: Any
    is_optional: bool
    default: Any
    about: About

    @property
    def is_required(self) -> bool:
        """Whether a value must be given."""
        return self.default is MISSING

    @property
    def flag(self) -> str:
        """Return the option's flag on the command line."""
        return self.about.flag or f"--{self.name.replace('_', '-')}"

    @property
    def high(self) -> float | None:
        """Return the largest number, None where it is no number."""
        return self.about.high if self.kind in (int, float) else None

    @property
    def is_checked(self) -> bool:
        """Whether :func:`check_options` checks it: numbers, text, truth, choices and lists of them."""
        return bool(self.choices) or self.kind in _CHECKED or self.item_kind in _CHECKED

    @property
    def choices(self) -> tuple[str, ...]:
        """Return the words the option may have, () where it is no choice."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def item_kind(self) -> Any:
        """Return the type of each item of a list, None where it is no list."""
        return get_args(self.kind)[0] if get_origin(self.kind) is tuple else None

    @property
    def default_text(self) -> str | None:
        """Return the default as people read it, None where there is nothing to say."""
        if self.about.default_text is not None:
            return self.about.default_text
        if self.default is MISSING or self.default is None or self.default == () or self.default is False:
            return None
        if self.default == "":
            return "none"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    @property
    def contract(self) -> str:
        """Return what a value must be, as in ``a whole number from 1 to 200``."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.item_kind is not None:
            return f"a list, each {_WORDS.get(self.item_kind, 'a value')}"
        return f"{_WORDS[self.kind]}{_bounds_in_words(self.about)}"

    def accepts(self, value: Any) -> bool:
        """Whether a value has the option's type and lies within its bounds."""
        if value is None:
            return self.is_optional
        if self.choices:
            return value in self.choices
        if self.item_kind is not None:
            return isinstance(value, (list, tuple)) and all(_is_a(self.item_kind, item) for item in value)
        return _is_a(self.kind, value) and (self.kind not in (int, float) or _is_within(self.about, value))


_CHECKED: Final[Mapping[Any, type]] = {str: str, bool: bool, int: Integral, float: Real}
_WORDS: Final[Mapping[Any, str]] = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
}


@cache
def options_of(kind: type) -> Mapping[str, Option]:
    """Return the options of a dataclass by name, in the order of its fields."""
    return {item.name: item for item in _read_options(kind)}


def _read_options(kind: type) -> Iterator[Option]:
    hints = get_type_hints(kind)
    for item in fields(kind):
        alternatives = get_args(hints[item.name])
        is_union = get_origin(hints[item.name]) in (Union, UnionType)
        is_optional = is_union and NoneType in alternatives
        yield Option(
            name=item.name,
            kind=alternatives[0] if is_optional and len(alternatives) == 2 else hints[item.name],
            is_optional=is_optional,
            default=item.default,
            about=item.metadata.get(_METADATA_KEY, About()),
        )


def check_options(config: Any) -> None:
    """Refuse a value of another type than its field's, or outside its bounds; make numbers of NumPy plain.

    Fields of other types than numbers, text, truth, choices and lists of them are the dataclass's own
    business. Raises :class:`ConfigError`.
    """
    for name, each in _checked_options(type(config)):
        value = getattr(config, name)
        check_value(each, value, each.default_text)
        if each.kind in (int, float) and value is not None and not isinstance(value, int | float):
            object.__setattr__(config, name, each.kind(value))  # JSON knows no numbers of NumPy


def check_value(each: Option, value: Any, default_text: str | None) -> None:
    """Refuse a value that an option must not have; the sentence names the default that holds there."""
    if not each.accepts(value):
        default = "" if default_text is None else f" (default: {default_text})"
        is_beyond = each.high == MAX_NUMBER and isinstance(value, int | float) and value > MAX_NUMBER
        contract = f"at most {_number(MAX_NUMBER)}" if is_beyond else each.contract
        raise ConfigError(f"{each.name} must be {contract}, got {shown(value)}{default}")


def check_names(what: str, names: Iterable[str], kind: type) -> None:
    """Refuse names of options that a dataclass does not have; ``what`` begins the sentence."""
    known = [name for name, each in options_of(kind).items() if each.about.help]
    for name in names:
        if name not in options_of(kind):
            raise ConfigError(f"{what} has no option {name!r}{did_you_mean(name, known)}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of a sentence that refuses a word: what was meant, else what there is."""
    names = list(known)
    close = get_close_matches(word, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(names)}"


@cache
def _checked_options(kind: type) -> tuple[tuple[str, Option], ...]:
    return tuple((name, each) for name, each in options_of(kind).items() if each.is_checked)


def _is_a(kind: Any, value: Any) -> bool:
    return isinstance(value, _CHECKED[kind]) and (kind is bool or not isinstance(value, bool))


def _is_within(limits: About, value: float) -> bool:
    if limits.is_infinity_allowed and value == math.inf:
        return True
    return (
        (limits.low is None or value >= limits.low)
        and value <= limits.high
        and (limits.above is None or value > limits.above)
        and value == value  # false for NaN alone
        and value != -math.inf
    )


def _bounds_in_words(limits: About) -> str:
    most = f"{_number(limits.high)}{', or inf' if limits.is_infinity_allowed else ''}"
    is_named = limits.high != MAX_NUMBER
    if limits.low is not None:
        return f" from {_number(limits.low)} to {most}" if is_named else f" of at least {_number(limits.low)}"
    least = "" if limits.above is None else f" above {_number(limits.above)}"
    return f"{least} and at most {most}" if is_named else least


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def shown(value: Any) -> str:
    """Return a value for a sentence: plain ones, and short lists of them, as Python writes them.

    Others are named by their type. No sentence carries a document, and nothing nested is walked.
    """
    if isinstance(value, str) and len(value) >= _MAX_SHOWN_CHARACTERS:
        return f"{value[: _MAX_SHOWN_CHARACTERS - 1]!r}…"
    if _is_plain(value):
        return repr(value)
    if isinstance(value, int):
        return "a number of more than 18 digits"
    if isinstance(value, list | tuple) and all(map(_is_plain, cast("Sequence[Any]", value))):
        written = repr(value)
        if len(written) <= _MAX_SHOWN_CHARACTERS:
            return written
    if isinstance(value, list | tuple | Mapping):
        return f"a {type(value).__name__} of {counted(len(cast('Sequence[Any]', value)), 'item')}"
    return f"a value of type {type(value).__name__}"


def _is_plain(value: Any) -> bool:
    return (
        value is None
        or isinstance(value, str | bool | float)
        or (isinstance(value, int) and abs(value) < 2**63)
    )
