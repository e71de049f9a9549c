"""Where shards are encoded: in this process, or by the workers of a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final, Literal

from cairn.pipeline.errors import ConfigError, install_command
from cairn.pipeline.options import About, check_options, option, options_of, shown

EngineName = Literal["local", "ray"]
_WORKERS: Final = About(low=1, high=10_000)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Where shards are encoded, and by how many.

    The rest holds for ``ray`` alone. ``address`` = None starts a Ray of its own on this machine.
    ``max_workers`` = None takes as many as the cluster has CPUs, or GPUs if a worker needs one; no more are
    started than there are shards, and a run that cannot have ``min_workers`` of them fails.
    ``shard_deadline`` = None learns it from the shards that are finished.
    """

    name: EngineName = "local"
    address: str | None = option(
        None,
        About(
            "Ray cluster, HOST:PORT or auto.",
            default_text="one of our own, with engine ray",
            variable="RAY_ADDRESS",
        ),
    )
    min_workers: int = option(1, _WORKERS)
    max_workers: int | None = option(None, _WORKERS)
    worker_cpus: int = option(1, About("CPUs of a worker, one thread each.", low=1, high=1_024))
    worker_gpus: float = option(0.0, About("GPUs of a worker.", low=0, high=1_024))
    shard_deadline: float | None = option(
        None, About("Seconds until a shard goes to another worker.", above=0, default_text="learnt")
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.max_workers is not None and self.max_workers < self.min_workers:
            raise ConfigError(
                f"min_workers must be at most max_workers, got {self.min_workers}:{self.max_workers}; give "
                "the smaller first"
            )


def engine_of(chosen: Mapping[str, Any]) -> EngineConfig:
    """Return the engine that options by name ask for: Ray where it is said, or where a cluster is named."""
    address = chosen.get("address") or os.environ.get("RAY_ADDRESS") or None
    fields = {option: chosen[option] for option in options_of(EngineConfig) if option in chosen}
    fields["name"] = chosen.get("engine") or ("ray" if address else "local")
    fields["address"] = address if fields["name"] == "ray" else None
    if "workers" in chosen:
        fields["min_workers"], fields["max_workers"] = worker_range(chosen["workers"])
    return EngineConfig(**fields)


def worker_range(workers: Any) -> tuple[int, int]:
    """Read ``8``, or ``2:8``: at least and at most so many."""
    least, _, most = str(workers).partition(":")
    try:
        return int(least), int(most or least)
    except ValueError:
        raise ConfigError(f"workers must be a number, or two as in 2:8, got {shown(workers)}") from None


def require_ray() -> None:
    """Raise :class:`ConfigError` where Ray, which an extra brings, is not installed."""
    if find_spec("ray") is None:
        raise ConfigError(
            f"a Ray cluster must have the package ray, got none; install it with {install_command('ray')}"
        )
