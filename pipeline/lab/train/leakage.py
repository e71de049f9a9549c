"""Keep what a model will be judged on out of what it learns from.

A pair is dropped when its query is one of the judged queries, when its document is one of the judged
documents, or when half of the document's windows of 16 words stand in judged documents: judged documents may
be whole articles of which training holds a paragraph. Texts are compared as words: Unicode compatibility
forms, lower case, letters and digits only.

Windows are compared by 64-bit hashes, so that tens of millions of them fit a sorted array; one false match in
10^12 changes nothing.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from cairn.pipeline.errors import SourceError
from cairn.pipeline.lab.judged_files import JudgedFile, read_judged_file
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.types import ProgressListener
from jaxtyping import UInt64
from numpy.lib.stride_tricks import sliding_window_view

WINDOW_WORDS: Final = 16
"""Words in a row that two texts share only when one was taken from the other, or both from a third."""

MAX_SHARED_WINDOWS: Final = 0.5
"""A licence or a quotation may be shared; half a document may not."""

_WORD: Final = re.compile(r"[^\W_]+")
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)


class JudgedTexts:
    """Queries and documents of evaluation sets, as hashes."""

    def __init__(self, queries: Iterable[str], documents: Iterable[str]) -> None:
        self._word_hashes: dict[str, int] = {}
        self._queries = {self._key(query) for query in queries}
        texts = list(documents)
        self._documents = {self._key(text) for text in texts}
        self._windows_sorted = np.unique(
            np.concatenate([np.zeros(0, np.uint64), *(self._windows(text) for text in texts)])
        )

    def has_query(self, query: str) -> bool:
        """Say whether a judged query reads the same."""
        return self._key(query) in self._queries

    def has_document(self, document: str) -> bool:
        """Say whether a judged document reads the same, or holds most of this one."""
        if self._key(document) in self._documents:
            return True
        windows = self._windows(document)
        if not len(windows) or not len(self._windows_sorted):
            return False
        places = np.minimum(np.searchsorted(self._windows_sorted, windows), len(self._windows_sorted) - 1)
        return bool((self._windows_sorted[places] == windows).mean() >= MAX_SHARED_WINDOWS)

    @staticmethod
    def _key(text: str) -> bytes:
        return hashlib.blake2b(" ".join(words(text)).encode(), digest_size=16).digest()

    def _windows(self, text: str) -> UInt64[np.ndarray, " windows"]:
        hashes = np.array([self._word_hash(word) for word in words(text)], np.uint64)
        if len(hashes) < WINDOW_WORDS:
            return np.zeros(0, np.uint64)
        # Hashes are meant to wrap.
        return sliding_window_view(hashes, WINDOW_WORDS) @ np.cumprod(np.full(WINDOW_WORDS, _MULTIPLIER))

    def _word_hash(self, word: str) -> int:
        if word not in self._word_hashes:
            digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
            self._word_hashes[word] = int.from_bytes(digest, "little")
        return self._word_hashes[word]


def words(text: str) -> list[str]:
    """Return a text's words as they are compared."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def read_judged_texts(folders: Sequence[Path]) -> JudgedTexts:
    """Read the texts of evaluation sets, each a folder with a corpus and queries."""

    def texts(name: JudgedFile) -> Iterator[str]:
        for folder in folders:
            yield from filter(None, read_judged_file(folder, name, "text").column("text").to_pylist())

    return JudgedTexts(texts("queries"), texts("corpus"))


def without_judged(
    pairs: TrainingPairs, folders: Sequence[Path], progress: ProgressListener
) -> TrainingPairs:
    """Leave out every pair of which a side stands in the evaluation sets of ``folders``, if there are any."""
    if not folders:
        return pairs
    progress("leakage", 0, len(pairs), "pairs")
    return drop_judged(pairs, read_judged_texts(folders))


def drop_judged(pairs: TrainingPairs, judged: JudgedTexts) -> TrainingPairs:
    """Leave out pairs with a judged side, and judged negatives; :class:`SourceError` when none is left."""
    pairs = pairs.without(lambda row: judged.has_query(row.query), "query of an evaluation set")
    distinct = {*pairs.documents, *(text for row in pairs.rows for text in row.negatives)}
    out = {text for text in distinct if judged.has_document(text)}
    pairs = pairs.without(lambda row: row.document in out, "document of an evaluation set")
    rows = [
        row._replace(negatives=tuple(text for text in row.negatives if text not in out)) for row in pairs.rows
    ]
    pairs = replace(pairs, rows=tuple(rows))
    if not len(pairs):
        raise SourceError(
            "training pairs must not all stand in the evaluation sets, got no other; train on other data"
        )
    return pairs
