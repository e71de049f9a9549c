"""Texts on their way to an encoder: checks of what callers in Python hand over, and the heads of long texts.

A corpus is checked row by row long before it is encoded; the checks are for direct calls of an encoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from cairn.pipeline.config import is_encodable
from cairn.pipeline.corpus.tokenization import tokenize
from cairn.pipeline.errors import ConfigError
from tokenizers import Tokenizer

CHARACTERS_PER_TOKEN: Final = 32
"""How much of a text is tokenised at first for each token wanted of its head."""


def require_texts(texts: Any, what: str) -> None:
    """Raise :class:`ConfigError` unless ``texts`` holds valid Unicode strings.

    A bare string would be read letter by letter.
    """
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable) or not hasattr(texts, "__len__"):
        raise ConfigError(f"{what} texts must come in a list, got {_shown(texts)}; write [text]")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise ConfigError(f"a {what} must be text, got {_shown(text)} at position {index}; leave it out")
        if not is_encodable(text):
            raise ConfigError(
                f"a {what} must be valid Unicode, got a lone surrogate in the one at position {index}; "
                "remove it"
            )


def require_queries(texts: Any) -> None:
    """Raise :class:`ConfigError` unless ``texts`` holds valid strings, none of them blank."""
    require_texts(texts, "query")
    for index, text in enumerate(texts):
        if not text.strip():
            raise ConfigError(
                f"a query must hold text, got an empty one at position {index}; write what to look for"
            )


def first_tokens(tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int) -> list[str]:
    """Cut every text after its first ``max_tokens`` tokens."""
    heads: list[str] = []
    for text in texts:
        head = text[: CHARACTERS_PER_TOKEN * max_tokens]
        tokens = tokenize(tokenizer, [head])
        if len(tokens.ids) < max_tokens and len(head) < len(text):
            head = text
            tokens = tokenize(tokenizer, [head])
        heads.append(head[: int(tokens.end_char[max_tokens - 1])] if len(tokens.ids) > max_tokens else head)
    return heads


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
