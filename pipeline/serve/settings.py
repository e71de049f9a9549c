"""What a server is started with, and the limits it keeps."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipeline.errors import ConfigError
from pipeline.index.layout import COLLECTION_NAME, resolve_root

DEFAULT_PORT: Final = 8400
DEFAULT_DEADLINE_SECONDS: Final = 10.0
KEYS_NAME: Final = "keys.json"

MAX_BODY_BYTES: Final = 1 << 20
MAX_HEADER_BYTES: Final = 16 << 10
"""Request line and headers together."""
TABLE_TIMEOUT_SECONDS: Final = 2.0
"""What one query of the tables may take, a filter or BM25."""
MAX_SECONDS: Final = 600.0
MAX_THREADS: Final = 256
MAX_REQUESTS: Final = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings:
    """A server's settings; ``collections`` = () serves whatever stands under the root, ``rerank_model`` = None reranks nothing.

    ``max_requests`` bounds the requests in flight. ``encoder_threads`` and ``search_threads`` default to the
    processors this process has.
    """

    root: Path
    collections: tuple[str, ...] = ()
    keys_file: Path | None = None
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    allowed_hosts: tuple[str, ...] = ()
    deadline_seconds: float = DEFAULT_DEADLINE_SECONDS
    max_requests: int = 128
    encoder_threads: int | None = None
    search_threads: int | None = None
    rerank_model: str | None = None

    def __post_init__(self) -> None:
        for name in self.collections:
            if not COLLECTION_NAME.fullmatch(name):
                raise ConfigError(
                    f"a collection's name must match ^{COLLECTION_NAME.pattern}$, got {name[:80]!r}"
                )
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"port must be a number from 0 to 65,535, got {self.port}")
        if not 0.0 < self.deadline_seconds <= MAX_SECONDS:
            raise ConfigError(
                f"deadline_seconds must be a number above 0 and at most {MAX_SECONDS:.0f}, got "
                f"{self.deadline_seconds}"
            )
        if not 1 <= self.max_requests <= MAX_REQUESTS:
            raise ConfigError(
                f"max_requests must be a number from 1 to {MAX_REQUESTS:,}, got {self.max_requests}"
            )
        for name, threads in (
            ("encoder_threads", self.encoder_threads),
            ("search_threads", self.search_threads),
        ):
            if threads is not None and not 1 <= threads <= MAX_THREADS:
                raise ConfigError(f"{name} must be a number from 1 to {MAX_THREADS}, got {threads}")

    @property
    def keys_path(self) -> Path:
        """The file of API keys: the one named, else ``keys.json`` beside the collections, or this machine's copies of them."""
        return self.keys_file if self.keys_file is not None else resolve_root(self.root) / KEYS_NAME

    @property
    def is_loopback(self) -> bool:
        """Tell whether only this machine can reach the server.

        A name other than localhost may stand for anything.
        """
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine's own address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def num_processors() -> int:
    """Count the processors this process may use."""
    return len(os.sched_getaffinity(0))
