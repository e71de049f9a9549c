"""What ``CURRENT`` of a collection in an object store says: its generations, each by its manifest."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from cairn.pipeline.errors import IntegrityError
from cairn.pipeline.manifest import FileRecord, fingerprint

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
        """Return the object's content, with a SHA-256 of all that it says."""
        said = {"format_version": POINTER_VERSION, **asdict(self)}
        return json.dumps({**said, "sha256": fingerprint(**said)}, indent=2, sort_keys=True).encode()

    @classmethod
    def of(cls, content: bytes, uri: str) -> Pointer:
        """Read a pointer; a damaged or foreign one raises :class:`IntegrityError`.

        Releases before this one wrote it without a hash.
        """
        try:
            raw: Any = json.loads(content)
            if raw["format_version"] != POINTER_VERSION:
                raise IntegrityError(
                    f"CURRENT of {uri} must have format_version {POINTER_VERSION}; it was written by "
                    "another release"
                )
            pointer = cls(
                token=str(raw["token"]), generations=tuple(map(_remote_generation, raw["generations"]))
            )
            is_intact = content == pointer.to_bytes() or set(raw) == {
                "format_version",
                "token",
                "generations",
            }
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _damaged(uri) from error
        if not is_intact:
            raise _damaged(uri)
        return pointer

    @property
    def served(self) -> RemoteGeneration:
        """The generation readers are to see."""
        return self.generations[0]


def _remote_generation(raw: Any) -> RemoteGeneration:
    return RemoteGeneration(
        generation=int(raw["generation"]),
        manifest=FileRecord(**raw["manifest"]),
        tags={path: FileRecord(**record) for path, record in raw["tags"].items()},
    )


def _damaged(uri: str) -> IntegrityError:
    return IntegrityError(
        f"CURRENT of {uri} must name its generations, got other content; bring back the object's "
        "last version, "
        "or remove the collection there and ingest it again"
    )
