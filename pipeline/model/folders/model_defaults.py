"""The settings that a model's folder brings: its pooling in training, and instructions.

    flag, environment, cairn.toml ─▶ what the collection has stored ─▶ what the folder brings ─▶ default

They hold where nothing else is chosen and the collection is new; the manifest stores the values they come to,
so that a folder which changes later changes no collection. A folder Cairn saved brings all its encoder's
settings; a Sentence-Transformers folder its pooling, prompts and truncation; NV-Embed its latent attention,
CDE its context and prefixes; a plain transformer and the embedded model nothing. Reads JSON only: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from cairn.pipeline.config import DEFAULT_MODEL, MACHINE_SETTINGS, ContextConfig, EncoderConfig
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.model.folders.model_types import CAUSAL_TYPES, cde_settings, is_cde
from cairn.pipeline.model.folders.names import MODEL_NAMES, model_folder
from cairn.pipeline.model.folders.sentence_transformers_folder import (
    SentenceTransformersFolder,
    read_json,
    read_json_if_any,
    read_sentence_transformers_folder,
)
from cairn.pipeline.poolings import POOLING_RULES, PREFIX_POOLINGS

CAIRN_SETTINGS_NAME: Final = "cairn_config.json"
CAIRN_FORMAT: Final = 1
_OF_CONTEXT: Final = ("context_documents", "max_document_tokens")
CONTEXT_POOLING: Final = "mean"
"""How a first stage pools the tokens of a context document."""

_OF_SENTENCE_TRANSFORMERS: Final = {
    name: pooling for pooling, rule in POOLING_RULES.items() for name in rule.read_from
}


def encoder_config(chosen: Mapping[str, Any]) -> EncoderConfig:
    """Return the settings of an encoder: what was ``chosen`` over what its model brings over the defaults."""
    known = [item.name for item in fields(EncoderConfig)]
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise ConfigError(
            f"an encoder's setting must be one of {', '.join(known)}, got {unknown[0]!r}; leave it out"
        )
    return EncoderConfig(**{**model_defaults(chosen), **chosen})


def model_defaults(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the folder of ``chosen["model"]`` brings for the settings that ``chosen`` does not have.

    Raises :class:`ConfigError` for a name that cannot be had, :class:`ModelError` for a pooling Cairn does
    not run where none is chosen.
    """
    model = chosen.get("model", DEFAULT_MODEL)
    if not isinstance(model, str):
        return {}  # EncoderConfig refuses it
    if model in MODEL_NAMES:
        return {} if "model" in chosen else {"model": model}
    folder = model_folder(model)
    if (folder / CAIRN_SETTINGS_NAME).is_file():
        brought = _of_cairn(folder / CAIRN_SETTINGS_NAME)
    else:
        described = read_sentence_transformers_folder(folder)
        config = read_json_if_any((folder if described is None else described.transformer) / "config.json")
        of_architecture = _of_architecture(config, is_described=described is not None)
        brought = of_architecture | (
            {} if described is None else _of_description(described, {*of_architecture, *chosen})
        )
    if not (brought.get("pool_prefix") and _can_pool_prefix({**brought, **chosen})):
        brought.pop("pool_prefix", None)
    return {name: value for name, value in {"model": model, **brought}.items() if name not in chosen}


def _of_architecture(config: Mapping[str, Any], *, is_described: bool) -> dict[str, Any]:
    """Return what follows from the kind of model: NV-Embed's pooling, CDE's context, a decoder's mask.

    A bare decoder is taken for one to be made an encoder. In a Sentence-Transformers folder it was trained as
    that library runs it, with its causal mask, unless ``is_causal`` in its configuration is false.
    """
    if config.get("model_type") == "nvembed":
        return {"pooling": "latent", "pool_prefix": not config.get("is_mask_instruction", True)}
    if is_cde(config):
        return cde_settings(config)
    is_decoder = config.get("model_type") in CAUSAL_TYPES
    return {"causal": True} if is_described and is_decoder and config.get("is_causal") is not False else {}


def _of_cairn(path: Path) -> dict[str, Any]:
    content = read_json(path)
    stored: Any = content.get("encoder")
    settings = stored if isinstance(stored, dict) else None
    known = {item.name for item in fields(EncoderConfig)} - MACHINE_SETTINGS
    if content.get("format") != CAIRN_FORMAT or settings is None or not known.issuperset(settings):
        raise ModelError(
            f"{path.name} of the model must have format {CAIRN_FORMAT} and settings this release knows, "
            "got others; update Cairn"
        )
    try:
        EncoderConfig(**settings)
    except (TypeError, ValueError) as error:
        raise ModelError(
            f"{path.name} of the model must hold settings that go together, got others ({error}); save "
            "the model again"
        ) from error
    return settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """The model that a folder of trained additions belongs to."""

    model: str
    weights_sha256: str


def base_of_folder(folder: Path) -> Base | None:
    """Return the base that a folder names, None where it holds a whole model."""
    content = read_json_if_any(folder / CAIRN_SETTINGS_NAME).get("base")
    if content is None:
        return None
    if not isinstance(content, dict) or not all(
        isinstance(content.get(item.name), str) for item in fields(Base)
    ):
        raise ModelError(
            f"base in {CAIRN_SETTINGS_NAME} of the model must hold a model and its weights_sha256, got "
            "others; save it again"
        )
    named: Any = content
    return Base(model=named["model"], weights_sha256=named["weights_sha256"])


def settings_of_a_folder(config: EncoderConfig, context: ContextConfig | None = None) -> dict[str, Any]:
    """Return what ``cairn_config.json`` holds of these settings, and of the context of training."""
    trained: dict[str, Any] = {}
    if context is not None:
        trained = {name: getattr(context, name) for name in _OF_CONTEXT} | {"pooling": CONTEXT_POOLING}
    return {
        "format": CAIRN_FORMAT,
        "encoder": {name: value for name, value in asdict(config).items() if name not in MACHINE_SETTINGS},
        **({"context": trained} if trained else {}),
    }


def context_config(model: str, chosen: Mapping[str, Any]) -> ContextConfig:
    """Return what was ``chosen`` for a context over what the model was trained with over the defaults."""
    return ContextConfig(**{**context_defaults(model), **chosen})


def context_defaults(model: str) -> dict[str, Any]:
    """Return how many context documents a model was trained with, and how many of their tokens it reads.

    Empty where its folder does not say. Other content raises :class:`ModelError`, and so does a pooling that
    Cairn does not run; a folder that names none means the mean.
    """
    if model in MODEL_NAMES:
        return {}
    stored: Any = read_json_if_any(model_folder(model) / CAIRN_SETTINGS_NAME).get("context", {})
    try:
        pooling = stored.get("pooling", CONTEXT_POOLING)
        stored = {name: stored[name] for name in (_OF_CONTEXT if stored else ())}
        ContextConfig(**stored)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"context in {CAIRN_SETTINGS_NAME} of the model must hold {' and '.join(_OF_CONTEXT)}, got "
            f"others ({error}); save the model again"
        ) from error
    if pooling != CONTEXT_POOLING:
        raise ModelError(
            f"the pooling of context documents in {CAIRN_SETTINGS_NAME} of the model must be "
            f"{CONTEXT_POOLING}, got {pooling!r}; update Cairn"
        )
    return stored


def trained_context(model: str) -> ContextConfig | None:
    """Return the context a model was trained with, None where its folder does not say; see above."""
    stored = context_defaults(model)
    return ContextConfig(**stored) if stored else None


def _of_description(described: SentenceTransformersFolder, settled: Set[str]) -> dict[str, Any]:
    """Return what the folder describes.

    Pooling, and whether prefixes are pooled, only where they are not settled already.
    """
    brought: dict[str, Any] = {} if "pool_prefix" in settled else {"pool_prefix": described.pools_prompt}
    if described.pooling is not None and "pooling" not in settled:
        brought["pooling"] = _pooling(described)
    if described.query_prompt:
        brought["query_prefix"] = described.query_prompt
    if described.document_prompt:
        brought["document_prefix"] = described.document_prompt
    if described.truncate_dim is not None:
        brought["dims"] = described.truncate_dim
    return brought


def _can_pool_prefix(settings: Mapping[str, Any]) -> bool:
    has_prefix = bool(settings.get("query_prefix") or settings.get("document_prefix"))
    default = EncoderConfig()
    pooling, attention = (
        settings.get("pooling", default.pooling),
        settings.get("attention", default.attention),
    )
    return has_prefix and pooling in PREFIX_POOLINGS and attention != "full"


def _pooling(described: SentenceTransformersFolder) -> str:
    mode = described.pooling or "mean"
    saved_as = {rule.saved_as for rule in POOLING_RULES.values()}
    known = ", ".join(sorted(_OF_SENTENCE_TRANSFORMERS, key=lambda name: name not in saved_as))
    if mode not in _OF_SENTENCE_TRANSFORMERS:
        raise ModelError(
            f"the pooling of the model must be one of {known}, got {mode}; choose another model, or give "
            "a pooling of your own"
        )
    # The length of a mean's denominator is lost when vectors are normalised, but not on the way through a
    # dense layer.
    if mode == "mean_sqrt_len_tokens" and described.steps:
        raise ModelError(
            f"the pooling of a model with dense layers must be mean, cls or lasttoken, got {mode}; "
            "choose another model"
        )
    if mode == "cls" and not described.pools_prompt and (described.query_prompt or described.document_prompt):
        raise ModelError(
            "the pooling cls of a model with prompts must include the prompt, got include_prompt false; "
            "choose another model"
        )
    return _OF_SENTENCE_TRANSFORMERS[mode]
