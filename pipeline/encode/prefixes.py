"""Instructions before a text (NV-Embed §3.2).

They stand after a row's [CLS], are read by every token, and are in no pooled span.

A prefix is tokenised by itself, once, and its ids stand before every chunk or window. Its last space goes to
the text: tokenizers that write a word with the space before it then give the tokens of prefix and text
written in one. Character offsets are the text's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int32
from tokenizers import Tokenizer

from pipeline.corpus.tokenization import TokenizedTexts, tokenize


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefix:
    """Ids of a prefix, none for an empty one; ``space`` goes before each text."""

    ids: Int32[np.ndarray, " P"]
    space: str

    @classmethod
    def of(cls, text: str, tokenizer: Tokenizer) -> Prefix:
        """Tokenise a prefix without special tokens."""
        space = " " if text.endswith(" ") else ""
        stem = text.removesuffix(" ")
        ids = tokenizer.encode(stem, add_special_tokens=False).ids if stem else []
        return cls(ids=np.array(ids, np.int32), space=space)


def tokenize_after(prefix: Prefix, tokenizer: Tokenizer, texts: Sequence[str]) -> TokenizedTexts:
    """Tokenise texts as they continue the prefix; offsets count from the start of each text."""
    if not prefix.space:
        return tokenize(tokenizer, texts)
    # A text that opens with white space brings its own; two spaces would make a token of the first.
    moved = np.fromiter((not text[:1].isspace() for text in texts), np.int64, len(texts))
    tokens = tokenize(
        tokenizer,
        [prefix.space + text if is_moved else text for text, is_moved in zip(texts, moved, strict=True)],
    )
    shift_T = np.repeat(moved, np.diff(tokens.text_offsets))
    return replace(
        tokens,
        start_char=np.maximum(tokens.start_char - shift_T, 0),
        end_char=np.maximum(tokens.end_char - shift_T, 0),
    )
