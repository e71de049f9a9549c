"""What callers in Python hand to an encoder: a list of valid texts, refused in one sentence where it is not.

A corpus is checked row by row long before it is encoded; these checks are for direct calls of an encoder.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pipeline.config import is_encodable
from pipeline.errors import ConfigError


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


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
