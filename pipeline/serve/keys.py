"""API keys: who may do what with which collections.

    cairn_4f1c09d2ab37_<43 characters>       shown once, when it is made
          └─ id ─────┘ └─ 256 random bits

The file holds ids and SHA-256 digests, never a key: a random 256-bit secret needs no slow hash. It is written
atomically and readable by its owner only. A key can have a restriction, a filter that every document it reads
must match.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from cairn.pipeline import durable
from cairn.pipeline.errors import CairnError, ConfigError, IntegrityError
from cairn.pipeline.manifest import COLLECTION_NAME
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

log = logging.getLogger(__name__)

SCOPES: Final = ("search", "embed", "admin", "write", "principal")
"""Search and read documents; embed texts; read the server's metrics; write documents and collections; say for
whom each request asks, and see only what they may read.
"""
MAX_NAME_CHARACTERS: Final = 100

_TOKEN: Final = re.compile(r"cairn_(?P<key_id>[0-9a-f]{12})_[A-Za-z0-9_-]{43}")
_NO_DIGEST: Final = "0" * 64
_STRICT: Final[ConfigDict] = {"extra": "forbid", "strict": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class ApiKey:
    """A key, and what a request with it may do.

    Without ``collections`` it is for all, without ``revoked_at`` it is good.
    """

    __pydantic_config__ = _STRICT

    key_id: Annotated[str, Field(pattern="^[0-9a-f]{12}$")]
    name: str
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    scopes: tuple[str, ...]
    collections: tuple[str, ...] | None
    restriction: Mapping[str, Any] | None
    created_at: str
    revoked_at: str | None

    def reaches(self, collection: str) -> bool:
        """Tell whether the key is for this collection."""
        return self.collections is None or collection in self.collections


@dataclass(frozen=True, kw_only=True, slots=True)
class _Content:
    """What the file of keys holds."""

    __pydantic_config__ = _STRICT

    format_version: Literal[1]
    keys: list[ApiKey]

    def __post_init__(self) -> None:
        for key in self.keys:
            _check(key.name, key.scopes, key.collections, key.restriction)
        assert len({key.key_id for key in self.keys}) == len(self.keys), "each key has an id of its own"


EVERYTHING: Final = ApiKey(
    key_id="",
    name="",
    sha256="",
    scopes=SCOPES,
    collections=None,
    restriction=None,
    created_at="",
    revoked_at=None,
)
"""What a request may do where no key exists: on this machine's own address, before the first key is made."""


class KeyFile:
    """The file of keys; every change is made under a lock on its folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def marker_path(self) -> Path:
        """An empty file beside the keys: it says that there were some."""
        return self.path.with_name(f"{self.path.name}.made")

    def require_kept(self) -> None:
        """Raise :class:`ConfigError` where keys were made, and their file is gone."""
        if self.marker_path.exists() and not self.path.exists():
            raise ConfigError(
                f"the file of API keys must be there once keys were made, got no {self.path.name}; restore "
                f"it or make new keys, or remove {self.marker_path.name} beside it to serve without keys"
            )

    def read(self) -> list[ApiKey]:
        """Return all keys, revoked ones too; a damaged file raises :class:`IntegrityError`."""
        with durable.storage_errors("reading the API keys"):
            try:
                content = durable.read_bytes(self.path)
            except FileNotFoundError:
                return []
        return _parse(content)

    def create(
        self,
        name: str,
        *,
        scopes: Sequence[str] = ("search",),
        collections: Sequence[str] | None = None,
        restriction: Mapping[str, Any] | None = None,
        token: str | None = None,
    ) -> tuple[ApiKey, str]:
        """Make a key; return it with its token, which is kept nowhere else.

        Names are for people, so no two valid keys share one. ``token`` is a token made elsewhere. If it is a
        valid key already, that key is returned unchanged. Its name may be taken, because a deployment's next
        secret has the name of the last.
        """
        _check(name, scopes, collections, restriction)
        if "admin" in scopes and (collections is not None or restriction is not None):
            raise ConfigError(
                "a key with the scope admin must be for all collections, got some or a filter; make a "
                "key of its own for admin"
            )
        if "write" in scopes and restriction is not None:
            raise ConfigError(
                "a key with the scope write must be for all documents, got a filter; make a key of its "
                "own for writes"
            )
        if "principal" in scopes and {"admin", "write"} & set(scopes):
            raise ConfigError(
                "a key with the scope principal must only read, got the scope admin or write too; make a key "
                "of its own for each"
            )
        given, token = token, token or f"cairn_{secrets.token_hex(6)}_{secrets.token_urlsafe(32)}"
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise ConfigError(
                "a key must be cairn_, 12 hexadecimal digits, _ and 43 of A-Z a-z 0-9 _ -, got "
                f"{len(token)} characters else"
            )
        key = ApiKey(
            key_id=match["key_id"],
            name=name,
            sha256=digest(token),
            scopes=tuple(scope for scope in SCOPES if scope in scopes),
            collections=None if collections is None else tuple(dict.fromkeys(collections)),
            restriction=restriction,
            created_at=_now(),
            revoked_at=None,
        )
        with self._locked():
            keys = self.read()
            for found in keys:
                if found.key_id == key.key_id and found.sha256 == key.sha256 and found.revoked_at is None:
                    return found, token
                if given is None and found.name == name and found.revoked_at is None:
                    raise ConfigError(
                        f"a key's name must be new, got {name!r}, which key {found.key_id} has; choose "
                        "another, or revoke that key"
                    )
                if found.key_id == key.key_id:
                    raise ConfigError(
                        f"a key's id must be new, got {key.key_id}, which another key has or a revoked "
                        "one; make another key"
                    )
            self._write([*keys, key])
        return key, token

    def revoke(self, wanted: str) -> ApiKey:
        """Make a key worthless from now on, by its id or its name, which must be of one good key."""
        with self._locked():
            keys = self.read()
            good = [key for key in keys if key.revoked_at is None]
            found = [key for key in good if key.key_id == wanted] or [
                key for key in good if key.name == wanted
            ]
            if len(found) > 1:
                raise ConfigError(
                    "a name must be of one key to revoke it, got one of "
                    f"{', '.join(key.key_id for key in found)}; name an id"
                )
            if not found:
                raise ConfigError(
                    f"a key to revoke must be good, got {wanted[:40]!r}, no good key's id or name; see "
                    "`cairn keys list`"
                )
            revoked = replace(found[0], revoked_at=_now())
            self._write([revoked if key is found[0] else key for key in keys])
        return revoked

    def _write(self, keys: Sequence[ApiKey]) -> None:
        content = asdict(_Content(format_version=1, keys=[*keys]))
        with durable.storage_errors("writing the API keys"):
            with durable.replacing(self.path) as temporary:
                temporary.touch(mode=0o600)
                temporary.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
            if not self.marker_path.exists():
                durable.write_bytes(self.marker_path, b"")

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
        with durable.storage_errors("opening the folder of the API keys"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


class Keyring:
    """The keys a server goes by; a key made or revoked counts from the next request on.

    Once there were keys, one is needed: neither revoking the last nor removing the file opens a running
    server.
    """

    def __init__(self, file: KeyFile, *, is_required: bool) -> None:
        self._file = file
        self._is_required = is_required
        self._stamp: tuple[int, int, int] | None = None
        self._keys: dict[str, ApiKey] = {}
        self._failure: CairnError | None = None
        self._refresh()

    @property
    def is_required(self) -> bool:
        """Tell whether a request needs a key."""
        self._refresh()
        return self._is_required

    @property
    def is_readable(self) -> bool:
        """Tell whether keys can be told from others: not where their file is damaged."""
        self._refresh()
        return self._failure is None

    def grant_of(self, token: str) -> ApiKey | None:
        """Return the good key of a token, None where there is none; unreadable keys raise their error."""
        self._refresh()
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        match = _TOKEN.fullmatch(token)
        key = self._keys.get(match["key_id"]) if match else None
        # Compared also where no key has this id, so that the time taken does not tell.
        is_equal = hmac.compare_digest(digest(token), _NO_DIGEST if key is None else key.sha256)
        return key if key is not None and is_equal and key.revoked_at is None else None

    def _refresh(self) -> None:
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        self._is_required = self._is_required or stamp is not None
        try:
            self._keys = {key.key_id: key for key in self._file.read()}
            self._failure = None
        except CairnError as error:
            self._keys, self._failure = {}, error
            log.error("serve.keys_unreadable sentence=%s", error)  # noqa: TRY400
        self._stamp = stamp

    def _read_stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self._file.path.stat()
        except FileNotFoundError:
            return None
        except OSError:
            return (0, 0, 0)
        return found.st_ino, found.st_mtime_ns, found.st_size


def digest(token: str) -> str:
    """Return what is stored of a token."""
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


def _check(
    name: str, scopes: Sequence[str], collections: Sequence[str] | None, restriction: Mapping[str, Any] | None
) -> None:
    if not 1 <= len(name) <= MAX_NAME_CHARACTERS or not name.isprintable():
        raise ConfigError(
            f"a key's name must have 1 to {MAX_NAME_CHARACTERS} printable characters, got {name[:40]!r}"
        )
    if not scopes or not set(scopes) <= set(SCOPES):
        raise ConfigError(
            f"scopes must be some of {', '.join(SCOPES)}, got {', '.join(scopes)[:80] or 'none'}"
        )
    for collection in collections or ():
        if not COLLECTION_NAME.fullmatch(collection):
            raise ConfigError(
                f"a collection's name must match ^{COLLECTION_NAME.pattern}$, got {collection[:80]!r}"
            )
    if collections is not None and not collections:
        raise ConfigError("collections must name at least one collection, got none; leave them out for all")
    if restriction is not None and not restriction:
        raise ConfigError("a key's restriction must be a filter, got an empty one; leave it out for none")


def _parse(content: bytes) -> list[ApiKey]:
    """Read keys strictly: what is not understood must not be taken for a weaker restriction."""
    try:
        return TypeAdapter(_Content).validate_json(content).keys
    except ValidationError as error:
        raise IntegrityError(
            "the file of API keys must be as `cairn keys` writes it; restore it, or remove it and make new "
            "keys"
        ) from error


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
