"""What ``CURRENT`` of a collection in an object store says: the generations there are, each by its manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from pipeline.errors import IntegrityError
from pipeline.manifest import FileRecord

POINTER_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteGeneration:
    """One generation in the store.

    Its manifest names all its files but the Lance tags, which are named here.
    """

    generation: int
    manifest: FileRecord
    tags: Mapping[str, FileRecord]

    @property
    def folder(self) -> str:
        """The generation's folder in a copy."""
        return f"generations/{self.generation:08d}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pointer:
    """What the store's ``CURRENT`` says: the served generation first, then the one before.

    ``token`` makes each writing of it another.
    """

    token: str
    generations: tuple[RemoteGeneration, ...]

    def to_bytes(self) -> bytes:
        """Return the object's content."""
        return json.dumps(
            {"format_version": POINTER_VERSION, **asdict(self)}, indent=2, sort_keys=True
        ).encode()

    @classmethod
    def of(cls, content: bytes, uri: str) -> Pointer:
        """Read a pointer; a damaged or foreign one raises :class:`IntegrityError`."""
        try:
            raw: Any = json.loads(content)
            if raw["format_version"] != POINTER_VERSION:
                raise IntegrityError(
                    f"CURRENT of {uri} must have format_version {POINTER_VERSION}; it was written by "
                    "another release"
                )
            generations = tuple(
                RemoteGeneration(
                    generation=int(each["generation"]),
                    manifest=FileRecord(**each["manifest"]),
                    tags={path: FileRecord(**record) for path, record in each["tags"].items()},
                )
                for each in raw["generations"]
            )
            return cls(token=str(raw["token"]), generations=generations)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise IntegrityError(
                f"CURRENT of {uri} must name its generations, got other content; bring back the object's "
                "last version, "
                "or remove the collection there and ingest it again"
            ) from error

    @property
    def served(self) -> RemoteGeneration:
        """The generation readers are to see."""
        return self.generations[0]
