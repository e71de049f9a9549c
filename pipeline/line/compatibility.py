"""Whether a run may continue a collection: its settings and its model must be those it was built with."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from cairn.pipeline.config import NO_MODEL, IngestConfig
from cairn.pipeline.errors import FingerprintMismatchError
from cairn.pipeline.index.layout import CollectionLayout, read_manifest
from cairn.pipeline.line.engine import Begun, Engine
from cairn.pipeline.line.ingest_settings import SPEED_ONLY
from cairn.pipeline.line.view import read_view
from cairn.pipeline.manifest import Manifest
from cairn.pipeline.model.folders.names import MODEL_NAMES, describe_model, is_endpoint, model_folder


def stored_manifest(layout: CollectionLayout) -> Manifest | None:
    """Return the served generation's manifest, None where nothing is published yet.

    A first publication that was killed just before ``CURRENT`` was written is none: the writer completes it.
    """
    layout.refresh()
    return copied_manifest(layout)


def copied_manifest(layout: CollectionLayout) -> Manifest | None:
    """See :func:`stored_manifest`; for who holds the writer's lock, which has brought the copy up to date."""
    if not layout.current_path.exists() and layout.generation_numbers() == [1]:
        return None
    number = layout.current_generation_number()
    return None if number is None else read_manifest(layout, number)


def stored_settings(root: str | Path, collection: str) -> Mapping[str, Any] | None:
    """Return the settings a collection was built with, None for a new collection."""
    manifest = stored_manifest(CollectionLayout.at(Path(root), collection))
    return manifest.settings if manifest else None


def _shown(value: Any) -> str:
    return "not set" if value is None else repr(value)


def require_same_settings(published: Manifest | None, config: IngestConfig) -> None:
    """Refuse settings that would mix vectors, clusters or contexts of two kinds in one collection.

    Raises :class:`FingerprintMismatchError` naming each setting that differs. The model's path may differ:
    its weights are compared instead.
    """
    if published is None:
        return
    asked, defaults = config.to_dict(), IngestConfig().to_dict()
    del asked["encoder"]["model"]
    if asked["encoder"]["sparse_model"] and published.settings["encoder"].get("sparse_model"):
        del asked["encoder"]["sparse_model"]
    # A setting that is younger than the collection had its default value then.
    differences = [
        f"{stage}.{name} is {_shown(stored[name])}, got {_shown(value)}"
        for stage in ("encoder", "cluster", "context", "index")
        for stored in ({**defaults[stage], **published.settings[stage]},)
        for name, value in asked[stage].items()
        if (stage != "index" or name in ("language", "partitions"))
        and name not in SPEED_ONLY
        and stored[name] != value
        and not _follows(name, stored, asked[stage])
    ]
    if differences:
        raise FingerprintMismatchError(
            f"collection {published.collection!r} must keep the settings it was built with: "
            f"{'; '.join(differences)}; leave them out, or use a new collection"
        )


def is_repointed(published: Manifest | None, config: IngestConfig) -> bool:
    """Say whether the path of a model differs from the one the collection was built with."""
    return published is not None and (
        published.settings["encoder"]["model"] != config.encoder.model
        or published.settings["encoder"].get("sparse_model") != config.encoder.sparse_model
    )


def may_have_another_model(published: Manifest, config: IngestConfig) -> bool:
    """Say whether the weights must be compared: the path differs, or files are newer than the collection."""
    if is_repointed(published, config):
        return True
    if config.encoder.model in MODEL_NAMES or is_endpoint(config.encoder.model):
        return False  # its hash is fixed; an endpoint is asked before it encodes
    if config.encoder.model == NO_MODEL:
        return False
    published_seconds = datetime.fromisoformat(published.created_at).timestamp()
    files = (path.stat() for path in model_folder(config.encoder.model).rglob("*") if path.is_file())
    # The manifest counts whole seconds.
    return any(int(file.st_mtime) > published_seconds for file in files)


def require_same_model(
    layout: CollectionLayout, published: Manifest, config: IngestConfig, engine: Engine
) -> None:
    """Load the model; raise :class:`FingerprintMismatchError` where the collection was built with another."""
    begun = engine.begin(read_view(layout, published))
    require_same_encoder(published, begun, config)


def require_same_encoder(published: Manifest, begun: Begun, config: IngestConfig) -> None:
    """Raise :class:`FingerprintMismatchError` for other encoders than the collection was built with."""
    found = {"encoder": begun.encoder_fingerprint, "sparse": begun.sparse_fingerprint}
    for kind, setting in (("encoder", "model"), ("sparse", "sparse_model")):
        if published.fingerprints.get(kind) == found[kind]:
            continue
        built_with, got = (
            describe_model(settings[setting])
            for settings in (published.settings["encoder"], config.to_dict()["encoder"])
        )
        raise FingerprintMismatchError(
            f"collection {published.collection!r} must keep the model it was built with ({built_with}), "
            f"got other weights, tokenizer or context from {got}; restore them, or use a new collection"
        )


def _follows(name: str, stored: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """Say whether a setting may differ: an overlap whose default follows a window, a server that moved."""
    if name == "describe":
        return bool(stored[name]) and bool(asked[name])
    return name == "window_overlap_tokens" and stored["window_tokens"] != asked["window_tokens"]
