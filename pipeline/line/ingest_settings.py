"""The settings of an ingest: what was chosen, over what the collection was built with, over the defaults.

A new collection takes the defaults of its model's folder (``cairn.pipeline.model.folders.model_defaults``)
before Cairn's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Final

from cairn.pipeline.config import (
    DEFAULT_MODEL,
    ClusterConfig,
    ContextConfig,
    CorpusConfig,
    EncoderConfig,
    IndexConfig,
    IngestConfig,
)
from cairn.pipeline.model.folders.model_defaults import context_defaults, model_defaults

STAGES: Final[Mapping[str, type[Any]]] = {
    "corpus": CorpusConfig,
    "cluster": ClusterConfig,
    "context": ContextConfig,
    "encoder": EncoderConfig,
    "index": IndexConfig,
}
"""The stages that have settings, by the names under which a manifest stores them."""


def resolve_ingest_config(chosen: Mapping[str, Any], stored: Mapping[str, Any] | None) -> IngestConfig:
    """Compose one configuration: what was ``chosen`` over what is ``stored`` over the defaults.

    ``chosen`` is keyed by stage and field, as in ``{"encoder": {"pooling": "lmk"}}``; ``stored`` is a
    manifest's ``settings``.
    """
    stages: dict[str, Any] = {}
    for stage, kind in STAGES.items():
        names = {item.name for item in fields(kind)}
        kept = {
            name: _as_field(value) for name, value in (stored or {}).get(stage, {}).items() if name in names
        }
        # A collection has all its settings stored: its model folder's defaults apply to a new one only.
        brought = {} if stored is not None else _brought(stage, chosen)
        stages[stage] = kind(
            **{**brought, **kept, **{name: _as_field(value) for name, value in chosen.get(stage, {}).items()}}
        )
    config = IngestConfig(**stages)
    return replace(config, **{key: value for key, value in chosen.items() if key not in STAGES})


def remembered_settings(config: IngestConfig) -> dict[str, Any]:
    """Return the settings that a manifest records and later runs take, as plain JSON values."""
    return replace(config, corpus=config.remembered_corpus or config.corpus).to_dict()


def _brought(stage: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the model's folder brings for a stage."""
    of_encoder = chosen.get("encoder", {})
    if stage == "encoder":
        return model_defaults(of_encoder)
    model = of_encoder.get("model", DEFAULT_MODEL)
    return context_defaults(model) if stage == "context" and isinstance(model, str) else {}


def _as_field(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
