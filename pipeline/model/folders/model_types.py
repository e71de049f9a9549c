"""Every model type that the engine runs, in one table: who reads it, and what it can do. Loads no torch.

Other types are run by transformers (``pipeline/model/transformers_backbone.py``) and lack some settings.

A new family is a reader in ``pipeline/model/families.py`` and an entry here. ``docs/contributing.md`` lists
what describes and tests it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelType:
    """What follows from ``model_type`` in a configuration.

    ``title`` is what the documentation calls it. ``reader`` is where its weights are read, as
    ``module:function``. ``in_transformers``: that library reads it without remote code, so that a saved
    folder opens in Sentence-Transformers too. ``can_be_causal``: published models keep a causal mask.
    """

    title: str
    reader: str
    in_transformers: bool
    can_be_causal: bool = False


_BERT, _GTE, _DECODER, _MODERN_BERT, _NOMIC_BERT = (
    f"cairn.pipeline.model.families:read_{name}"
    for name in ("bert", "gte", "decoder", "modernbert", "nomic_bert")
)

PPLX: Final = "bidirectional_pplx_qwen3"
"""The type of Perplexity's encoders: Qwen3 without a causal mask, whose texts nothing frames."""

MODEL_TYPES: Final[Mapping[str, ModelType]] = {
    "bert": ModelType(title="BERT", reader=_BERT, in_transformers=True),
    "roberta": ModelType(title="RoBERTa", reader=_BERT, in_transformers=True),
    "xlm-roberta": ModelType(title="XLM-RoBERTa", reader=_BERT, in_transformers=True),
    "camembert": ModelType(title="CamemBERT", reader=_BERT, in_transformers=True),
    "distilbert": ModelType(title="DistilBERT", reader=_BERT, in_transformers=True),
    "mpnet": ModelType(title="MPNet", reader=_BERT, in_transformers=True),
    "modernbert": ModelType(title="ModernBERT, mmBERT", reader=_MODERN_BERT, in_transformers=True),
    "nomic_bert": ModelType(title="NomicBERT", reader=_NOMIC_BERT, in_transformers=True),
    "new": ModelType(title="gte-en-mlm, gte-multilingual", reader=_GTE, in_transformers=False),
    "gte": ModelType(title="GTE", reader=_GTE, in_transformers=True),
    "mistral": ModelType(title="Mistral", reader=_DECODER, can_be_causal=True, in_transformers=True),
    "qwen2": ModelType(title="Qwen2", reader=_DECODER, can_be_causal=True, in_transformers=True),
    "qwen3": ModelType(title="Qwen3", reader=_DECODER, can_be_causal=True, in_transformers=True),
    "llama": ModelType(title="Llama", reader=_DECODER, can_be_causal=True, in_transformers=True),
    PPLX: ModelType(title="pplx-embed", reader=_DECODER, in_transformers=False),
    "nvembed": ModelType(title="NV-Embed-v2", reader=_DECODER, in_transformers=True),
    "m3bert": ModelType(title="m³BERT", reader=_DECODER, in_transformers=False),
}

LACKED_BY_TRANSFORMERS: Final = (
    "use_context",
    "document_context",
    "temperature",
    "query_temperature",
    "layers",
    "causal",
)
"""Settings that a model which transformers runs cannot follow."""

STATIC: Final = "static"
"""The type of a table of token vectors, whose folder has no config.json that counts."""

CAUSAL_TYPES: Final = tuple(name for name, kind in MODEL_TYPES.items() if kind.can_be_causal)
"""Model types that have a causal mask to keep."""


def is_run_by_transformers(config: Mapping[str, Any]) -> bool:
    """Say whether a config.json names a type that the engine has no family for."""
    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type not in MODEL_TYPES and not is_cde(config)


QUERY_PREFIX: Final = "search_query: "
DOCUMENT_PREFIX: Final = "search_document: "

_ARCHITECTURE: Final = "transductive"
_CLASSES: Final = frozenset({"DatasetTransformer", "ContextualDocumentEmbeddingTransformer"})


def is_cde(config: Mapping[str, Any]) -> bool:
    """Say whether a config.json is that of a two-stage CDE model; it has no ``model_type``."""
    return config.get("architecture") == _ARCHITECTURE or bool(
        _CLASSES & set(config.get("architectures") or ())
    )


def cde_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the encoder settings such a configuration brings: the context, prefixes (else the published)."""
    return {
        "use_context": True,
        "query_prefix": str(config.get("query_prompt", QUERY_PREFIX)),
        "document_prefix": str(config.get("document_prompt", DOCUMENT_PREFIX)),
        "pool_prefix": not config.get("pool_ignore_instruction_tokens", False),
    }
