"""Losses of a token projection: a query finds its document by MaxSim, and ranks as whole token states do.

    loss = (1 - w) · InfoNCE(student) + w · KL(teacher ‖ student)

The teacher is the untrained MaxSim over all dimensions of the base's token states, with query tokens weighted
by their idf. Source: Khattab & Zaharia 2020 (ColBERT), eq. 3; Santhanam et al. 2022 (ColBERTv2) for the
distillation.

    Q queries    N documents    q tokens of the longest query    t of the longest document    V vector dim
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.lab.train.late.settings import LateConfig
from jaxtyping import Bool, Float, Float32, Int64

ABSENT = -1e4
"""A cosine that no maximum takes."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LateBatch:
    """Unit states of a batch, padded; the first Q of the N documents are the queries' own."""

    query_QqD: Float32[torch.Tensor, "Q q D"]
    query_ids_Qq: Int64[torch.Tensor, "Q q"]
    is_query_Qq: Bool[torch.Tensor, "Q q"]
    document_NtD: Float32[torch.Tensor, "N t D"]
    is_document_Nt: Bool[torch.Tensor, "N t"]
    is_left_out_QN: Bool[torch.Tensor, "Q N"]


def max_sims(
    query_QqV: Float[torch.Tensor, "Q q V"],
    weight_Qq: Float[torch.Tensor, "Q q"],
    document_NtV: Float[torch.Tensor, "N t V"],
    is_document_Nt: Bool[torch.Tensor, "N t"],
) -> Float32[torch.Tensor, "Q N"]:
    """Return the weighted mean over query tokens of the highest cosine in each document."""
    num_queries, num_tokens, width = query_QqV.shape
    num_documents, longest, _ = document_NtV.shape
    cosine = query_QqV.reshape(-1, width) @ document_NtV.reshape(-1, width).T
    cosine = cosine.view(num_queries, num_tokens, num_documents, longest)
    best_QqN = cosine.masked_fill(~is_document_Nt, ABSENT).amax(-1)
    share_Qq = weight_Qq / weight_Qq.sum(1, keepdim=True).clamp(min=1e-6)
    return torch.einsum("qtn,qt->qn", best_QqN, share_Qq)


def pool_padded(
    token_NtV: Float[torch.Tensor, "N t V"], is_token_Nt: Bool[torch.Tensor, "N t"], size: int
) -> tuple[Float32[torch.Tensor, "N p V"], Bool[torch.Tensor, "N p"]]:
    """Return the normalised means of runs of ``size`` neighbouring tokens, and which of them hold any."""
    spare = -token_NtV.shape[1] % size
    token_NtV = F.pad(token_NtV * is_token_Nt[..., None], (0, 0, 0, spare))
    held_Np = F.pad(is_token_Nt, (0, spare)).view(len(token_NtV), -1, size).any(-1)
    sums_NpV = token_NtV.view(len(token_NtV), -1, size, token_NtV.shape[-1]).sum(2)
    return F.normalize(sums_NpV, dim=-1), held_Np


def padded_places(
    offsets_N1: Int64[np.ndarray, " N1"], texts: Int64[np.ndarray, " n"]
) -> tuple[Int64[np.ndarray, "n t"], Bool[np.ndarray, "n t"]]:
    """Return where the tokens of some texts lie, laid out as a rectangle, and what of it is a token."""
    lengths = offsets_N1[texts + 1] - offsets_N1[texts]
    place = np.arange(max(int(lengths.max()), 1))
    return np.minimum(offsets_N1[texts][:, None] + place, offsets_N1[-1] - 1), place < lengths[:, None]


def late_loss(
    student_QN: Float32[torch.Tensor, "Q N"],
    teacher_QN: Float32[torch.Tensor, "Q N"],
    is_left_out_QN: Bool[torch.Tensor, "Q N"],
    config: LateConfig,
    answer_Q: Int64[torch.Tensor, " Q"] | None = None,
) -> tuple[Float32[torch.Tensor, ""], dict[str, float]]:
    """Return the loss of a step, and its terms for the log.

    ``answer_Q`` = None: query i is answered by document i.
    """
    if answer_Q is None:
        answer_Q = torch.arange(len(student_QN), device=student_QN.device)
    logits_QN = (student_QN / config.temperature).masked_fill(is_left_out_QN, ABSENT)
    contrast = F.cross_entropy(logits_QN, answer_Q)
    ranking = F.kl_div(
        _log_shares(student_QN, is_left_out_QN, config),
        _log_shares(teacher_QN, is_left_out_QN, config),
        reduction="batchmean",
        log_target=True,
    )
    weight = config.distillation_weight
    return (1 - weight) * contrast + weight * ranking, {
        "contrast": contrast.item(),
        "ranking": ranking.item(),
    }


def _log_shares(
    score_QN: Float32[torch.Tensor, "Q N"], is_left_out_QN: Bool[torch.Tensor, "Q N"], config: LateConfig
) -> Float32[torch.Tensor, "Q N"]:
    logits_QN = score_QN / config.distillation_temperature
    return logits_QN.masked_fill(is_left_out_QN, ABSENT).log_softmax(1)
