"""Name a cluster on the map by two words that are frequent in its documents and rare in others.

    titles, else beginnings of texts ─▶ words ─▶ tf-idf over clusters ─▶ the best two of different stems

A cluster whose words are those of another one gets further words, as far as it has some.

Only short texts are read, a few for each cluster, so that the cost does not grow with the collection.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.index.languages import STOP_WORDS
from cairn.pipeline.search.hits import read_rows
from jaxtyping import Int32, Int64

WORDS_A_NAME: Final = 2
MAX_WORDS_A_NAME: Final = 4
"""Of a cluster that shares its first words with another."""
TEXTS_A_CLUSTER: Final = 12
MAX_TEXT_TOKENS: Final = 2_000
"""Longer texts are not read for a name."""
MAX_TEXT_CHARACTERS: Final = 600
SAME_STEM_LETTERS: Final = 4

_FUNCTION_WORDS: Final = STOP_WORDS["en"] | {
    *("about", "after", "all", "also", "another", "any", "because", "been", "before", "being", "between"),
    *("both", "can", "could", "did", "does", "doing", "done", "during", "each", "few", "from", "had", "has"),
    *("have", "having", "her", "here", "him", "his", "how", "its", "just", "may", "might", "more", "most"),
    *("must", "nor", "off", "once", "only", "other", "our", "out", "over", "own", "same", "shall", "she"),
    *("should", "since", "some", "than", "them", "through", "too", "under", "until", "upon", "very", "were"),
    *("what", "when", "where", "whether", "which", "while", "who", "whom", "whose", "why", "would", "you"),
    *("your", "using", "use", "used", "via", "per", "within", "without", "one", "two", "many", "much"),
}
"""Words that say nothing of a subject. BM25 leaves out fewer, so that it finds what it found."""
_WORD: Final = re.compile(r"(?<![^\W\d_])[^\W\d_]{3,24}(?![^\W\d_])")


def name_clusters(texts: Sequence[str | None], cluster_ids_N: Int32[np.ndarray, " N"]) -> dict[int, str]:
    """Name each cluster by the words of its documents' texts; empty where they have none."""
    words: dict[int, Counter[str]] = {cluster: Counter() for cluster in np.unique(cluster_ids_N).tolist()}
    for text, cluster in zip(texts, cluster_ids_N.tolist(), strict=True):
        words[cluster].update(
            {word for word in _WORD.findall((text or "").lower()) if word not in _FUNCTION_WORDS}
        )
    spread = Counter(word for counted in words.values() for word in counted)
    names: dict[int, str] = {}
    taken: set[frozenset[str]] = set()
    for cluster, counted in words.items():
        best = _best_words(counted, spread, len(words))
        lengths = range(WORDS_A_NAME, max(WORDS_A_NAME, len(best)) + 1)
        length = next((each for each in lengths if frozenset(best[:each]) not in taken), WORDS_A_NAME)
        taken.add(frozenset(best[:length]))
        names[cluster] = " ".join(best[:length])
    return names


def telling_texts(
    generation: Generation,
    positions_N: Int64[np.ndarray, " N"],
    titles: Sequence[str | None],
    cluster_ids_N: Int32[np.ndarray, " N"],
) -> list[str | None]:
    """Return each document's title.

    Of some without one, evenly spread over each cluster's, the beginning of the text.
    """
    texts = list(titles)
    untitled_U = np.array([n for n, title in enumerate(titles) if not title], np.int64)
    untitled_U = untitled_U[generation.num_tokens[positions_N[untitled_U]] <= MAX_TEXT_TOKENS]
    chosen: list[int] = []
    for cluster in np.unique(cluster_ids_N[untitled_U]).tolist():
        members = untitled_U[cluster_ids_N[untitled_U] == cluster]
        chosen += members[
            np.linspace(0, len(members) - 1, min(len(members), TEXTS_A_CLUSTER)).astype(np.int64)
        ].tolist()
    if chosen:
        rows = read_rows(generation, positions_N[np.array(chosen)], ["text"])
        for n, row in zip(chosen, rows, strict=True):
            texts[n] = row["text"][:MAX_TEXT_CHARACTERS]
    return texts


def _best_words(counted: Mapping[str, int], spread: Mapping[str, int], num_clusters: int) -> list[str]:
    """Return the words with the highest tf-idf over clusters, ties by the alphabet.

    None that says nearly what one before it says.
    """
    weight = {word: count * math.log(1 + num_clusters / spread[word]) for word, count in counted.items()}
    name: list[str] = []
    for word in sorted(weight, key=lambda word: (-weight[word], word)):
        if not any(_are_alike(word, other) for other in name):
            name.append(word)
        if len(name) == MAX_WORDS_A_NAME:
            break
    return name


def _are_alike(word: str, other: str) -> bool:
    return word in other or other in word or word[:SAME_STEM_LETTERS] == other[:SAME_STEM_LETTERS]
