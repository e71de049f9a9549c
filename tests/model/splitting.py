"""Texts given by the ranks of their breaks, split into chunks."""

from __future__ import annotations

import numpy as np
from cairn.pipeline.model.landmarks import Chunks, split_into_chunks


def split(breaks: list[list[int]], interval: int | np.ndarray) -> Chunks:
    offsets = np.cumsum([0, *map(len, breaks)])
    return split_into_chunks(
        np.array([rank for text in breaks for rank in text], np.uint8), offsets, interval
    )
