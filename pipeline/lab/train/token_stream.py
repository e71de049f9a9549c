"""Rows of tokens for every step: texts packed end to end, cut where a row is full, drawn by language.

    row   [CLS] z1 [LMK] z2 [LMK] │ [CLS] z1 [LMK] …      a part of one text, then of the next

The parts of a row are read apart from one another, so nothing but their number changes with packing. A
landmark ends each chunk; its interval is drawn for each chunk, so granularity varies within one row. Rows are
made once, from texts in an order drawn from the seed, and each epoch takes them in an order of its own. Which
rows a step takes, and their landmarks, follow from the seed and the step's number alone, so a resumed run
goes on exactly. Languages are drawn by p ∝ n^S.

Source: LMK §4, algorithm 1, variable chunking; m³BERT §2.3, stage 2, S = .7. Differs: LMK draws an interval
for each text; here chunks of one text may differ, and cuts are not moved to the start of a word.

    T tokens of all texts    P parts    R rows    N tokens of a batch
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from cairn.pipeline.errors import ConfigError, SourceError
from cairn.pipeline.lab.train.pairs import Texts
from cairn.pipeline.lab.train.settings import PretrainConfig
from cairn.pipeline.lab.train.trainer import places_between
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from cairn.pipeline.model.landmarks import Chunks, Rows, lay_out
from cairn.pipeline.types import ProgressListener
from jaxtyping import Int32, Int64

MIN_ROOM: Final = 16
"""A row with less room than for so many tokens of a text is full."""

_AT_ONCE: Final = 256
_LANGUAGES, _ORDER, _LANDMARKS, _TEXTS = 11, 12, 13, 14
"""What is drawn, as part of its seed."""


class TokenStream:
    """The rows of a run; ``heldout`` are those that no step takes."""

    def __init__(
        self, texts: Texts, checkpoint: Checkpoint, config: PretrainConfig, progress: ProgressListener
    ) -> None:
        self._config = config
        self._cls_id, self._landmark_id = checkpoint.cls_id, checkpoint.landmark_id
        self._ids_T, offsets = _tokenized(texts.texts, checkpoint, progress)
        self.num_tokens = len(self._ids_T)
        languages = _languages(texts, config)
        self._rows_of, self.heldout = self._pack(offsets, languages)
        self.num_rows = sum(map(len, self._rows_of))
        tokens_of = [np.diff(offsets)[members].sum() for members in languages]
        self._language_S = self._drawn(np.array(tokens_of, np.float64))

    def word_counts(self, vocab_size: int) -> Int64[np.ndarray, " V"]:
        """Return how often each token id stands in the texts."""
        return np.bincount(self._ids_T, minlength=vocab_size)

    def batch(self, step: int) -> Rows:
        """Return the rows of a step, counted from 0."""
        start, seed = step * self._config.batch_rows, self._config.seed
        parts: list[tuple[int, int]] = []
        for language, rows in enumerate(self._rows_of):
            is_its = self._language_S[: start + self._config.batch_rows] == language
            before, until = int(is_its[:start].sum()), int(is_its.sum())
            if until > before:
                places = places_between(before, until, len(rows), seed, _ORDER, language)
                parts += [part for place in places.tolist() for part in rows[place]]
        return self.lay_out(parts, np.random.default_rng([seed, _LANDMARKS, step]))

    def lay_out(self, parts: Sequence[tuple[int, int]], generator: np.random.Generator) -> Rows:
        """Put [CLS] before parts, and landmarks where the generator draws them."""
        cuts = [self._cuts(end - start, generator) for start, end in parts]
        sizes = np.concatenate([np.diff(own, prepend=0) for own in cuts])
        return lay_out(
            np.concatenate([self._ids_T[start:end] for start, end in parts]),
            Chunks(
                token_offsets=np.concatenate([[0], np.cumsum(sizes)]),
                chunk_offsets=np.concatenate([[0], np.cumsum([len(own) for own in cuts])]),
            ),
            attention="full",
            pooling="lmk",
            cls_id=self._cls_id,
            landmark_id=self._landmark_id,
            max_window_tokens=self._config.max_tokens,
        )

    def _cuts(self, num_tokens: int, generator: np.random.Generator) -> Int64[np.ndarray, " _"]:
        """Return the places after which a landmark stands; the last is the end."""
        intervals = self._config.landmark_intervals
        if not intervals:
            return np.array([num_tokens])
        ends = np.cumsum(generator.choice(np.array(intervals), -(-num_tokens // min(intervals))))
        return np.append(ends[ends < num_tokens], num_tokens)

    def _drawn(self, tokens_of: np.ndarray) -> Int64[np.ndarray, " S"]:
        """Return the language of every row that the run takes."""
        num_rows, smoothing = self._config.steps * self._config.batch_rows, self._config.language_smoothing
        if smoothing is None:
            return np.zeros(num_rows, np.int64)
        shares = smoothed(tokens_of, smoothing)
        return np.random.default_rng([self._config.seed, _LANGUAGES]).choice(len(shares), num_rows, p=shares)

    def _pack(
        self, offsets: Int64[np.ndarray, " D1"], languages: Sequence[Int64[np.ndarray, " _"]]
    ) -> tuple[list[list[list[tuple[int, int]]]], list[tuple[int, int]]]:
        """Return rows of parts by language, and the parts of the rows that are held out."""
        config = self._config
        generator = np.random.default_rng([config.seed, _TEXTS])
        rows_of: list[list[list[tuple[int, int]]]] = []
        heldout: list[tuple[int, int]] = []
        for members in languages:
            texts = [(int(offsets[text]), int(offsets[text + 1])) for text in generator.permutation(members)]
            rows = self._rows(texts)
            # From every language alike, and never more than a tenth.
            num_held = min(-(-config.heldout_rows // len(languages)), len(rows) // 10)
            heldout += [part for row in rows[len(rows) - num_held :] for part in row]
            rows_of.append(rows[: len(rows) - num_held])
        if sum(map(len, rows_of)) < config.batch_rows:
            raise SourceError(
                f"texts must fill the {config.batch_rows} rows of a batch, got {sum(map(len, rows_of))}; "
                "give more text, or a smaller batch_rows or max_tokens"
            )
        return rows_of, heldout

    def _rows(self, texts: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
        rows: list[list[tuple[int, int]]] = []
        room = 0
        for start, end in texts:
            while start < end:
                if self._fitting(room) < min(MIN_ROOM, end - start):
                    rows.append([])
                    room = self._config.max_tokens
                taken = min(end - start, self._fitting(room))
                rows[-1].append((start, start + taken))
                room -= self._cost(taken)
                start += taken
        return rows

    def _cost(self, num_tokens: int) -> int:
        """Return what a part may take of a row, with all landmarks that may be drawn."""
        smallest = min(self._config.landmark_intervals, default=num_tokens)
        return (self._cls_id is not None) + num_tokens + -(-num_tokens // smallest)

    def _fitting(self, room: int) -> int:
        """Return the tokens of a part that surely fits the room."""
        room -= self._cls_id is not None
        smallest = min(self._config.landmark_intervals, default=max(1, room - 1))
        whole, rest = divmod(max(room, 0), smallest + 1)
        return whole * smallest + max(0, rest - 1)


def smoothed(sizes_L: np.ndarray, exponent: float) -> np.ndarray:
    """Return each language's share n^S / Σ n^S."""
    weights = np.where(sizes_L > 0, sizes_L**exponent, 0.0)
    return weights / weights.sum()


def _languages(texts: Texts, config: PretrainConfig) -> list[Int64[np.ndarray, " _"]]:
    """Return the texts of each language, by name; all of them together where languages are not drawn."""
    if config.language_smoothing is None:
        return [np.arange(len(texts.texts))]
    names = sorted(set(texts.languages))
    if len(names) < 2:
        raise ConfigError(
            f"language_smoothing must go with texts of several languages, got {names[0] or 'none named'}; "
            "leave it out, or give a column language"
        )
    of_text = np.array(texts.languages)
    return [np.flatnonzero(of_text == name) for name in names]


def _tokenized(
    texts: Sequence[str], checkpoint: Checkpoint, progress: ProgressListener
) -> tuple[Int32[np.ndarray, " T"], Int64[np.ndarray, " D1"]]:
    """Return the tokens of all texts end to end, and where each begins."""
    ids: list[np.ndarray] = []
    for start in range(0, len(texts), _AT_ONCE):
        batch = checkpoint.tokenizer.encode_batch_fast(
            list(texts[start : start + _AT_ONCE]), add_special_tokens=False
        )
        ids += [np.array(encoding.ids, np.int32) for encoding in batch]
        progress("tokens", min(start + _AT_ONCE, len(texts)), len(texts), "texts")
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in ids])])
    return np.concatenate(ids), offsets
