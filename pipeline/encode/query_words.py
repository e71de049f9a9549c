"""Which tokens of a query are words that its model knows: these alone are compared with those of passages.

Punctuation, emoji and the unknown token stand in any text, and their matches say nothing of it.

    T tokens of a query
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import regex
from cairn.pipeline.corpus.tokenization import TokenizedTexts
from jaxtyping import Int64
from tokenizers import Tokenizer

_UNKNOWN: Final = ("[UNK]", "<unk>")
_OF_WORD: Final = regex.compile(r"[\p{Alphabetic}\p{N}]")


def word_tokens(
    tokens: TokenizedTexts, tokenizer: Tokenizer, texts: Sequence[str]
) -> list[Int64[np.ndarray, " T"]]:
    """Return the places of each text's tokens that hold a letter or digit and are known to the model."""
    unknown = {tokenizer.token_to_id(token) for token in _UNKNOWN}
    bounds = tokens.text_offsets.tolist()
    places: list[Int64[np.ndarray, " T"]] = []
    for text, first, end in zip(texts, bounds[:-1], bounds[1:], strict=True):
        spans = zip(tokens.start_char[first:end].tolist(), tokens.end_char[first:end].tolist(), strict=True)
        is_word = [_OF_WORD.search(text, *span) is not None for span in spans]
        is_known = [token not in unknown for token in tokens.ids[first:end].tolist()]
        places.append(first + np.flatnonzero(np.array(is_word, bool) & np.array(is_known, bool)))
    return places
