"""The texts that a model is compressed by, as rows of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from cairn.pipeline.errors import SourceError
from cairn.pipeline.lab.train.distill import text_row
from cairn.pipeline.lab.train.training_files import read_texts
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from jaxtyping import Int64

MIN_TOKENS: Final = 8
"""A shorter text says nothing of how tokens read one another."""
MIN_TEXTS: Final = 8


def read_calibration(
    paths: Sequence[Path], checkpoint: Checkpoint, *, num_texts: int, max_tokens: int, prefix: str = ""
) -> list[Int64[np.ndarray, " _"]]:
    """Return the first ``max_tokens`` of evenly spread texts of Parquet or JSON-lines files with a text.

    Fewer than eight rows of eight tokens raise :class:`SourceError`.
    """
    texts = read_texts(paths).texts
    spread = np.linspace(0, max(0, len(texts) - 1), min(num_texts, len(texts))).astype(int)
    rows = [text_row(texts[place], checkpoint, max_tokens=max_tokens, prefix=prefix) for place in spread]
    long_enough = [ids_T for ids_T in rows if len(ids_T) >= MIN_TOKENS]
    if len(long_enough) < MIN_TEXTS:
        raise SourceError(
            f"calibration must have at least {MIN_TEXTS} different texts of {MIN_TOKENS} tokens, got "
            f"{len(long_enough)}; give more or longer ones with --texts"
        )
    return long_enough
