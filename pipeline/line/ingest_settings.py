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
from cairn.pipeline.corpus.scan import Scan, first_vector_dim
from cairn.pipeline.errors import FingerprintMismatchError
from cairn.pipeline.model.folders.model_defaults import (
    NO_CONTEXT,
    context_defaults,
    given_defaults,
    ingest_defaults,
)

STAGES: Final[Mapping[str, type[Any]]] = {
    "corpus": CorpusConfig,
    "cluster": ClusterConfig,
    "context": ContextConfig,
    "encoder": EncoderConfig,
    "index": IndexConfig,
}
"""The stages that have settings, by the names under which a manifest stores them."""


SPEED_ONLY = frozenset({"precision", "backend", "batch_tokens", "endpoint_requests", "endpoint_price"})
"""Encoder settings that change no vector beyond rounding: they may differ from run to run."""


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


def with_vector_dim(scan: Scan, config: IngestConfig) -> tuple[Scan, IngestConfig]:
    """Return a scan and its settings with the width of the vectors that documents bring, where they do.

    It is the collection's, that of the first vector in a new one. Raises :class:`FingerprintMismatchError`
    where a collection would hold given vectors beside encoded ones.
    """
    column, known = config.corpus.vector_column, config.encoder.given_dims
    if (column is None) != (known is None):
        must, got = ("encode all its documents", f"--vector-column {column}")
        if column is None:
            must, got = ("be given all its vectors", "no --vector-column")
        raise FingerprintMismatchError(
            f"a collection must {must}, as it was begun, got {got}; use a new collection for the others"
        )
    if column is None:
        return scan, config
    vector_dim = known or first_vector_dim(scan, config.corpus)
    settled = replace(config, encoder=replace(config.encoder, given_dims=vector_dim))
    return replace(scan, vector_dim=vector_dim), settled


def remembered_settings(config: IngestConfig) -> dict[str, Any]:
    """Return the settings that a manifest records and later runs take, as plain JSON values."""
    return replace(config, corpus=config.remembered_corpus or config.corpus).to_dict()


def _brought(stage: str, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the model's folder brings for a stage."""
    of_encoder = chosen.get("encoder", {})
    if chosen.get("corpus", {}).get("vector_column") is not None:
        return (
            given_defaults(of_encoder) if stage == "encoder" else {**NO_CONTEXT} if stage == "context" else {}
        )
    if stage == "encoder":
        return ingest_defaults(of_encoder)
    model = of_encoder.get("model", DEFAULT_MODEL)
    return context_defaults(model) if stage == "context" and isinstance(model, str) else {}


def _as_field(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
