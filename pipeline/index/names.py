"""What files and folders are called, where roots of collections lie, and what ``CURRENT`` says.

    00000007 9f86d081884c7d65…    the served generation
    00000006 60303ae22b998861…    the one before, which readers fall back to
    1c8a3f70                      CRC-32 of the lines above: a flipped hash damages no manifest

Nothing is opened here.
"""

from __future__ import annotations

import itertools
import os
import re
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cairn.pipeline.errors import ConfigError
from cairn.pipeline.manifest import MANIFEST_NAME, SegmentRecord
from cairn.pipeline.token_vectors.projection import LATE_NAME
from cairn.pipeline.vector_index import REFINE_SUFFIX

DOCUMENTS, CHUNKS = "documents", "chunks"
TABLES: Final = (DOCUMENTS, CHUNKS)

DOCUMENTS_FAISS: Final = "documents.faiss"
CHUNKS_FAISS: Final = "chunks.faiss"
VECTOR_FILES: Final = ((DOCUMENTS, DOCUMENTS_FAISS), (CHUNKS, CHUNKS_FAISS))
DOCUMENTS_ARROW: Final = "documents.arrow"
CHUNKS_ARROW: Final = "chunks.arrow"
PASSAGES_ARROW: Final = "passages.arrow"
TITLES_ARROW: Final = "titles.arrow"
LENGTHS_ARROW: Final = "lengths.arrow"
DELETED_BITS: Final = "deleted.bits"
TOKENS_ARROW: Final = "tokens.arrow"
SPARSE_ARROW: Final = "sparse.arrow"
OPTIONAL_FILES: Final = (TOKENS_ARROW, SPARSE_ARROW)
"""Of a segment: all of a collection have one, or none has."""

CONTEXT_ARROW: Final = "context.arrow"
CLUSTERS_ARROW: Final = "clusters.arrow"
SIDE_FILES: Final = (CONTEXT_ARROW, CLUSTERS_ARROW, LATE_NAME)
"""What a generation carries unchanged from the stages before; a collection may have none of them."""

COPIES: Final = "copies"
"""The folder of the second copies of all generations, beside theirs: one that is lost leaves its copies."""
SMALL_FOLDERS: Final = frozenset({"_versions", "_deletions"})
"""Of a table: all that a version consists of, but for its rows."""


def is_copied(name: str) -> bool:
    """Tell whether a file of a generation has a second copy."""
    return name in (MANIFEST_NAME, *SIDE_FILES) or name.endswith(DELETED_BITS)


POSITION_FILES: Final = (DOCUMENTS_ARROW, CHUNKS_ARROW, DELETED_BITS)
"""Of a segment: which documents and chunks there are, and where."""
NEEDED_FILES: Final = (
    DOCUMENTS_ARROW,
    CHUNKS_ARROW,
    DOCUMENTS_FAISS,
    CHUNKS_FAISS,
    PASSAGES_ARROW,
    TITLES_ARROW,
    LENGTHS_ARROW,
)
ROW_FILES: Final = (
    *NEEDED_FILES,
    *OPTIONAL_FILES,
    DOCUMENTS_FAISS + REFINE_SUFFIX,
    CHUNKS_FAISS + REFINE_SUFFIX,
)
"""Files of a segment that never change, as many of them as it has."""


def row_files(record: SegmentRecord, files: Collection[str]) -> list[str]:
    """Return the names of a segment's files in a generation, but for its deleted rows."""
    return [name for each in ROW_FILES if (name := record.name + each) in files]


def needed_files(record: SegmentRecord) -> list[str]:
    """Return the names of the files that a segment cannot do without."""
    deleted = [DELETED_BITS] if record.deleted_documents else []
    return [record.name + name for name in (*NEEDED_FILES, *deleted)]


STORE_URI: Final = re.compile(r"s3:/+(?P<bucket>[^/@]+)(?:/(?P<prefix>.*?))?/*")
"""``s3://bucket/prefix``; a path made of it has lost a slash."""


LEASE_KEY: Final = "LEASE"
"""The object in a store that names the writer of a collection."""


def cache_folder() -> Path:
    """Return the folder of what this machine can make or fetch again.

    RuntimeError where nothing says where the home is.
    """
    cache = (
        os.environ.get("CAIRN_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cairn"
    )
    return Path(cache).resolve()


def store_uri(root: Path | str) -> str | None:
    """Return the root as ``s3://bucket/prefix`` where it is one, None for a folder.

    Other schemes are refused.
    """
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(root)):
        return None
    found = STORE_URI.fullmatch(str(root))
    if found is None:
        raise ConfigError(
            f"the root must be a folder or s3://BUCKET/PREFIX, got {str(root)!r}; mount or copy other storage"
        )
    return "/".join(["s3:/", found["bucket"], *filter(None, [found["prefix"]])])


def resolve_root(root: Path | str) -> Path:
    """Return the root as an absolute folder.

    Of one in an object store, the folder of this machine's copies.
    """
    uri = store_uri(root)
    if uri is None:
        return Path(root).resolve()
    return cache_folder() / "s3" / uri.removeprefix("s3://")


GENERATION_FOLDER: Final = re.compile(r"[0-9]{8}")
KEPT_GENERATIONS: Final = 2
"""The served one and the one before it, for readers that still hold it and as the way back."""

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


def partition_of(doc_id: str, num_partitions: int) -> int:
    """Return the partition of a document, which depends on its id alone."""
    return zlib.crc32(doc_id.encode()) % num_partitions
