"""The file ``CURRENT``: which generation is served, and the SHA-256 that each manifest must have.

    00000007 9f86d081884c7d65…    the served generation
    00000006 60303ae22b998861…    the one before, which readers fall back to
    1c8a3f70                      CRC-32 of the lines above: a flipped hash damages no manifest

An empty file :data:`PUBLISHED` in a generation's folder says that ``CURRENT`` has named it, so that an older
``CURRENT`` that was put back is noticed.
"""

from __future__ import annotations

import itertools
import json
import re
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from cairn.pipeline.errors import IntegrityError
from cairn.pipeline.manifest import FileRecord, fingerprint

GENERATION_FOLDER: Final = re.compile(r"[0-9]{8}")
KEPT_GENERATIONS: Final = 2
"""The served one and the one before it, for readers that still hold it and as the way back."""
PUBLISHED: Final = "PUBLISHED"

_RECORDED: Final = re.compile(rb"((?:[0-9]{8} [0-9a-f]{64}\n)+)([0-9a-f]{8}\n)")


def generation_name(number: int) -> str:
    """Return the folder name of a generation: eight digits."""
    return f"{number:08d}"


@dataclass(frozen=True, slots=True)
class Current:
    """Generations and the SHA-256 of their manifests, the served one first."""

    manifests: Mapping[int, str]

    @classmethod
    def of(cls, content: bytes) -> Current | None:
        """Read the content of ``CURRENT``; None where it is damaged."""
        found = _RECORDED.fullmatch(content)
        if found is None or found[2] != _checksum(found[1]):
            return None
        lines = found[1].decode("ascii").splitlines()
        numbers = [int(line[:8]) for line in lines]
        if any(newer <= older for newer, older in itertools.pairwise(numbers)):
            return None
        return cls({number: line[9:] for number, line in zip(numbers, lines, strict=True)})

    def to_bytes(self) -> bytes:
        """Return the file's content."""
        lines = (f"{generation_name(number)} {sha256}\n" for number, sha256 in self.manifests.items())
        said = "".join(lines).encode()
        return said + _checksum(said)

    @property
    def served(self) -> int:
        """Return the generation that readers are to see."""
        return next(iter(self.manifests))


def _checksum(said: bytes) -> bytes:
    return f"{zlib.crc32(said):08x}\n".encode()


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
        """Read a pointer; a damaged or foreign one raises :class:`IntegrityError`."""
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
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise _damaged(uri) from error
        if content != pointer.to_bytes():
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
