"""The settings and limits of a server."""

from __future__ import annotations

import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cairn.pipeline.config import ABOUT_INDEX_DEVICE, IndexDevice
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.manifest import COLLECTION_NAME
from cairn.pipeline.options import About, check_options, option
from cairn.pipeline.search_options import OpenOptions

DEFAULT_PORT: Final = 8400
DEFAULT_DEADLINE_SECONDS: Final = 10.0
KEYS_NAME: Final = "keys.json"

MAX_BODY_BYTES: Final = 1 << 20
MAX_WRITE_BYTES: Final = 8 << 20
"""Of a request that brings documents."""
MAX_FILE_BYTES: Final = 128 << 20
"""Of a file that is sent."""
MAX_HEADER_BYTES: Final = 16 << 10
"""Request line and headers together."""
TABLE_TIMEOUT_SECONDS: Final = 2.0
"""What one query of the tables may take, a filter or BM25."""
MAX_SECONDS: Final = 600
MAX_THREADS: Final = 256
MAX_REQUESTS: Final = 10_000
MAX_LOG_MEGABYTES: Final = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeSettings(OpenOptions):
    """A server's settings; ``collections`` = () serves all collections under the root."""

    root: Path
    collections: tuple[str, ...] = ()
    host: str = option(
        "127.0.0.1",
        About("Address to listen on; one beyond this machine needs an API key. `::` is every address."),
    )
    port: int = option(DEFAULT_PORT, About("Port to listen on; 0: any that is free.", low=0, high=65_535))
    writable: bool = option(False, About("Take writes: documents, sources and collections."))
    allowed_sources: tuple[str, ...] = option(
        (),
        About(
            "Folder or URI whose files a writable server may ingest when asked; repeat.",
            flag="--allowed-source",
            default_text="none",
        ),
    )
    keys_file: Path | None = option(None, About("File of API keys.", default_text="ROOT/keys.json"))
    readers_column: str | None = option(
        None,
        About(
            "Column that lists who may read a document; requests then name their reader in "
            "X-Cairn-Principal.",
            metavar="COLUMN",
            default_text="none",
        ),
    )
    hide_word_statistics: bool = option(
        False,
        About(
            "Score what a reader or a key with a filter may find by those documents alone, so that no score "
            "tells of others."
        ),
    )
    allowed_hosts: tuple[str, ...] = option(
        (), About("Name the server may be called by, beside its own; repeat.", flag="--allowed-host")
    )
    deadline_seconds: float = option(
        DEFAULT_DEADLINE_SECONDS, About("Time a request may take.", above=0, high=MAX_SECONDS)
    )
    max_requests: int = option(
        128, About("Requests in flight; more are told to try again.", low=1, high=MAX_REQUESTS)
    )
    encoder_threads: int | None = option(
        None, About("Threads of an encoder.", low=1, high=MAX_THREADS, default_text="one a processor")
    )
    search_threads: int | None = option(
        None, About("Searches at a time.", low=1, high=MAX_THREADS, default_text="one a processor")
    )
    index_device: IndexDevice | None = option(None, ABOUT_INDEX_DEVICE)
    rerank_model: str | None = option(
        None,
        About(
            "Cross-encoder for requests that ask to rerank, a name or folder; extra rerank.", metavar="MODEL"
        ),
    )

    feedback_log: Path | None = option(
        None,
        About("Log queries and clicks as Parquet in this folder.", metavar="FOLDER", default_text="no log"),
    )
    feedback_log_megabytes: int = option(
        256, About("What the feedback log may take; its oldest files go.", low=8, high=MAX_LOG_MEGABYTES)
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name in self.collections:
            if not COLLECTION_NAME.fullmatch(name):
                raise ConfigError(
                    f"a collection's name must match ^{COLLECTION_NAME.pattern}$, got {name[:80]!r}"
                )

    @property
    def keys_path(self) -> Path:
        """The file of API keys: the one named, else ``keys.json`` beside the collections or their copies."""
        from cairn.pipeline.index.names import resolve_root

        return self.keys_file if self.keys_file is not None else resolve_root(self.root) / KEYS_NAME

    @property
    def is_loopback(self) -> bool:
        """Tell whether only this machine can reach the server; other names may stand for anything."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Tell whether a host is this machine's own address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def num_processors() -> int:
    """Count the processors this process may use."""
    return len(os.sched_getaffinity(0))
