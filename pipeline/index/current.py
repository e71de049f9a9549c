"""The file ``CURRENT``: which generation is served, and the SHA-256 that each manifest must have.

    00000007 9f86d081884c7d65…    the served generation
    00000006 60303ae22b998861…    the one before, which readers fall back to
    1c8a3f70                      CRC-32 of the lines above: a flipped hash damages no manifest

An empty file :data:`PUBLISHED` in a generation's folder says that ``CURRENT`` has named it, so that an older
``CURRENT`` that was put back is noticed.

Files without the last line are read, too, as are those with the name of the served generation alone. A
manifest without a recorded hash is not checked until the next publication records one.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

GENERATION_FOLDER: Final = re.compile(r"[0-9]{8}")
KEPT_GENERATIONS: Final = 2
"""The served one and the one before it, for readers that still hold it and as the way back."""
PUBLISHED: Final = "PUBLISHED"

_RECORDED: Final = re.compile(rb"((?:[0-9]{8} [0-9a-f]{64}\n)+)([0-9a-f]{8}\n)?")
_NAME_ALONE: Final = re.compile(rb"[0-9]{8}\n")


def generation_name(number: int) -> str:
    """Return the folder name of a generation: eight digits."""
    return f"{number:08d}"


@dataclass(frozen=True, slots=True)
class Current:
    """Generations and the SHA-256 of their manifests, the served one first; None where none is recorded."""

    manifests: Mapping[int, str | None]

    @classmethod
    def of(cls, content: bytes) -> Current | None:
        """Read the content of ``CURRENT``; None where it is damaged."""
        if _NAME_ALONE.fullmatch(content):
            return cls({int(content): None})
        found = _RECORDED.fullmatch(content)
        if found is None or found[2] not in (None, _checksum(found[1])):
            return None
        lines = found[1].decode("ascii").splitlines()
        numbers = [int(line[:8]) for line in lines]
        if any(newer <= older for newer, older in itertools.pairwise(numbers)):
            return None
        return cls({number: line[9:] for number, line in zip(numbers, lines, strict=True)})

    def to_bytes(self) -> bytes:
        """Return the file's content; a generation without a recorded hash has no line."""
        lines = (
            f"{generation_name(number)} {sha256}\n" for number, sha256 in self.manifests.items() if sha256
        )
        said = "".join(lines).encode()
        return said + _checksum(said)

    @property
    def served(self) -> int:
        """Return the generation that readers are to see."""
        return next(iter(self.manifests))

    @property
    def is_recorded(self) -> bool:
        """Tell whether the hashes of the manifests are recorded."""
        return None not in self.manifests.values()


def _checksum(said: bytes) -> bytes:
    return f"{zlib.crc32(said):08x}\n".encode()
