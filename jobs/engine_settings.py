"""Where shards are encoded: in this process, or by the workers of a Ray cluster."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final, Literal

from cairn.pipeline.errors import ConfigError, install_command
from cairn.pipeline.options import About, check_options, option

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


def require_ray() -> None:
    """Raise :class:`ConfigError` where Ray, which an extra brings, is not installed."""
    if find_spec("ray") is None:
        raise ConfigError(
            f"a Ray cluster must have the package ray, got none; install it with {install_command('ray')}"
        )
