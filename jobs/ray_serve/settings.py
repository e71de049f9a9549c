"""Who answers `cairn serve`: this process, or processes of a Ray cluster and how many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from cairn.pipeline.errors import ConfigError
from cairn.pipeline.options import MAX_NUMBER, About, check_options, option
from cairn.pipeline.types import PlaceBy

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
        2, About("Parts a collection is searched in, with engine ray.", low=1, high=MAX_PROCESSES)
    )
    shard_replicas: int = option(
        2, About("Processes that hold each part, with engine ray.", low=1, high=MAX_PROCESSES)
    )
    place_by: PlaceBy = option(
        "order",
        About("What shares a part, with engine ray: documents in their order, or clusters of them."),
    )
    route_clusters: int | None = option(
        None,
        About(
            "Ask only the parts that hold so many clusters, those nearest to the query; with place_by "
            "cluster.",
            low=1,
            high=MAX_NUMBER,
            default_text="all parts",
        ),
    )
    replicas: int = option(
        1, About("Processes that answer requests, with engine ray.", low=1, high=MAX_PROCESSES)
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.route_clusters is not None and self.place_by != "cluster":
            raise ConfigError(
                f"route_clusters must come with place_by cluster, got {self.place_by}; add --place-by cluster"
            )
