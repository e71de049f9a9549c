"""Names that answer from another collection: `cairn switch` moves one in a single rename, and back.

    <root>/aliases.json    {"handbook": {"to": "handbook-2", "before": "handbook"}}

Readers follow a name: a server, `cairn search`, ``open_collection``. Whoever writes names the collection
itself, so a nightly ingest of ``handbook`` goes on with its own files whatever the name answers from. A name
leads to a collection, never to another name. The file is replaced whole, under a lock of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from cairn.pipeline import durable
from cairn.pipeline.errors import CollectionBusyError, ConfigError, IntegrityError
from cairn.pipeline.index.generation import open_latest_intact_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.names import resolve_root, store_uri
from cairn.pipeline.manifest import COLLECTION_NAME

ALIASES_NAME: Final = "aliases.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Alias:
    """The collection that a name answers from, and the one before."""

    to: str
    before: str


def aliases_path(root: Path | str) -> Path:
    """Return where the names of a root are kept."""
    folder = Path(root) if store_uri(root) is None else resolve_root(root)
    return folder / ALIASES_NAME


def read_aliases(root: Path | str) -> Mapping[str, Alias]:
    """Return the switched names of a root; a damaged file raises :class:`IntegrityError`.

    One that may not be read, or a root that may not, raises :class:`StorageError`.
    """
    try:
        found = json.loads(durable.read_bytes(aliases_path(root)))
        aliases = {name: Alias(**alias) for name, alias in found.items()}
        names = [*aliases, *(each for alias in aliases.values() for each in (alias.to, alias.before))]
        if all(COLLECTION_NAME.fullmatch(name) for name in names):
            return aliases
        fault = "names no collection"
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except PermissionError as error:
        durable.raise_storage_error(error, f"reading {ALIASES_NAME} under the root")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        fault = "cannot be read"
    raise IntegrityError(f"{ALIASES_NAME} under the root {fault}; remove it, and switch each name again")


def other_names_of(root: Path | str, target: str) -> list[str]:
    """Return the names beside its own that answer from a collection."""
    return [name for name, alias in read_aliases(root).items() if alias.to == target != name]


def target_of(root: Path | str, name: str) -> str:
    """Return the collection that a name answers from: itself where it was not switched."""
    alias = read_aliases(root).get(name)
    return name if alias is None else alias.to


def switch(root: Path | str, name: str, target: str | None) -> Alias:
    """Let a name answer from another collection, None: from the one before; return what holds now.

    The target is checked whole first. Raises :class:`CollectionNotFoundError` where it is not there,
    :class:`DamageError` where it is damaged.
    """
    if store_uri(root) is not None:
        raise ConfigError(
            f"a switched name must be under a root that is a folder, got {str(root)!r}; in an object store "
            "let each server's clients name the collection itself"
        )
    CollectionLayout.at(Path(root), name)  # checks the name
    path = aliases_path(root)

    def busy(by_whom: str) -> CollectionBusyError:
        return CollectionBusyError(f"another name is being switched{by_whom}; try again")

    with durable.exclusive_lock(path.with_name(f".{ALIASES_NAME}.lock"), "the lock of switched names", busy):
        aliases = dict(read_aliases(root))
        now = aliases.get(name, Alias(to=name, before=name))
        chosen = now.before if target is None else target
        layout = CollectionLayout.at(Path(root), chosen)
        if target is None and (name not in aliases or (chosen == name and not layout.exists())):
            raise ConfigError(
                f"{name!r} must have answered from a collection before, got none; switch it to another one"
            )
        if chosen == now.to:
            return now
        if chosen != name and chosen in aliases and aliases[chosen].to != chosen:
            raise ConfigError(
                f"a name must be switched to a collection, got {chosen!r}, which answers from "
                f"{aliases[chosen].to!r}; name that one"
            )
        layout.require_exists()
        found = open_latest_intact_generation(layout)
        if found.warning is not None or found.missing:
            raise layout.damaged(f"collection {chosen!r} must be whole to be switched to")
        aliases[name] = Alias(to=chosen, before=now.to)
        content = {name: asdict(alias) for name, alias in sorted(aliases.items())}
        with durable.storage_errors("switching a name"):
            durable.write_json(path, content)
        return aliases[name]
