"""A cross-encoder's scores of each query's candidates: its positive, then its own negatives.

    pairs, own negatives ─▶ cross-encoder ─▶ logits, kept in the run's folder ─▶ the loss of every step

Source: LMK §5 and appendix, training with hard negatives and distillation scores of a reranker. The paper
takes published scores; here a local cross-encoder makes them once, before the first step.

    N pairs    K candidates of a pair
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from cairn.pipeline import durable
from cairn.pipeline.encode.cross_encoder import CrossEncoderReranker
from cairn.pipeline.errors import IntegrityError
from cairn.pipeline.lab.train.mining import NONE_FOUND
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.types import ProgressListener
from jaxtyping import Float32, Int64
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

_LOGITS = "logits"


def candidate_scores(
    path: Path,
    teacher: CrossEncoderReranker,
    queries: Sequence[str],
    texts: Sequence[str],
    own_Nk: Int64[np.ndarray, "N k"],
    left_out: Int64[np.ndarray, " n"],
    progress: ProgressListener,
) -> Float32[np.ndarray, "N K"]:
    """Return the logits of each query with ``texts`` of its own place and of ``own_Nk``; K is k + 1.

    NaN where there is no candidate, and for pairs ``left_out``. What a run has stored at ``path`` for the
    same candidates is read; a damaged file raises :class:`IntegrityError`.
    """
    places_NK = np.concatenate([np.arange(len(queries))[:, None], own_Nk], axis=1)
    places_NK[left_out] = NONE_FOUND
    key = fingerprint(
        teacher=teacher.fingerprint, places=places_NK.tolist(), queries=list(queries), texts=list(texts)
    )
    stored_NK = _read(path, key)
    if stored_NK is not None:
        return stored_NK
    scores_NK = np.full(places_NK.shape, np.nan, np.float32)
    for number, query in enumerate(queries):
        is_there = places_NK[number] != NONE_FOUND
        if is_there.any():
            own: list[str] = [texts[int(place)] for place in places_NK[number, is_there]]
            scores_NK[number, is_there] = teacher.logits(query, own)
        progress("teacher", number + 1, len(queries), "queries")
    with durable.storage_errors("writing the teacher's scores"), durable.replacing(path) as temporary:
        save_file({_LOGITS: scores_NK}, temporary, metadata={"key": key})
    return scores_NK


def _read(path: Path, key: str) -> Float32[np.ndarray, "N K"] | None:
    if not path.is_file():
        return None
    try:
        with safe_open(path, "numpy") as stored:
            is_same = (stored.metadata() or {}).get("key") == key
            return stored.get_tensor(_LOGITS) if is_same else None
    except (SafetensorError, OSError) as error:
        raise IntegrityError(
            f"{path.name} of the run must be a whole safetensors file, got a damaged one; delete it and "
            "run again"
        ) from error
