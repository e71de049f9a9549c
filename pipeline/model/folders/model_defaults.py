"""The settings that a model's folder brings: its pooling in training, and instructions.

    flag, environment, cairn.toml ─▶ what the collection has stored ─▶ what the folder brings ─▶ default

They hold where nothing else is chosen and the collection is new; the manifest stores the values they come to,
so that a folder which changes later changes no collection. A folder Cairn saved brings all its encoder's
settings; a Sentence-Transformers folder its pooling, prompts and truncation; NV-Embed its latent attention,
CDE its context and prefixes; a plain transformer and the embedded model nothing. Reads JSON only: no torch.

A setting that differs from what a model was trained with makes one warning sentence in ``ingest``,
``--dry-run``, ``status`` and their JSON. Nothing is refused: a model may gain from a setting that cost
another one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Set
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from cairn.pipeline.config import (
    DEFAULT_MODEL,
    MACHINE_SETTINGS,
    NO_MODEL,
    TITLE_TOKENS,
    TOKEN_BYTES,
    UNDESCRIBED,
    WHOLE_TEXT_TOKENS,
    WINDOW_TOKENS,
    ContextConfig,
    EncoderConfig,
)
from cairn.pipeline.errors import CairnError, ConfigError, ModelError
from cairn.pipeline.model.folders.model_types import (
    CAUSAL_TYPES,
    PPLX,
    STATIC,
    cde_settings,
    is_cde,
    is_run_by_transformers,
)
from cairn.pipeline.model.folders.names import MODEL_NAMES, is_endpoint, model_folder
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
LATE_CHUNKING_TOKENS: Final = 8_192
"""Tokens of a document that a model for late chunking reads together, though it has positions for more.

In a row of half as many, attention costs the smaller of these models as much as all else.
"""

_OF_SENTENCE_TRANSFORMERS: Final = {
    name: pooling for pooling, rule in POOLING_RULES.items() for name in rule.read_from
}


LEAST_TOKEN_BYTES: Final = 12
"""See ``docs/design/token-vectors.md``, Measured."""
ENDPOINT_DEFAULTS: Final[Mapping[str, Any]] = {
    "token_bytes": 0,
    "title_tokens": TITLE_TOKENS,
    "whole_text_tokens": WHOLE_TEXT_TOKENS,
}
"""An endpoint is asked for what a model here reads that was published with no way of its own."""


_OF_ENDPOINTS: Final = (
    "{} is an endpoint: it gives one vector a text and shows no states of tokens, so there are no "
    "windows and no stored context, and {}"
)


_OF_GIVEN: Final = "documents bring their vectors: there are no context and no landmarks, and {}; {}"
_TOKENS: Final = {
    False: "no token vectors: BM25 and vectors rank",
    True: f"only {DEFAULT_MODEL}, which knows English, gives token vectors: they, BM25 and vectors rank",
}
_WITHOUT_MODEL: Final = (
    "nothing encodes queries, so texts are answered by BM25 alone, and vectors by search_vectors"
)
NO_CONTEXT: Final[Mapping[str, Any]] = {"context_documents": 1, "max_document_tokens": 64}
"""Of a context that nothing reads."""


def given_defaults(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of an ingest whose documents bring vectors; a model is one of queries alone."""
    model = chosen.get("model", NO_MODEL)
    brought = {} if model == NO_MODEL else model_defaults(chosen)
    unread = {"title_tokens": 0, "document_prefix": "", "use_context": False, "document_context": 0}
    # Of a text with one vector each passage stores it again, so they are longer.
    passages = {"landmark_interval": 128, "whole_text_tokens": 0}
    own = {"model": model, "given_dims": 0, "token_bytes": 0, **passages, **unread}
    return {name: value for name, value in {**brought, **own}.items() if name not in chosen}


def encoder_config(chosen: Mapping[str, Any], *, for_ingest: bool = False) -> EncoderConfig:
    """Return the settings of an encoder: what was ``chosen`` over what its model brings over the defaults.

    ``for_ingest`` takes :func:`ingest_defaults`.
    """
    known = [item.name for item in fields(EncoderConfig)]
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise ConfigError(
            f"an encoder's setting must be one of {', '.join(known)}, got {unknown[0]!r}; leave it out"
        )
    brought = ingest_defaults(chosen) if for_ingest else model_defaults(chosen)
    brought.setdefault("token_bytes", TOKEN_BYTES)
    return EncoderConfig(**{**brought, **chosen})


def ingest_defaults(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of an ingest for the settings that ``chosen`` does not have.

    Beside what the model's folder brings these are token vectors. A model that was published with no way of
    its own to tell chunks of their document reads the title before each, and a short text whole.
    """
    brought = model_defaults(chosen)
    model = chosen.get("model", DEFAULT_MODEL)
    if isinstance(model, str) and _is_plain(model, brought):
        settled = {**brought, **chosen}
        if settled.get("attention", "chunk") == "chunk" and _has_full_rows(model, settled):
            brought |= {"title_tokens": TITLE_TOKENS, "whole_text_tokens": WHOLE_TEXT_TOKENS}
    return {"token_bytes": TOKEN_BYTES, **{name: brought[name] for name in brought if name not in chosen}}


def _is_plain(model: str, brought: Mapping[str, Any]) -> bool:
    if model in MODEL_NAMES:
        return True
    if is_endpoint(model) or brought.get("use_context"):
        return False
    return not (model_folder(model) / CAIRN_SETTINGS_NAME).is_file()


def _has_full_rows(model: str, settled: Mapping[str, Any]) -> bool:
    """Say whether rows are as long as the default's, so that a whole text and any prefix have room."""
    lengths = [settled.get("window_tokens", WINDOW_TOKENS)]
    if model not in MODEL_NAMES:
        lengths.append(_architecture_of(model).get("max_position_embeddings", 0))
    return all(isinstance(length, int) and length >= WINDOW_TOKENS for length in lengths)


def model_defaults(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the folder of ``chosen["model"]`` brings for the settings that are not chosen."""
    model = chosen.get("model", DEFAULT_MODEL)
    if not isinstance(model, str):
        return {}  # EncoderConfig refuses it
    if model in MODEL_NAMES:
        return {} if "model" in chosen else {"model": model}
    if is_endpoint(model):
        brought = {"model": model, **ENDPOINT_DEFAULTS}
        return {name: value for name, value in brought.items() if name not in chosen}
    folder = model_folder(model)
    if (folder / CAIRN_SETTINGS_NAME).is_file():
        brought = _of_cairn(folder / CAIRN_SETTINGS_NAME)
    else:
        described = read_sentence_transformers_folder(folder)
        brought = _of_architecture(_architecture(folder, described), is_described=described is not None)
        if described is not None:
            brought |= _of_description(described, {*brought, *chosen})
            brought |= {} if described.asking is None else {"token_bytes": 0}
    if not (brought.get("pool_prefix") and _can_pool_prefix({**brought, **chosen})):
        brought.pop("pool_prefix", None)
    if chosen.get("attention", "full") != "full":
        brought.pop("document_context", None)
    return {name: value for name, value in {"model": model, **brought}.items() if name not in chosen}


def query_settings(config: EncoderConfig) -> EncoderConfig | None:
    """Return how a model of queries alone reads them, None where documents' model does."""
    described = read_sentence_transformers_folder(model_folder(config.model))
    if described is None or described.asking is None:
        return None
    asking = described.asking
    brought = _of_architecture(_architecture(described.transformer, asking), is_described=True)
    brought["pooling"] = "mean" if asking.pooling is None else _pooling(asking)
    brought["pool_prefix"] = asking.pools_prompt and _can_pool_prefix(
        {"query_prefix": config.query_prefix, **brought}
    )
    unread = {
        "document_prefix": "",
        "token_bytes": 0,
        "title_tokens": 0,
        "document_context": 0,
        **UNDESCRIBED,
        "backend": "torch",
    }
    return replace(config, attention="chunk", landmarks="fixed", **{"causal": False, **brought, **unread})


def _architecture_of(model: str) -> dict[str, Any]:
    folder = model_folder(model)
    return _architecture(folder, read_sentence_transformers_folder(folder))


def _architecture(folder: Path, described: SentenceTransformersFolder | None) -> dict[str, Any]:
    """Return the config.json of a folder's transformer, empty where there is none."""
    if described is not None and described.is_static:
        return {"model_type": STATIC}
    return read_json_if_any((folder if described is None else described.transformer) / "config.json")


def _of_architecture(config: Mapping[str, Any], *, is_described: bool) -> dict[str, Any]:
    """Return what follows from the kind of model: a pooling, CDE's context, a decoder's mask.

    A bare decoder is taken for one to be made an encoder. In a Sentence-Transformers folder it was trained as
    that library runs it, with its causal mask, unless ``is_causal`` in its configuration is false.
    """
    if config.get("model_type") == "nvembed":
        return {"pooling": "latent", "pool_prefix": not config.get("is_mask_instruction", True)}
    if is_cde(config):
        return cde_settings(config)
    if config.get("model_type") == PPLX:
        return _of_pplx(config)
    is_decoder = config.get("model_type") in CAUSAL_TYPES
    return {"causal": True} if is_described and is_decoder and config.get("is_causal") is not False else {}


def _of_pplx(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a pplx-embed reads texts, a contextual one the chunks of a document together."""
    read_by: Any = config.get("auto_map")
    if "Contextual" not in str(read_by.get("AutoModel") if isinstance(read_by, dict) else None):
        return {"pooling": "own"}
    num_positions = config.get("max_position_embeddings")
    longest = num_positions if isinstance(num_positions, int) else WINDOW_TOKENS
    return {"pooling": "own", "attention": "full", "window_tokens": min(LATE_CHUNKING_TOKENS, longest)}


def _of_cairn(path: Path) -> dict[str, Any]:
    content = read_json(path)
    stored: Any = content.get("encoder")
    settings = stored if isinstance(stored, dict) else None
    if content.get("format") != CAIRN_FORMAT or settings is None:
        raise ModelError(
            f"{path.name} of the model must have format {CAIRN_FORMAT} and an encoder's settings, got "
            "others; update Cairn"
        )
    known = {item.name for item in fields(EncoderConfig)} - MACHINE_SETTINGS
    if unknown := sorted(set(settings) - known):
        raise ModelError(
            f"{path.name} of the model must hold settings this release knows, got {', '.join(unknown)}; "
            "update Cairn, or take them out of the file if an older Cairn saved it"
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
    named: Any = content if isinstance(content, dict) else {}
    values = {item.name: named.get(item.name) for item in fields(Base)}
    if not all(isinstance(value, str) for value in values.values()):
        raise ModelError(
            f"base in {CAIRN_SETTINGS_NAME} of the model must hold a model and its weights_sha256, got "
            "others; save it again"
        )
    return Base(**values)


def settings_of_a_folder(config: EncoderConfig, context: ContextConfig | None = None) -> dict[str, Any]:
    """Return what ``cairn_config.json`` holds of these settings, and of the context of training."""
    trained = {} if context is None else {"context": {name: getattr(context, name) for name in _OF_CONTEXT}}
    return {
        "format": CAIRN_FORMAT,
        "encoder": {name: value for name, value in asdict(config).items() if name not in MACHINE_SETTINGS},
        **trained,
    }


def context_config(model: str, chosen: Mapping[str, Any]) -> ContextConfig:
    """Return what was ``chosen`` for a context over what the model was trained with over the defaults."""
    return ContextConfig(**{**context_defaults(model), **chosen})


def context_defaults(model: str) -> dict[str, Any]:
    """Return the context a model was trained with, its documents and their tokens; empty if unsaid."""
    if model in MODEL_NAMES:
        return {}
    if is_endpoint(model):
        return {**NO_CONTEXT}
    stored: Any = read_json_if_any(model_folder(model) / CAIRN_SETTINGS_NAME).get("context", {})
    try:
        stored = {name: stored[name] for name in (_OF_CONTEXT if stored else ())}
        ContextConfig(**stored)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"context in {CAIRN_SETTINGS_NAME} of the model must hold {' and '.join(_OF_CONTEXT)}, got "
            f"others ({error}); save the model again"
        ) from error
    return stored


def trained_context(model: str) -> ContextConfig | None:
    """Return the context a model was trained with, None where its folder does not say; see above."""
    stored = context_defaults(model)
    return ContextConfig(**stored) if stored else None


def _of_description(described: SentenceTransformersFolder, settled: Set[str]) -> dict[str, Any]:
    """Return what the folder describes, and pooling only where it is not settled already."""
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
    pooling = settings.get("pooling", default.pooling)
    is_full = settings.get("attention", default.attention) == "full"
    return has_prefix and pooling in PREFIX_POOLINGS and not is_full


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


TRAINED_AT_EVERY_DEPTH: Final = frozenset({"m3bert"})
"""Model types whose first layers are trained to embed by themselves."""


_COSTLY: Final[Mapping[str, Callable[[Any], bool]]] = {
    "layers": bool,
    "pooling": "lmk".__eq__,
    "attention": "full".__eq__,
    "use_context": bool,
    "document_context": bool,
    "dims": lambda dims: dims is not None and dims <= 64,
    "landmark_interval": (32).__eq__,
    "temperature": bool,
}
"""Values that cost nDCG of a model that was not trained for them; docs/experiments.md has the figures."""


def untrained_settings_warning(config: EncoderConfig) -> str | None:
    """Return a sentence on the settings the model was not trained for, None where there are none."""
    trained = encoder_config({"model": config.model})
    excused = {"layers"} if _knows_depths(config.model) else set[str]()
    if config.model not in MODEL_NAMES:  # others may have been trained for few
        excused.add("dims")
    values = {name: getattr(config, name) for name in _COSTLY if name not in excused}
    met = ", ".join(
        f"{name} {_shown(value)}"
        for name, value in values.items()
        if value != getattr(trained, name) and _COSTLY[name](value)
    )
    if not met:
        return None
    return (
        f"{config.model} was not trained for {met}, which may find less; compare with `cairn evaluate`, or "
        "leave it out"
    )


def window_warning(config: EncoderConfig) -> str | None:
    """Return a sentence on a window that has no effect, None where it has one or none was chosen."""
    is_needed = config.longest_chunk_tokens + 2 > WINDOW_TOKENS  # [CLS] and the landmark
    if config.attention != "chunk" or config.window_tokens == WINDOW_TOKENS or is_needed:
        return None
    return (
        "window_tokens has no effect with attention chunk, whose rows are chunks; leave it out, or choose "
        "attention full"
    )


def context_warning(config: EncoderConfig, context: ContextConfig) -> str | None:
    """Return a sentence on a context larger than the model's folder says it was trained with, else None."""
    trained = context_defaults(config.model) if config.use_context else {}
    larger = {name: most for name, most in trained.items() if getattr(context, name) > most}
    if not larger:
        return None
    chosen = ", ".join(f"{name} {getattr(context, name)}" for name in larger)
    most = ", ".join(map(str, larger.values()))
    return (
        f"{config.model} was not trained for {chosen}, but for {most}: what it costs was not measured; "
        "compare with `cairn evaluate`, or leave it out"
    )


def transformers_warning(config: EncoderConfig) -> str | None:
    """Return a sentence on what a model lacks that transformers runs, None for one of the engine's."""
    architecture = _architecture_of(config.model)
    if not is_run_by_transformers(architecture):
        return None
    if architecture["model_type"] == STATIC:
        return (
            f"{config.model} is a table of token vectors: fast, and without attention, context, "
            "temperatures, layers and OpenVINO"
        )
    return (
        f"{config.model} is run by transformers, as Cairn has no family {architecture['model_type']}: it has "
        "vectors, token vectors and windows, and neither context, temperatures, first layers nor OpenVINO"
    )


def kind_warning(config: EncoderConfig) -> str | None:
    """Return a sentence on how a late-interaction model or one with a Router ranks, None for another."""
    described = read_sentence_transformers_folder(model_folder(config.model))
    if described is not None and described.asking is not None:
        return (
            f"{config.model} reads queries by a model of their own: there are no token vectors and no "
            "context; BM25 and vectors rank"
        )
    if described is None or described.late is None:
        return None
    return (
        f"{config.model} is a late-interaction model: the projected states of its tokens judge, their means "
        "and BM25 nominate, and it reads no context"
    )


def token_bytes_warning(config: EncoderConfig) -> str | None:
    """Return a sentence on codes of tokens that are smaller than any that was measured, else None."""
    if not 0 < config.token_bytes < LEAST_TOKEN_BYTES:
        return None
    return (
        f"token_bytes {config.token_bytes} is less than {LEAST_TOKEN_BYTES}, the smallest codes that were "
        f"measured: they may judge worse than none; choose {LEAST_TOKEN_BYTES} or {TOKEN_BYTES}, or compare "
        "with `cairn evaluate`"
    )


def settings_warnings(config: EncoderConfig, context: ContextConfig) -> tuple[str, ...]:
    """Return a sentence on each thing to know about the settings of an encoder and its context."""
    tokens, small = _TOKENS[config.token_bytes > 0], token_bytes_warning(config)
    if config.given_dims is not None:
        is_without = config.model == NO_MODEL
        asked = _WITHOUT_MODEL if is_without else f"{config.model} encodes queries alone"
        return (_OF_GIVEN.format(tokens, asked), *([small] if small else []))
    if is_endpoint(config.model):
        return (_OF_ENDPOINTS.format(config.model, tokens), *([small] if small else []))
    of_model = (transformers_warning, kind_warning, untrained_settings_warning, window_warning)
    found = [small]
    for warning in (*of_model, partial(context_warning, context=context)):
        with contextlib.suppress(CairnError):  # a model that cannot be read: whatever loads it says so
            found.append(warning(config))
    return tuple(each for each in found if each)


def _knows_depths(model: str) -> bool:
    """Whether the model may embed with its first layers: m³BERT, and whole models that Cairn trained."""
    folder = model_folder(model)
    is_trained_whole = (folder / "cairn_config.json").is_file() and base_of_folder(folder) is None
    return (
        is_trained_whole
        or read_json_if_any(folder / "config.json").get("model_type") in TRAINED_AT_EVERY_DEPTH
    )


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
