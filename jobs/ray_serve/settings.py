"""Who answers `cairn serve`: this process, or processes of a Ray cluster and how many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from cairn.pipeline.options import About, check_options, option

MAX_PROCESSES: Final = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSettings:
    """What ``engine`` = ray needs beside the settings of a server.

    ``address`` = None starts a Ray of its own on this machine.
    """

    engine: Literal["local", "ray"] = option(
        "local", About("Who searches: this process, or shards on a Ray cluster.")
    )
    address: str | None = option(
        None,
        About("Ray cluster, HOST:PORT or auto.", default_text="one of our own", variable="RAY_ADDRESS"),
    )
    shards: int = option(
        2,
        About(
            "Parts a collection is searched in, each of whole partitions.",
            low=1,
            high=MAX_PROCESSES,
        ),
    )
    shard_replicas: int = option(
        2, About("Processes that hold each part, with engine ray.", low=1, high=MAX_PROCESSES)
    )
    replicas: int = option(
        1, About("Processes that answer requests, with engine ray.", low=1, high=MAX_PROCESSES)
    )

    def __post_init__(self) -> None:
        check_options(self)
