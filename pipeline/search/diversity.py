"""Which of the ranked documents an answer has, where not simply the best: groups, maximal marginal relevance.

    group_by, group_size    at most so many documents of one value of a column, best first
    mmr = w                 next is the document with the highest w * score - (1 - w) * likeness, its cosine
                            with the nearest document that was chosen before; a copy of it comes last

Both choose greedily: a longer answer begins with the documents of a shorter one. A document without
a value is not limited. Source: Carbonell & Goldstein 1998 ("The Use of MMR"); differs: the score is that of
the search, not a cosine with the query. Documents are compared by their own vectors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
from cairn.pipeline.index.generation import Elsewhere, Generation, table_errors
from jaxtyping import Bool, Float, Float32, Float64, Int32, Int64

NO_GROUP = -1
COPY_COSINE = 0.9999
"""From which on two documents have the same text: scores are relative, so that no weight tells of it."""

MOST_COLUMNS: Final = 8
"""Whose numbers a generation keeps, four bytes a document each: a reader may group by any column."""
_codes: WeakKeyDictionary[Generation, dict[str, Int32[np.ndarray, " N"]]] = WeakKeyDictionary()


def group_codes(generation: Generation, column: str) -> Int32[np.ndarray, " N"]:
    """Return a number for each document's value of a column, :data:`NO_GROUP` where it has none.

    The column is read once a generation, and each time where other processes hold it.
    """
    known = {} if isinstance(generation, Elsewhere) else _codes.setdefault(generation, {})
    found = known.get(column)
    if found is None:
        with table_errors("reading the column to group by", generation.layout):
            values = generation.read_column(column)
        chunks = values.dictionary_encode().unify_dictionaries().chunks
        codes = [chunk.indices.fill_null(NO_GROUP).to_numpy() for chunk in chunks]
        found = known[column] = np.concatenate([np.empty(0, np.int32), *codes])
        for oldest in list(known)[:-MOST_COLUMNS]:
            known.pop(oldest, None)  # another search may have taken it away
    return found


def groups_of(
    generation: Generation, column: str, positions: Int64[np.ndarray, " A"]
) -> Int32[np.ndarray, " A"]:
    """Return the numbers of some documents, which mean nothing beside those of another call."""
    if isinstance(generation, Elsewhere):
        values = generation.fetch_documents(positions, [column]).column(column).combine_chunks()
        return values.dictionary_encode().indices.fill_null(NO_GROUP).to_numpy()
    return group_codes(generation, column)[positions]


def chosen_places(
    scores_N: Float64[np.ndarray, " N"],
    count: int,
    *,
    groups_N: Int32[np.ndarray, " N"] | None = None,
    group_size: int = 1,
    vectors_NV: Float32[np.ndarray, "N V"] | None = None,
    mmr: float = 1.0,
) -> list[int]:
    """Return the places of at most ``count`` documents in a ranking, in the order that the answer has.

    Unit ``vectors_NV`` are needed where ``mmr`` is below 1; ties keep the order of the ranking.
    """
    chosen: list[int] = []
    sizes: Counter[int] = Counter()
    is_left_N: Bool[np.ndarray, " N"] = np.ones(len(scores_N), np.bool_)
    values_N: Float[np.ndarray, " N"] = mmr * scores_N
    nearest_N = np.full(len(scores_N), -1.0)
    while len(chosen) < count and is_left_N.any():
        place = int(np.where(is_left_N, values_N, -np.inf).argmax())
        is_left_N[place] = False
        chosen.append(place)
        if groups_N is not None and (group := int(groups_N[place])) != NO_GROUP:
            sizes[group] += 1
            if sizes[group] == group_size:
                is_left_N &= groups_N != group
        if vectors_NV is not None:
            nearest_N = np.maximum(nearest_N, vectors_NV @ vectors_NV[place])
            values_N = mmr * scores_N - (1.0 - mmr) * nearest_N
            if mmr < 1.0:
                values_N[nearest_N >= COPY_COSINE] -= 4.0  # below all others, which lie from -1 to 1
    return chosen


def still_allowed(
    groups_D: Int32[np.ndarray, " D"],
    group_size: int,
    chosen: Sequence[int] | Int64[np.ndarray, " K"],
    allowed: Int64[np.ndarray, " A"] | None,
) -> Int64[np.ndarray, " B"]:
    """Return the ``allowed`` documents, all where None, without further ones of the groups that are full.

    ``chosen`` are the positions of those that fill the groups, which stay.
    """
    places = np.asarray(chosen, np.int64)
    found, sizes = np.unique(groups_D[places], return_counts=True)
    full = found[(sizes >= group_size) & (found != NO_GROUP)]
    open_A = np.arange(len(groups_D)) if allowed is None else allowed
    return np.union1d(open_A[~np.isin(groups_D[open_A], full)], places)
