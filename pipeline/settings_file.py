"""A file of settings, ``cairn.toml`` or a job's: a table for each verb, with long option names as keys.

job = "build_index"              what `cairn submit` runs of a job's file
root = "cairn-data"              root and collection apply to every verb
collection = "handbook"

[ingest]
sources = ["articles/"]
landmark-interval = 64
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cairn.pipeline.errors import ConfigError
from cairn.pipeline.options import About, Option, check_value

SHARED: Final = ("root", "collection")
"""Before the first table, for every verb that has them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingsFile:
    """What a file says: its job, what every verb shares, and each verb's own; keys have underscores."""

    job: str | None
    shared: Mapping[str, Any]
    tables: Mapping[str, Mapping[str, Any]]


def read_settings_file(path: Path) -> SettingsFile:
    """Read a file; raise :class:`ConfigError` for one that cannot be read."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path} must be valid TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} must be nested less deeply; remove the deep table or list") from error
    shared = {_key(name): value for name, value in content.items() if not isinstance(value, dict)}
    job = shared.pop("job", None)
    unknown = sorted(set(shared) - set(SHARED))
    if unknown:
        raise ConfigError(
            f"{path} has no setting {unknown[0]!r} before the first table; there are {', '.join(SHARED)}"
        )
    for name, value in {**shared, **({} if job is None else {"job": job})}.items():
        check_setting(f"{path}: {name}", str, value)
    tables = {
        verb: {_key(name): value for name, value in table.items()}
        for verb, table in content.items()
        if isinstance(table, dict)
    }
    return SettingsFile(job=job, shared=shared, tables=tables)


def check_setting(what: str, kind: Any, value: Any) -> None:
    """Refuse a value of another type; ``what`` begins the sentence."""
    check_value(Option(name=what, kind=kind, is_optional=False, default=None, about=About()), value, None)


def _key(name: str) -> str:
    return name.replace("-", "_")
