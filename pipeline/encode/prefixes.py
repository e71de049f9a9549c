"""Instructions before a text (NV-Embed §4).

They stand after a row's [CLS], are read by every token, and are in no pooled span.

A prefix is tokenised by itself, once, and its ids stand before every chunk or window. Its last space goes to
the text: tokenizers that write a word with the space before it then give the tokens of prefix and text
written in one. Character offsets are the text's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from cairn.pipeline.encode.tokenization import TokenizedTexts, tokenize
from jaxtyping import Int32
from tokenizers import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """Ids of a prefix, none for an empty one; ``space`` goes before each text that brings none."""

    ids: Int32[np.ndarray, " P"]
    space: str

    @classmethod
    def of(cls, text: str, tokenizer: Tokenizer) -> Prefix:
        """Tokenise a prefix without special tokens."""
        if text.endswith(" ") and (marker := tokenizer.token_to_id(text)) is not None:
            return cls(ids=np.array([marker], np.int32), space="")
        space = " " if text.endswith(" ") else ""
        stem = text.removesuffix(" ")
        ids = tokenizer.encode(stem, add_special_tokens=False).ids if stem else []
        return cls(ids=np.array(ids, np.int32), space=space)

    def continued(self, text: str) -> str:
        """Return a text as it is tokenised behind the prefix.

        One that opens with white space brings its own; two spaces would make a token of the first.
        """
        return text if text[:1].isspace() else self.space + text


def instruction_prefix(task: str) -> str:
    """Return what stands before a query that is asked for such a task (NV-Embed eq. 2, as published)."""
    return f"Instruct: {task}\nQuery: "


def tokenize_after(prefix: Prefix, tokenizer: Tokenizer, texts: Sequence[str]) -> TokenizedTexts:
    """Tokenise texts as they continue the prefix; offsets count from the start of each text."""
    if not prefix.space:
        return tokenize(tokenizer, texts)
    written = [prefix.continued(text) for text in texts]
    tokens = tokenize(tokenizer, written)
    moved = np.fromiter(map(len, written), np.int64) - np.fromiter(map(len, texts), np.int64)
    shift_T = np.repeat(moved, np.diff(tokens.text_offsets))
    return replace(
        tokens,
        start_char=np.maximum(tokens.start_char - shift_T, 0),
        end_char=np.maximum(tokens.end_char - shift_T, 0),
    )
