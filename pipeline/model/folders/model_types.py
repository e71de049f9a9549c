"""Every model type that Cairn runs, in one table: who reads it, and what it can do.

A new family is a reader in ``pipeline/model/families`` and an entry here. ``docs/contributing.md`` lists what
describes and tests it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from pipeline.errors import ModelError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelType:
    """What follows from ``model_type`` in a configuration.

    ``reader`` is where its weights are read, as ``module:function``. ``positions``: training starts from
    absolute ones only. ``can_be_causal``: published models keep a causal mask. ``in_transformers``: that
    library reads it without remote code, so that a saved folder opens in Sentence-Transformers too.
    """

    reader: str
    positions: Literal["absolute", "rotary"] = "rotary"
    can_be_causal: bool = False
    in_transformers: bool = True


_BERT: Final = ModelType(reader="pipeline.model.families.bert:read_bert", positions="absolute")
_GTE: Final = "pipeline.model.families.gte:read_gte"
_DECODER: Final = "pipeline.model.families.decoder:read_decoder"
_CAUSAL_DECODER: Final = ModelType(reader=_DECODER, can_be_causal=True)

MODEL_TYPES: Final[Mapping[str, ModelType]] = {
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "camembert": _BERT,
    "modernbert": ModelType(reader="pipeline.model.families.modernbert:read_modernbert"),
    "nomic_bert": ModelType(reader="pipeline.model.families.nomic_bert:read_nomic_bert"),
    "new": ModelType(reader=_GTE, in_transformers=False),
    "gte": ModelType(reader=_GTE),
    "mistral": _CAUSAL_DECODER,
    "qwen2": _CAUSAL_DECODER,
    "qwen3": _CAUSAL_DECODER,
    "llama": _CAUSAL_DECODER,
    "nvembed": ModelType(reader=_DECODER),
    "m3bert": ModelType(reader=_DECODER, in_transformers=False),
}

CAUSAL_TYPES: Final = tuple(name for name, kind in MODEL_TYPES.items() if kind.can_be_causal)
"""Model types that have a causal mask to keep."""

ABSOLUTE_TYPES: Final = tuple(name for name, kind in MODEL_TYPES.items() if kind.positions == "absolute")
"""Model types with learned positions, which training can start from."""


def model_type_named(name: object) -> ModelType:
    """Return what is known of a model type; an unknown one raises :class:`ModelError`."""
    if not isinstance(name, str) or name not in MODEL_TYPES:
        raise ModelError(
            f"model_type must be one of {', '.join(MODEL_TYPES)}, got {name!r}; choose a model of these "
            "families"
        )
    return MODEL_TYPES[name]
