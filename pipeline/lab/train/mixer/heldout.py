"""Scores of a mixer on held-out pages: how often the best passage answers, where the sequence ranks.

A mean over sources, each counting as often as training draws it, of documents by themselves and of long
sequences. It compares the steps of one run, a mixer with the base model, and cut vectors with whole ones;
``cairn evaluate`` says how good a model is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from cairn.pipeline.lab.train.heldout import rank_scores
from cairn.pipeline.lab.train.mixer.batches import BatchMaker
from cairn.pipeline.lab.train.mixer.losses import (
    LEFT_OUT,
    compare,
    first_dims,
    fused_scores,
    hit_rate,
    judge,
    mix_batch,
)
from cairn.pipeline.model.landmark_mixer import LandmarkMixer
from jaxtyping import Float32

MEASURES = ("heldout_score", "heldout_hit", "heldout_ndcg_at_10")


@torch.no_grad()
def score_mixer(
    mixer: LandmarkMixer,
    maker: BatchMaker,
    *,
    dims: Sequence[int],
    rotation_DD: Float32[torch.Tensor, "D D"] | None = None,
) -> dict[int, dict[str, float]]:
    """Return the measures by width of vectors cut to it, after ``rotation_DD`` where one is given.

    Empty where nothing is held out. The score is the mean of the share of passages that answer and nDCG@10 of
    sequences by fused scores.
    """
    sums = {dim: np.zeros(len(MEASURES)) for dim in dims}
    total = 0.0
    for batch, share in maker.heldout_batches():
        judged = judge(batch)
        y_SLD, query_QD = mix_batch(mixer, batch)
        if rotation_DD is not None:
            y_SLD, query_QD = y_SLD @ rotation_DD, query_QD @ rotation_DD
        for dim in dims:
            compared = compare(first_dims(y_SLD, dim), first_dims(query_QD, dim), batch)
            fused_QS = fused_scores(compared).masked_fill(judged.is_left_out_QS, LEFT_OUT)
            ndcg = rank_scores(fused_QS.numpy(), judged.sequence_Q.numpy())["heldout_ndcg_at_10"]
            hit = hit_rate(compared, judged)
            sums[dim] += share * np.array([(hit + ndcg) / 2, hit, ndcg])
        total += share
    return (
        {dim: dict(zip(MEASURES, (sums[dim] / total).tolist(), strict=True)) for dim in dims} if total else {}
    )
