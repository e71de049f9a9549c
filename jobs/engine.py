"""The engine that an :class:`EngineConfig` asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cairn.jobs.engine_settings import EngineConfig, require_ray

if TYPE_CHECKING:  # nothing is loaded before an engine is called
    from cairn.pipeline.config import IngestConfig
    from cairn.pipeline.line.engine import Engine


def open_engine(engine: EngineConfig, config: IngestConfig) -> Engine | None:
    """Return the engine that the line is given, None for its own; it connects at its first call."""
    if engine.name == "local":
        return None
    require_ray()
    from cairn.jobs.ray_cluster.engine import RayEngine

    return RayEngine(engine, config)
