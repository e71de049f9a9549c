"""The settings a model's folder brings along: how its vectors were pooled in training, and behind which instructions.

    flag, environment, cairn.toml ─▶ what the collection has stored ─▶ what the folder brings ─▶ default

They hold where nobody chose otherwise and the collection is new; the manifest stores the values they come to, so that a folder which
changes later changes no collection. A folder Cairn saved brings all its encoder's settings, a Sentence-Transformers folder its pooling,
prompts and truncation, around a decoder the causal mask too unless its ``is_causal`` is false; a CDE checkpoint brings its context and
prefixes, NV-Embed its latent attention; another transformer and the embedded model nothing. Reads JSON only: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from pipeline.config import CAUSAL_FAMILIES, DEFAULT_MODEL, PREFIX_POOLINGS, EncoderConfig
from pipeline.errors import ModelError
from pipeline.model.cde_settings import cde_settings, is_cde
from pipeline.model.embedded_weights import MODEL_NAMES
from pipeline.model.names import model_folder
from pipeline.model.sentence_transformers_folder import (
    SentenceTransformersFolder,
    read_json,
    read_json_if_any,
    read_sentence_transformers_folder,
)

CAIRN_SETTINGS_NAME: Final = "cairn_config.json"
CAIRN_FORMAT: Final = 1
OF_THE_PLACE: Final = frozenset({"model", "precision", "batch_tokens"})
"""Settings that belong to where a model runs, not to the model: no folder brings them."""

_OF_SENTENCE_TRANSFORMERS: Final = {"mean": "mean", "cls": "cls", "lasttoken": "last", "mean_sqrt_len_tokens": "mean"}


def encoder_config(chosen: Mapping[str, Any]) -> EncoderConfig:
    """Return the settings of an encoder: what was ``chosen`` over what its model brings over the defaults."""
    return EncoderConfig(**{**model_defaults(chosen), **chosen})


def model_defaults(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the folder of ``chosen["model"]`` brings for the encoder settings that ``chosen`` does not have.

    Raises :class:`ConfigError` for a name that cannot be had, :class:`ModelError` for a pooling Cairn does not run where none is chosen.
    """
    model = chosen.get("model", DEFAULT_MODEL)
    if model in MODEL_NAMES:
        return {}
    folder = model_folder(model)
    if (folder / CAIRN_SETTINGS_NAME).is_file():
        brought = _of_cairn(folder / CAIRN_SETTINGS_NAME)
    else:
        described = read_sentence_transformers_folder(folder)
        config = read_json_if_any((folder if described is None else described.transformer) / "config.json")
        brought = _of_language_model(config, described)
        if described is not None:
            brought = {**_of_description(described, {**brought, **chosen}), **brought}
        if is_cde(config):
            brought = _of_cde(config, brought, chosen)
    return {name: value for name, value in brought.items() if name not in chosen}


def _of_cairn(path: Path) -> dict[str, Any]:
    content = read_json(path)
    settings: Any = content.get("encoder")
    known = {item.name for item in fields(EncoderConfig)} - OF_THE_PLACE
    if content.get("format") != CAIRN_FORMAT or not isinstance(settings, dict) or not known.issuperset(settings):
        raise ModelError(
            f"{path.name} of the model must have format {CAIRN_FORMAT} and settings this release knows, got others; update Cairn"
        )
    try:
        EncoderConfig(**settings)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"{path.name} of the model must hold settings that go together, got others ({error}); save the model again"
        ) from error
    return settings


def settings_of_a_folder(config: EncoderConfig) -> dict[str, Any]:
    """Return what ``cairn_config.json`` holds of these settings."""
    return {"format": CAIRN_FORMAT, "encoder": {name: value for name, value in asdict(config).items() if name not in OF_THE_PLACE}}


def _of_language_model(config: Mapping[str, Any], described: SentenceTransformersFolder | None) -> dict[str, Any]:
    """Return latent attention for NV-Embed, and the mask of a decoder that Sentence-Transformers runs with it."""
    if config.get("model_type") == "nvembed":
        return {"pooling": "latent"}
    is_masked = config.get("model_type") in CAUSAL_FAMILIES and config.get("is_causal") is not False
    return {"causal": True} if is_masked and described is not None else {}


def _of_description(described: SentenceTransformersFolder, chosen: Mapping[str, Any]) -> dict[str, Any]:
    brought: dict[str, Any] = {}
    if described.pooling is not None and "pooling" not in chosen:
        brought["pooling"] = _pooling(described)
    if described.query_prompt:
        brought["query_prefix"] = described.query_prompt
    if described.document_prompt:
        brought["document_prefix"] = described.document_prompt
    if described.truncate_dim is not None:
        brought["truncate_dim"] = described.truncate_dim
    if described.pools_prompt and _pools_prefix({**brought, **chosen}):
        brought["pool_prefix"] = True
    return brought


def _of_cde(config: Mapping[str, Any], brought: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a CDE checkpoint brings: its prompts as its folder has them, the rest by its configuration."""
    of_config = cde_settings(config)
    found = {**of_config, **brought, "pool_prefix": of_config["pool_prefix"]}
    if not (found["pool_prefix"] and _pools_prefix({**found, **chosen})):
        del found["pool_prefix"]
    return found


def _pools_prefix(resolved: Mapping[str, Any]) -> bool:
    has_prefix = resolved.get("query_prefix") or resolved.get("document_prefix")
    return bool(has_prefix) and resolved.get("pooling", "mean") in PREFIX_POOLINGS and resolved.get("attention", "chunk") == "chunk"


def _pooling(described: SentenceTransformersFolder) -> str:
    mode = described.pooling or "mean"
    known = ", ".join(_OF_SENTENCE_TRANSFORMERS)
    if mode not in _OF_SENTENCE_TRANSFORMERS:
        raise ModelError(
            f"the pooling of the model must be one of {known}, got {mode}; choose another model, or give a pooling of your own"
        )
    # The length of a mean's denominator is lost when vectors are normalised, but not on the way through a dense layer.
    if mode == "mean_sqrt_len_tokens" and described.steps:
        raise ModelError(f"the pooling of a model with dense layers must be mean, cls or lasttoken, got {mode}; choose another model")
    if mode == "cls" and not described.pools_prompt and (described.query_prompt or described.document_prompt):
        raise ModelError("the pooling cls of a model with prompts must include the prompt, got include_prompt false; choose another model")
    return _OF_SENTENCE_TRANSFORMERS[mode]
