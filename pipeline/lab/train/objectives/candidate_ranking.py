"""A query's candidates ranked as a teacher's scores rank them (KL).

    KL( softmax(teacher's logits) ‖ softmax(student's cosines / τ) )    over the candidates of one query

Source: distillation of a reranker's scores, as LMK's fine-tuning and BGE-M3 have it. Differs from margin-MSE:
the teacher's scale counts only through its softmax.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.errors import ConfigError
from jaxtyping import Float, Float32, Int64

MIN_CANDIDATES = 2
"""One candidate has nothing to be ranked against."""


def candidate_ranking_loss(
    query_QV: Float[torch.Tensor, "Q V"],
    document_NV: Float[torch.Tensor, "N V"],
    places_QK: Int64[torch.Tensor, "Q K"],
    logits_QK: Float32[torch.Tensor, "Q K"],
    *,
    temperature: float,
) -> Float32[torch.Tensor, ""]:
    """Return the mean over queries with two candidates or more, 0 without any.

    ``places`` are documents of the batch; candidates whose logit is NaN do not count, whatever their place.
    """
    if not 0.0 < temperature < float("inf"):
        raise ConfigError(f"the temperature of a ranking must be a positive number, got {temperature}")
    is_there_QK = ~logits_QK.isnan()
    ranked_Q = is_there_QK.sum(1) >= MIN_CANDIDATES
    if not bool(ranked_Q.any()):
        return query_QV.float().sum() * 0.0
    places_QK, logits_QK, is_there_QK = (x[ranked_Q] for x in (places_QK, logits_QK, is_there_QK))
    query = F.normalize(query_QV[ranked_Q].float(), dim=1)
    document = F.normalize(document_NV.float(), dim=1)[places_QK.clamp(min=0)]
    cosines_QK = torch.einsum("qv,qkv->qk", query, document) / temperature
    lowest = torch.finfo(torch.float32).min
    student, teacher = (
        x.masked_fill(~is_there_QK, lowest).log_softmax(1) for x in (cosines_QK, logits_QK.nan_to_num())
    )
    return (teacher.exp() * (teacher - student)).masked_fill(~is_there_QK, 0.0).sum(1).mean()
