"""What a generation is made of, written last and believed only when every hash in it matches.

A fingerprint is the SHA-256 of canonical JSON; composed fingerprints hash their children's, so that equal
fingerprints mean equal settings all the way down.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from cairn.pipeline import durable
from cairn.pipeline.config import EncoderConfig, IndexConfig
from cairn.pipeline.errors import DamageError, IntegrityError

FORMAT_VERSION: Final = 9
"""What is written and read."""
TOKENIZER_VERSION: Final = 3
"""How texts become words: see ``cairn.pipeline.lexical.tokenizer``."""
MANIFEST_NAME = "MANIFEST.json"
COLLECTION_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,62}")


def fingerprint(**parts: Any) -> str:
    """Hash named JSON values into 64 hex digits; the order of the names does not matter."""
    canonical = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Size and hash a file must have."""

    size_bytes: int
    sha256: str

    def problem(self, path: Path, *, check_hash: bool = True) -> str | None:
        """Return what is wrong with the file at ``path``, None where it is as it must be."""
        try:
            size = path.stat().st_size if path.is_file() else None
            if size is not None and size == self.size_bytes:
                is_right = not check_hash or durable.sha256_of_file(path) == self.sha256
                return None if is_right else "does not match its SHA-256"
        except FileNotFoundError:
            size = None
        return "is missing" if size is None else f"must have {self.size_bytes} bytes, got {size}"


def record_file(path: Path) -> FileRecord:
    """Measure a file as it lies on disk."""
    return FileRecord(size_bytes=path.stat().st_size, sha256=durable.sha256_of_file(path))


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentRecord:
    """One run of a generation's rows, whose files never change: see ``cairn.pipeline.index.segments``.

    ``name`` begins the names of its files. It stores ``documents`` and ``chunks``, of which the deleted ones
    count no more. ``indexes`` describes each FAISS file (kind, metric, nlist, nprobe). ``languages`` counts
    the stored documents in each language.
    """

    name: str
    documents: int
    chunks: int
    deleted_documents: int
    deleted_chunks: int
    indexes: Mapping[str, Mapping[str, Any]]
    languages: Mapping[str, int]

    @property
    def live_documents(self) -> int:
        """Count the documents that are not deleted."""
        return self.documents - self.deleted_documents

    @property
    def live_chunks(self) -> int:
        """Count the chunks that are not deleted."""
        return self.chunks - self.deleted_chunks


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionRecord:
    """The folder of a partition, and which generation of it belongs to one of the collection, 0 for none.

    ``is_lost`` says that a repair found nothing to save, and that no ingest has read its sources since.
    """

    name: str
    generation: int = 0
    sha256: str = ""
    is_lost: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """One generation: the Lance versions it pins, the files derived from them, and its fingerprints.

    ``lance_versions`` maps table name to version, ``lance_files`` a path below ``lance/`` to what the file
    must be: Lance checksums nothing, and its files never change once written. ``fingerprints`` has
    ``encoder``, ``context`` and ``clusters``. ``settings`` is the resolved ingest configuration.
    ``context_cluster_sizes`` is the histogram of documents over clusters when the context was drawn.
    ``segments`` stand in the order of the tables' rows. ``languages`` counts their documents in each
    language. ``sources`` lists the input files of the run that published this. ``partitions`` is empty where
    the rows lie in this folder itself; else it has neither tables nor files of segments, and ``segments`` are
    those of all partitions, in their order.
    """

    collection: str
    generation: int
    created_at: str
    run_id: str
    lance_versions: Mapping[str, int]
    lance_files: Mapping[str, FileRecord]
    documents: int
    chunks: int
    tokens: int
    vector_dim: int
    files: Mapping[str, FileRecord]
    fingerprints: Mapping[str, str]
    settings: Mapping[str, Any]
    segments: tuple[SegmentRecord, ...]
    languages: Mapping[str, int]
    context_documents: int
    context_cluster_sizes: tuple[int, ...]
    documents_at_context: int
    encode_tokens_per_second: float
    sources: tuple[str, ...] = field(default=())
    partitions: tuple[PartitionRecord, ...] = field(default=())
    format_version: int = FORMAT_VERSION
    tokenizer_version: int = TOKENIZER_VERSION

    @property
    def filled(self) -> list[PartitionRecord]:
        """Return the partitions that ever had a document."""
        return [record for record in self.partitions if record.generation]

    @property
    def lost(self) -> dict[str, str]:
        """Return the partitions that a repair could not save, by name, with what to do."""
        again = "its files were lost; ingest its sources again with --reread to fill it"
        return {record.name: again for record in self.partitions if record.is_lost}

    @property
    def indexes(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the descriptions of the largest segment's FAISS files."""
        return max(self.segments, key=lambda segment: segment.live_chunks).indexes

    @property
    def encoder(self) -> EncoderConfig:
        """Return the settings of the encoder that made the vectors."""
        return EncoderConfig(**self.settings["encoder"])

    @property
    def index_config(self) -> IndexConfig:
        """Return the settings of the index files."""
        return IndexConfig(**self.settings["index"])

    def write(self, folder: Path) -> None:
        """Write ``MANIFEST.json`` durably into a generation's folder: in one line."""
        content = json.dumps(self, default=_plain, sort_keys=True, ensure_ascii=False)
        durable.write_bytes(folder / MANIFEST_NAME, f"{content}\n".encode())

    @classmethod
    def read(cls, folder: Path, sha256: str | None = None) -> Manifest:
        """Read and check a manifest; a missing, damaged or foreign one raises :class:`IntegrityError`.

        ``sha256`` is the hash it must have, None where none was recorded.
        """
        path = folder / MANIFEST_NAME
        try:
            content = durable.read_bytes(path)
            if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
                raise DamageError(
                    f"{MANIFEST_NAME} of generation {folder.name} does not match its SHA-256 in CURRENT"
                )
        except FileNotFoundError:
            raise DamageError(f"generation {folder.name} has no {MANIFEST_NAME}") from None
        except OSError as error:
            raise DamageError(f"{MANIFEST_NAME} of generation {folder.name} cannot be read") from error
        return cls.of(content, folder.name)

    @classmethod
    @lru_cache(maxsize=4)  # a publication reads two manifests ten times
    def of(cls, content: bytes, generation: str) -> Manifest:
        """Check the content of a manifest; see :meth:`read`."""
        what = f"{MANIFEST_NAME} of generation {generation}"
        try:
            raw = json.loads(content)
        except ValueError as error:
            raise DamageError(f"{what} cannot be read") from error
        if not isinstance(raw, dict) or raw.get("format_version") != FORMAT_VERSION:
            raise IntegrityError(
                f"{what} must have format_version {FORMAT_VERSION}; it was written by another release, so "
                "ingest the sources again into a new collection"
            )
        if (version := raw.get("tokenizer_version", TOKENIZER_VERSION)) != TOKENIZER_VERSION:
            raise IntegrityError(
                f"{what} must have tokenizer_version {TOKENIZER_VERSION}, got {version}: another release "
                "counted its words; ingest the sources again into a new collection"
            )
        names = {item.name for item in fields(cls)}
        if set(raw) != names:
            raise DamageError(f"{what} has missing or unknown fields: {', '.join(sorted(set(raw) ^ names))}")
        try:
            if any(Path(name).name != name for name in raw["files"]) or any(
                Path(name).is_absolute() or ".." in Path(name).parts for name in raw["lance_files"]
            ):
                raise DamageError(f"{what} must name files of its folder")
            # A setting that this release no longer has: the encoder's fingerprint says if it moved vectors.
            known = {item.name for item in fields(EncoderConfig)}
            encoder = {name: value for name, value in raw["settings"]["encoder"].items() if name in known}
            raw["settings"] = {**raw["settings"], "encoder": encoder}
            for kind in ("files", "lance_files"):
                raw[kind] = {name: FileRecord(**record) for name, record in raw[kind].items()}
            raw["context_cluster_sizes"] = tuple(raw["context_cluster_sizes"])
            raw["sources"] = tuple(raw["sources"])
            raw["segments"] = tuple(SegmentRecord(**record) for record in raw["segments"])
            raw["partitions"] = tuple(PartitionRecord(**record) for record in raw["partitions"])
        except (KeyError, TypeError, AttributeError) as error:
            raise DamageError(f"{what} is malformed") from error
        return cls(**raw)


def _plain(record: Any) -> dict[str, Any]:
    """Return the fields of a record; ``asdict`` would copy all that they hold."""
    return {item.name: getattr(record, item.name) for item in fields(record)}
