"""Texts to token ids with Python character offsets, flat and bounded in memory.

Stands between the checked rows and the encoder's landmarks: it says where tokens start and where a text may
be cut, and knows nothing of chunks, special tokens or models. A long text is tokenised in segments cut at
white space, so that memory grows with the ids and not with the tokenizer's own bookkeeping (about a hundred
bytes a token). WordPiece never looks across white space, nor across an ideograph or an ASCII punctuation
mark, so for BERT vocabularies the segments give exactly the tokens of the whole; a run of letters longer than
a segment, with none of these in it, is cut where it is.

Instructions before a text (NV-Embed §4) are tokenised by themselves, once, and stand before every chunk or
window, after its [CLS]: every token reads them, and they are in no pooled span. A prefix's last space goes to
the text: tokenizers that write a word with the space before it then give the tokens of both written in one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from jaxtyping import Int32, Int64, UInt8
from tokenizers import Encoding, Tokenizer

SEGMENT_CHARACTERS: Final = 1 << 16
"""Longest piece of a text handed to the tokenizer at once."""

BATCH_CHARACTERS: Final = 1 << 20
"""Characters in one call of the tokenizer: about 40 MB of encodings in English."""

INSIDE_WORD: Final = 0
WORD_START: Final = 1
SPACED_WORD_START: Final = 2

_Segment = tuple[int, int, str]
"""Index of the text, offset of the segment's first character in it, the segment."""

_CUT_AFTER = re.compile(r"[!-/:-@\\^-`{-~\u3000-\u303f\u3400-\u4dbf\u4e00-\u9fff]")


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizedTexts:
    """Tokens of N texts laid end to end; text ``i`` owns ``text_offsets[i]:text_offsets[i + 1]``.

    ``start_char`` and ``end_char`` are offsets into the token's own text. ``breaks`` says how good a place
    for a cut lies before each token: 2 a word after white space, 1 a word without (punctuation, ideographs),
    0 the inside of a word.
    """

    ids: Int32[np.ndarray, " T"]
    start_char: Int64[np.ndarray, " T"]
    end_char: Int64[np.ndarray, " T"]
    breaks: UInt8[np.ndarray, " T"]
    text_offsets: Int64[np.ndarray, " N1"]


def tokenize(tokenizer: Tokenizer, texts: Sequence[str]) -> TokenizedTexts:
    """Tokenise texts without special tokens; the tokenizer must neither pad nor truncate."""
    parts: list[tuple[np.ndarray, ...]] = []
    num_tokens = np.zeros(len(texts) + 1, np.int64)
    for batch in _batches(texts):
        encodings = tokenizer.encode_batch([piece for _, _, piece in batch], add_special_tokens=False)
        for (text_index, _, _), encoding in zip(batch, encodings, strict=True):
            num_tokens[text_index + 1] += len(encoding)
        parts.append(_kept(encodings, batch))
    ids, start_char, end_char, breaks = map(np.concatenate, zip(*parts, strict=True))
    return TokenizedTexts(
        ids=ids,
        start_char=start_char,
        end_char=end_char,
        breaks=breaks,
        text_offsets=np.cumsum(num_tokens),
    )


def _kept(encodings: Sequence[Encoding], segments: Sequence[_Segment]) -> tuple[np.ndarray, ...]:
    """Return ids, starts, ends and breaks of one call of the tokenizer."""
    lengths = np.fromiter((len(encoding) for encoding in encodings), np.int64, len(encodings))
    total = int(lengths.sum())
    ids = np.fromiter((token for encoding in encodings for token in encoding.ids), np.int32, total)
    spans = np.fromiter(
        (bound for encoding in encodings for span in encoding.offsets for bound in span),
        np.int64,
        2 * total,
    ).reshape(-1, 2)
    words = np.fromiter(
        (-1 if word is None else word for encoding in encodings for word in encoding.word_ids),
        np.int64,
        total,
    )
    breaks = np.full(total, SPACED_WORD_START, np.uint8)
    breaks[1:][spans[1:, 0] <= spans[:-1, 1]] = WORD_START
    breaks[1:][(words[1:] == words[:-1]) & (words[1:] >= 0)] = INSIDE_WORD
    is_spaced = np.fromiter(
        (start == 0 or piece[0].isspace() for _, start, piece in segments), np.bool_, len(segments)
    )
    first = (np.cumsum(lengths) - lengths)[lengths > 0]
    breaks[first] = np.where(is_spaced[lengths > 0], SPACED_WORD_START, WORD_START)
    spans += np.repeat(np.fromiter((start for _, start, _ in segments), np.int64, len(segments)), lengths)[
        :, None
    ]
    return ids, spans[:, 0].copy(), spans[:, 1].copy(), breaks


def _batches(texts: Sequence[str]) -> Iterator[list[_Segment]]:
    """Group segments into calls of at most ``BATCH_CHARACTERS``; without any there is one empty call."""
    batch: list[_Segment] = []
    characters = 0
    for index, text in enumerate(texts):
        for start, end in segments(text):
            if batch and characters + end - start > BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
            batch.append((index, start, text[start:end]))
            characters += end - start
    yield batch


def segments(text: str) -> Iterator[tuple[int, int]]:
    """Yield contiguous spans of at most ``SEGMENT_CHARACTERS`` that cover the text.

    They are cut before white space where there is any.
    """
    start = 0
    while len(text) - start > SEGMENT_CHARACTERS:
        end = _cut(text, start, start + SEGMENT_CHARACTERS)
        yield start, end
        start = end
    if start < len(text):
        yield start, len(text)


def _cut(text: str, start: int, limit: int) -> int:
    # Only these three are white space to every tokenizer: isspace() also holds control characters that BERT
    # drops, which joins words.
    space = max(text.rfind(character, start + 1, limit) for character in (" ", "\n", "\t"))
    if space > start:
        return space
    places = [match.end() for match in _CUT_AFTER.finditer(text, start, limit)]
    return places[-1] if places else limit


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
