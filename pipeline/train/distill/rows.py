"""Texts as rows of token ids that see nothing of one another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int64

from pipeline.model.folders.checkpoint import Checkpoint
from pipeline.train.landmark_encoder import PackedRows


def text_row(
    text: str, checkpoint: Checkpoint, *, max_tokens: int, prefix: str = ""
) -> Int64[np.ndarray, " T"]:
    """Return a text's first tokens between the special ones, ``max_tokens`` in all."""
    opening = [] if checkpoint.cls_id is None else [checkpoint.cls_id]
    # No token of a text worth reading has more characters than this on the mean.
    ids = checkpoint.tokenizer.encode(prefix + text[: 16 * max_tokens], add_special_tokens=False).ids
    return np.array([*opening, *ids[: max_tokens - len(opening) - 1], checkpoint.landmark_id], np.int64)


def packed_rows(rows: Sequence[Int64[np.ndarray, " _"]]) -> PackedRows:
    """Lay rows end to end, each pooled whole."""
    lengths_B = np.array([len(ids_T) for ids_T in rows], np.int64)
    return PackedRows(
        ids_N=np.concatenate(rows).astype(np.int32),
        lengths_B=lengths_B,
        windows_B=np.arange(len(rows)),
        pooled_start_B=np.zeros(len(rows), np.int64),
        pooled_end_B=lengths_B,
    )
