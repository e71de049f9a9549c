"""Which of its two neighbours a landmark resembles: LMK §6.4, figure 4.

    [CLS] z1 [LMK] z2 [LMK] z3 [LMK]        landmark i stands between chunk i (left) and chunk i + 1 (right)
    [CLS] z1 [LMK] · [CLS] z2 [LMK] · …     each chunk encoded by itself, as its landmark

Each landmark of the whole row looks for the chunks of its own document that are nearest by cosine. Hit@k on
the left is the share of landmarks whose left chunk is among the k nearest, and so on the right; *any* is
either. Hits by chance stand beside them, since a document of few chunks gives many.

Source: Doshi et al., "LMK > CLS: Landmark Pooling for Dense Embeddings", §6.4. Differs: documents of as many
chunks as the model reads, where the paper takes 256 and more; the last landmark, which has no right
neighbour, is left out.

    L landmarks    M chunks    V embedding dim
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Final

import numpy as np
import torch
from cairn.pipeline.model.engine.transformer import Transformer
from jaxtyping import Float, Float32, Int64

HITS: Final = (1, 2, 5, 10)
MIN_CHUNKS: Final = 4
"""With fewer, chance alone finds most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LandmarkSides:
    """Hit@k of left and right neighbours, over all landmarks of several documents."""

    k: int
    left: float
    right: float
    any: float
    chance: float
    chance_any: float
    chunks: int
    landmarks: int


def side_ranks(
    landmarks_LV: Float[np.ndarray, "L V"], chunks_MV: Float[np.ndarray, "M V"]
) -> Int64[np.ndarray, "L 2"]:
    """Return the rank, from 0, of each landmark's left and right chunk among all by cosine.

    Landmark i has chunk i on its left; there is one chunk more than landmarks. Ties go to the lower chunk.
    """
    landmarks_LV, chunks_MV = (
        each / np.linalg.norm(each, axis=1, keepdims=True) for each in (landmarks_LV, chunks_MV)
    )
    order_LM = np.argsort(-(landmarks_LV @ chunks_MV.T), axis=1, kind="stable")
    rank_LM = np.argsort(order_LM, axis=1)
    place_L = np.arange(len(landmarks_LV))
    return np.stack([rank_LM[place_L, place_L], rank_LM[place_L, place_L + 1]], axis=1)


def measure_sides(
    backbone: Transformer, pieces: Sequence[Sequence[int]], chunk_tokens: int
) -> list[LandmarkSides]:
    """Measure hit@k on pieces of one length; nothing where they have fewer than :data:`MIN_CHUNKS` chunks."""
    num_chunks = len(pieces[0]) // chunk_tokens
    if num_chunks < MIN_CHUNKS:
        return []
    ranks_L2 = np.concatenate(
        [_ranks(backbone, ids[: num_chunks * chunk_tokens], chunk_tokens) for ids in pieces]
    )
    return [
        LandmarkSides(
            k=k,
            left=float((ranks_L2[:, 0] < k).mean()),
            right=float((ranks_L2[:, 1] < k).mean()),
            any=float((ranks_L2.min(axis=1) < k).mean()),
            chance=k / num_chunks,
            chance_any=1.0 - comb(num_chunks - 2, k) / comb(num_chunks, k),
            chunks=num_chunks,
            landmarks=len(ranks_L2),
        )
        for k in HITS
        if k < num_chunks
    ]


def _ranks(backbone: Transformer, ids: Sequence[int], chunk_tokens: int) -> Int64[np.ndarray, "L 2"]:
    head = [] if backbone.cls_id is None else [backbone.cls_id]
    chunks = [
        [*ids[start : start + chunk_tokens], backbone.landmark_id]
        for start in range(0, len(ids), chunk_tokens)
    ]
    whole = [*head, *(token for chunk in chunks for token in chunk)]
    landmarks = len(head) + np.cumsum([len(chunk) for chunk in chunks]) - 1
    together_MV = _states(backbone, [whole], landmarks[None])[0]
    alone_M1V = _states(
        backbone, [[*head, *chunk] for chunk in chunks], np.full((len(chunks), 1), len(head) + chunk_tokens)
    )
    return side_ranks(together_MV[:-1], alone_M1V[:, 0])


def _states(
    backbone: Transformer, rows: Sequence[Sequence[int]], places_BL: Int64[np.ndarray, "B L"]
) -> Float32[np.ndarray, "B L V"]:
    """Return the projected states at some positions of rows of one length."""
    ids_BT = np.array(rows, np.int64)
    hidden_BTD = backbone.hidden_states(ids_BT, np.full(len(ids_BT), ids_BT.shape[1], np.int64))
    own_BLD = np.take_along_axis(hidden_BTD.float().cpu().numpy(), places_BL[:, :, None], axis=1)
    flat_MD = torch.from_numpy(own_BLD.reshape(-1, own_BLD.shape[2])).to(backbone.device)
    return backbone.project(flat_MD).cpu().numpy().reshape(*places_BL.shape, -1)
