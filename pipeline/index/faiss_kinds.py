"""The kinds of FAISS index: one table of how each stores vectors, and the rule that chooses between them.

An unknown kind raises. ``faiss_build`` and ``faiss_index`` ask the table and know no kind by name; the names
a user may give are :data:`cairn.pipeline.config.IndexKind`, these and ``auto``.
"""

# pyright: reportAttributeAccessIssue=false
# SWIG's module has no types.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from cairn.pipeline.config import IndexConfig
from cairn.pipeline.counted import counted
from cairn.pipeline.errors import DamageError
from cairn.pipeline.faiss_library import faiss

MIN_LISTED_VECTORS = 256
"""Below this there is nothing to train lists on, and nothing to save."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaissKind:
    """How an index of one kind stores vectors.

    ``make_lists`` makes an untrained inverted file from the vector dimension and the number of lists; None
    keeps the vectors as they are, in one flat list. A refined kind re-scores its candidates with the codes of
    a second file.
    """

    why: str
    make_lists: Callable[[int, int], Any] | None = None
    is_refined: bool = False


def _scalar_lists(vector_dim: int, num_lists: int) -> Any:
    quantizer, bits = faiss.IndexFlatIP(vector_dim), faiss.ScalarQuantizer.QT_8bit
    return faiss.IndexIVFScalarQuantizer(
        quantizer, vector_dim, num_lists, bits, faiss.METRIC_INNER_PRODUCT, True
    )


def _rabitq_lists(vector_dim: int, num_lists: int) -> Any:
    quantizer = faiss.IndexFlatIP(vector_dim)
    return faiss.IndexIVFRaBitQ(quantizer, vector_dim, num_lists, faiss.METRIC_INNER_PRODUCT)


FAISS_KINDS: Final = {
    "flat": FaissKind(why="exact search is fast enough"),
    "ivf_sq8": FaissKind(why="inverted lists with one byte a dimension", make_lists=_scalar_lists),
    "ivf_rabitq": FaissKind(
        why="one bit a dimension, refined by one byte a dimension", make_lists=_rabitq_lists, is_refined=True
    ),
}
"""Kind to its rule; ``why`` completes the sentence that says why ``auto`` chose it."""


def faiss_kind(name: str) -> FaissKind:
    """Return the rule of a kind that a generation's description names; another name is damage."""
    if name not in FAISS_KINDS:
        raise DamageError(f"the kind of a FAISS index must be one of {', '.join(FAISS_KINDS)}, got {name!r}")
    return FAISS_KINDS[name]


def choose_kind(num_vectors: int, config: IndexConfig) -> tuple[str, str]:
    """Return the kind of index for a number of vectors, and a sentence that says why."""
    if config.index_kind != "flat" and num_vectors < MIN_LISTED_VECTORS:
        return "flat", f"{counted(num_vectors, 'vector')}: too few for inverted lists"
    if config.index_kind != "auto":
        return config.index_kind, f"asked for by the setting index_kind = {config.index_kind}"
    if num_vectors <= config.flat_max_vectors:
        kind, limit = "flat", f"at most {config.flat_max_vectors:,}"
    elif num_vectors < config.rabitq_min_vectors:
        kind, limit = "ivf_sq8", f"more than {config.flat_max_vectors:,}"
    else:
        kind, limit = "ivf_rabitq", f"at least {config.rabitq_min_vectors:,}"
    return kind, f"{num_vectors:,} vectors are {limit}: {FAISS_KINDS[kind].why}"
