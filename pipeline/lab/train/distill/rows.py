"""Texts as rows of token ids that see nothing of one another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.prefixes import Prefix
from cairn.pipeline.lab.train.packed_rows import PackedRows
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from jaxtyping import Int64


def text_row(
    text: str, checkpoint: Checkpoint, *, max_tokens: int, prefix: str = ""
) -> Int64[np.ndarray, " T"]:
    """Return prefix and first tokens of a text between the special ones, ``max_tokens`` in all."""
    read = Prefix.of(prefix, checkpoint.tokenizer)
    opening = [*([] if checkpoint.cls_id is None else [checkpoint.cls_id]), *read.ids.tolist()]
    # No token of a text worth reading has more characters than this on the mean.
    ids = checkpoint.tokenizer.encode(read.continued(text[: 16 * max_tokens]), add_special_tokens=False).ids
    return np.array([*[*opening, *ids][: max_tokens - 1], checkpoint.landmark_id], np.int64)


def num_left_out(checkpoint: Checkpoint, settings: EncoderConfig) -> int:
    """Return how many first tokens of a row its vector leaves out: [CLS] and a prefix that is not pooled."""
    num_prefix = len(Prefix.of(settings.document_prefix, checkpoint.tokenizer).ids)
    return 0 if settings.pool_prefix or not num_prefix else num_prefix + (checkpoint.cls_id is not None)


def packed_rows(rows: Sequence[Int64[np.ndarray, " _"]], first_pooled: int = 0) -> PackedRows:
    """Lay rows end to end, each pooled from its token ``first_pooled`` on."""
    lengths_B = np.array([len(ids_T) for ids_T in rows], np.int64)
    return PackedRows(
        ids_N=np.concatenate(rows).astype(np.int32),
        lengths_B=lengths_B,
        windows_B=np.arange(len(rows)),
        pooled_start_B=np.full(len(rows), first_pooled, np.int64),
        pooled_end_B=lengths_B,
    )
