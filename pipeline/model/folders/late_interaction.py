"""What a late-interaction checkpoint says of its token vectors, in the three layouts they are published in.

    PyLate                   modules.json; markers and lengths in config_sentence_transformers.json
    Sentence-Transformers    modules.json with MultiVectorMask; expansion in sentence_bert_config.json
    Stanford's ColBERT       config.json of HF_ColBERT, artifact.metadata, linear.weight among the weights

Reads JSON only: no torch.

Source: Khattab & Zaharia 2020 (ColBERT), §3.2, for markers, expansion by [MASK] and the list of tokens that a
document skips.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from cairn.pipeline.errors import ModelError

QUERY_LENGTH: Final = 32
"""Tokens of an expanded query where no file says."""

METADATA_NAME: Final = "artifact.metadata"
STANFORD: Final = "HF_ColBERT"
"""The architecture that a configuration of Stanford's names."""
LINEAR: Final = "linear.weight"
"""Stanford's projection, among the transformer's weights."""

_PYLATE_KEYS: Final = ("query_prefix", "document_prefix", "do_query_expansion", "attend_to_expansion_tokens")


@dataclass(frozen=True, kw_only=True, slots=True)
class LateInteraction:
    """How queries and documents are read.

    A query's row has at most ``query_length`` tokens, None for the model's most, and is filled up to
    ``expansion_length`` with ``expansion_token``, None for [MASK], which the others see where ``attends``.
    ``markers`` stand before the texts of queries and documents. Tokens of a document that are in ``skipped``
    have no vector.
    """

    query_length: int | None = None
    expansion_length: int = 0
    expansion_token: str | None = None
    attends: bool = False
    markers: tuple[str, str] = ("", "")
    skipped: tuple[str, ...] = ()


def of_pylate(settings: Mapping[str, Any]) -> LateInteraction | None:
    """Read PyLate's settings, None where there are none."""
    if settings.get("model_type") != "ColBERT" and not any(name in settings for name in _PYLATE_KEYS):
        return None
    length = _length(settings.get("query_length") or QUERY_LENGTH)
    expands = settings.get("do_query_expansion") is not False
    skipped = settings.get("skiplist_words")
    return LateInteraction(
        query_length=length,
        expansion_length=length if expands else 0,
        attends=bool(settings.get("attend_to_expansion_tokens")),
        markers=(str(settings.get("query_prefix") or ""), str(settings.get("document_prefix") or "")),
        skipped=tuple(string.punctuation if skipped is None else map(str, skipped)),
    )


def of_mask_module(transformer: Mapping[str, Any], mask: Mapping[str, Any]) -> LateInteraction:
    """Read the settings of Sentence-Transformers' modules Transformer and MultiVectorMask."""
    expansion: Mapping[str, Any] = transformer.get("query_expansion") or {}
    length, most = expansion.get("length"), transformer.get("query_length")
    is_fixed = expansion.get("strategy") == "fixed"
    token = expansion.get("token")
    if mask.get("keep_only_token_ids") or mask.get("skiplist_tasks", ["document"]) != ["document"]:
        raise ModelError(
            "the MultiVectorMask of the model must skip tokens of documents alone, got another one; choose "
            "another model"
        )
    return LateInteraction(
        query_length=_length(length) if is_fixed else None if most is None else _length(most),
        expansion_length=0 if length is None else _length(length),
        expansion_token=None if token is None else str(token),
        attends=bool(expansion.get("attend")),
        skipped=tuple(map(str, mask.get("skiplist_words") or ())),
    )


def of_stanford(metadata: Mapping[str, Any]) -> LateInteraction:
    """Read Stanford's metadata; what they do not name is as in its code."""
    length = _length(metadata.get("query_maxlen") or QUERY_LENGTH)
    query, document = metadata.get("query_token_id"), metadata.get("doc_token_id")
    return LateInteraction(
        query_length=length,
        expansion_length=length,
        attends=bool(metadata.get("attend_to_mask_tokens")),
        markers=(f"{query or '[unused0]'} ", f"{document or '[unused1]'} "),
        skipped=tuple(string.punctuation) if metadata.get("mask_punctuation", True) else (),
    )


def _length(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 4:
        raise ModelError(
            f"the query length of the model must be a whole number of at least 4, got {value!r}; fetch it "
            "again"
        )
    return value
