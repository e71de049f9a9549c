"""A folder of an object store: whole objects, a conditional write, errors in sentences.

Wraps obstore, which retries refused and broken requests. Knows nothing of collections. Only ``s3://`` has
been tried.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Final

from cairn.pipeline import durable
from cairn.pipeline.errors import (
    CairnError,
    ConfigError,
    DamageError,
    StorageError,
    TryAgainError,
    first_line,
    install_command,
)
from cairn.pipeline.manifest import FileRecord

RANGE_BYTES: Final = 16 << 20
"""A download goes in pieces, each a request with its own retries."""
PART_BYTES: Final = 8 << 20
PARTS_AT_A_TIME: Final = 4
MAX_PARTS: Final = 9_000
"""Below S3's 10,000 parts an upload."""
TRANSFERS: Final = 4
"""Files on their way at a time, each holding a piece or a few parts in memory."""
REQUEST_SECONDS: Final = 30.0
"""What a small request may take, and how long a download may bring nothing."""
SLOWEST_BYTES: Final = 256 << 10
"""A second. A slower connection counts as broken."""
PIECE_SECONDS: Final = REQUEST_SECONDS + TRANSFERS * PARTS_AT_A_TIME * PART_BYTES / SLOWEST_BYTES
"""What a piece of a file may take while all others share the connection with it."""
RETRIES: Final = 8


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A small object as it was read: ``e_tag`` names this content in :meth:`ObjectFolder.swap`.

    The time is the store's.
    """

    content: bytes
    e_tag: str
    modified_at: datetime


class ObjectFolder:
    """Objects below ``s3://bucket/prefix``; opening one makes no request.

    Raises :class:`TryAgainError` where the store does not answer, :class:`StorageError` where it refuses, and
    :class:`ConfigError` where there is no such bucket or obstore is not installed.
    """

    def __init__(self, uri: str) -> None:
        try:
            import obstore
            from obstore.store import from_url
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"a root in an object store must have the package {error.name}, got none; "
                f"install it with {install_command('store')}"
            ) from error
        self.uri = uri
        self._obstore: Any = obstore
        is_plain = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")

        def opened(seconds: float, **options: Any) -> Any:
            limit = timedelta(seconds=seconds)
            settings: dict[str, Any] = {
                "client_options": {"timeout": limit, "allow_http": is_plain, **options},
                "retry_config": {"max_retries": RETRIES, "retry_timeout": 2 * limit},
            }
            return from_url(uri, **settings)

        with self._answers("when it is opened"):
            self._store = opened(REQUEST_SECONDS)
            self._uploads = opened(PIECE_SECONDS)
            # Of an upload a client reads nothing until the end.
            self._downloads = opened(PIECE_SECONDS, read_timeout=timedelta(seconds=REQUEST_SECONDS))

    def __reduce__(self) -> tuple[type[ObjectFolder], tuple[str]]:
        """Travel without keys: another machine opens the folder with its own."""
        return ObjectFolder, (self.uri,)

    def read(self, key: str) -> StoredObject | None:
        """Return an object; None where there is none."""
        try:
            with self._answers(f"when {key} is read"):
                found = self._obstore.get(self._store, key)
                return StoredObject(bytes(found.bytes()), found.meta["e_tag"], found.meta["last_modified"])
        except _NotFoundError:
            return None

    def write(self, key: str, content: bytes | Path) -> None:
        """Write an object whole, from memory or a file, over whatever was there."""
        part_bytes = (
            PART_BYTES if isinstance(content, bytes) else max(PART_BYTES, content.stat().st_size // MAX_PARTS)
        )
        try:
            with self._answers(f"when {key} is written"):
                self._obstore.put(
                    self._uploads, key, content, chunk_size=part_bytes, max_concurrency=PARTS_AT_A_TIME
                )
        except _NotFoundError:  # of the upload: the reply to its last request was lost, and that was repeated
            raise TryAgainError(
                f"{self.uri} lost the upload of {key}; run the same command again, it goes on from there"
            ) from None

    def swap(self, key: str, content: bytes, e_tag: str | None) -> bool:
        """Write an object if it still is the one with ``e_tag``, or still missing (None); say whether it was.

        After :class:`TryAgainError` it may have been written: read it to know.
        """
        mode: Any = "create" if e_tag is None else {"e_tag": e_tag}
        refusals = (self._obstore.exceptions.AlreadyExistsError, self._obstore.exceptions.PreconditionError)
        try:
            with self._answers(f"when {key} is written", passing=refusals):
                self._obstore.put(self._store, key, content, mode=mode)
        except refusals:
            return False
        except _NotFoundError:  # what was to be replaced is gone
            return False
        return True

    def download(self, key: str, path: Path, record: FileRecord) -> None:
        """Write an object to a file durably, whole or not at all.

        Another content than recorded raises :class:`DamageError`.
        """
        digest = hashlib.sha256()
        with durable.storage_errors(f"downloading {path.name}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with durable.replacing(path) as temporary:
                with temporary.open("wb") as file:
                    for piece in self._pieces(key, record, path.name):
                        digest.update(piece)
                        file.write(piece)
                if digest.hexdigest() != record.sha256:
                    raise DamageError(f"{path.name} in {self.uri} does not match its SHA-256")

    def is_intact(self, key: str, record: FileRecord) -> bool:
        """Read an object whole and say whether it is what was recorded; it must be there, in that size."""
        digest = hashlib.sha256()
        for piece in self._pieces(key, record, key):
            digest.update(piece)
        return digest.hexdigest() == record.sha256

    def _pieces(self, key: str, record: FileRecord, name: str) -> Iterator[bytes]:
        for start in range(0, record.size_bytes, RANGE_BYTES):
            length = min(RANGE_BYTES, record.size_bytes - start)
            try:
                with self._answers(f"when {name} is read"):
                    piece = bytes(self._obstore.get_range(self._downloads, key, start=start, length=length))
            except _NotFoundError:
                raise DamageError(f"{name} is missing in {self.uri}") from None
            yield piece

    def list(self, prefix: str) -> Mapping[str, tuple[int, datetime]]:
        """Return size and time of every object below a prefix, by key."""
        with self._answers("when it is listed"):
            pages = self._obstore.list(self._store, prefix, chunk_size=1_000)
            return {
                entry["path"]: (entry["size"], entry["last_modified"]) for page in pages for entry in page
            }

    def folders(self) -> list[str]:
        """Return the names of the folders right below."""
        with self._answers("when it is listed"):
            found = self._obstore.list_with_delimiter(self._store)
            return [prefix.rstrip("/").rpartition("/")[2] for prefix in found["common_prefixes"]]

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that are gone already count as deleted."""
        wanted = list(keys)
        if wanted:
            with self._answers("when objects are deleted"), contextlib.suppress(FileNotFoundError):
                self._obstore.delete(self._store, wanted)

    @contextlib.contextmanager
    def _answers(self, action: str, passing: tuple[type[BaseException], ...] = ()) -> Generator[None]:
        exceptions = self._obstore.exceptions
        try:
            yield
        except passing:
            raise
        except FileNotFoundError as error:
            self._require_bucket(error)
            raise _NotFoundError(str(error)) from None
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise StorageError(
                f"{self.uri} refuses {action}; check its keys (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
            ) from error
        except (exceptions.BaseError, OSError, ValueError) as error:
            if isinstance(error, CairnError):
                raise
            self._require_bucket(error)
            raise TryAgainError(
                f"{self.uri} does not answer {action}: {first_line(error)}; run the same command again "
                "when it does"
            ) from error

    def _require_bucket(self, error: BaseException) -> None:
        if "NoSuchBucket" in str(error):
            raise ConfigError(f"the bucket of {self.uri} must exist; make it first") from None


class _NotFoundError(Exception):
    """There is no such object."""
