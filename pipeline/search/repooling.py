"""Chunk size chosen at query time: neighbouring landmarks pooled into larger chunks, without encoding anything again.

A group is g consecutive chunks of one document, counted from its first; the last may be shorter. Its vector is the L2-normalised mean of
its landmarks' stored (normalised) vectors: the rule that makes the document vector, which is the coarsest group. g = 1 leaves the chunks
as they are.
Candidates still come from the landmark index; only the scoring of a candidate document sees groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float32, Int64

from pipeline.errors import ConfigError


def group_size(chunk_tokens: int | None, settings: Mapping[str, Any]) -> int:
    """Return how many landmarks make a chunk of ``chunk_tokens``; ``settings`` is the manifest's resolved configuration."""
    if chunk_tokens is None:
        return 1
    interval = int(settings["encoder"]["landmark_interval"])
    if chunk_tokens < interval or chunk_tokens % interval:
        allowed = f"{interval}, {2 * interval}, {3 * interval}, …"
        raise ConfigError(f"chunk_tokens must be a multiple of this collection's {interval} ({allowed}), got {chunk_tokens}")
    return chunk_tokens // interval


def group_starts(counts_N: Int64[np.ndarray, " N"], group: int) -> tuple[Int64[np.ndarray, " G"], Int64[np.ndarray, " N_plus_1"]]:
    """Return the first row of each group, and the first group of each document (with the number of groups at the end).

    ``counts_N`` is the number of chunks of each document whose vectors are stacked in order; all are at least 1.
    """
    groups_N = -(-counts_N // group)
    offsets = np.concatenate([[0], np.cumsum(groups_N)])
    ordinals = np.arange(offsets[-1]) - np.repeat(offsets[:-1], groups_N)
    first_rows = np.concatenate([[0], np.cumsum(counts_N)[:-1]])
    return np.repeat(first_rows, groups_N) + ordinals * group, offsets


def pool_groups(vectors_MV: Float32[np.ndarray, "M V"], starts_G: Int64[np.ndarray, " G"]) -> Float32[np.ndarray, "G V"]:
    """Return the normalised mean of each run of rows; a mean of zero stays zero."""
    if len(starts_G) == len(vectors_MV):
        return vectors_MV
    sums_GV = np.add.reduceat(vectors_MV, starts_G, axis=0)
    return sums_GV / np.maximum(np.linalg.norm(sums_GV, axis=1, keepdims=True), np.finfo(np.float32).tiny)
