"""What training minimises; every loss here is a pure function of tensors.

InfoNCE in tiles, without false negatives: memory grows with a tile, not with the batch squared.

    loss = mean over q of  logsumexp(d ∉ S(q), ⟨q, d⟩ / τ) - ⟨q, d⁺⟩ / τ
    S(q) = {d ≠ d⁺ : f(q, d) ≥ f(q, d⁺) + ε}

f is a cheap model's similarity: what it scores above the positive is no certain negative. Documents that are
the positive once more are left out too, by the number that equal texts share. Rows are taken as they are.
Source: Morris & Rush 2024 (CDE), eq. 4 and τ = 0.02; Cheng et al. 2024 (Inf-CL) for the tiles: the forward
pass keeps one logsumexp of a query and a tile, the backward pass computes each tile once more. Differs: one
process, no rings of devices; f and its mask are computed in the same tiles.

Cross entropy over a vocabulary at several layers and widths; the matrix of all logits never exists.

    L = Σ over layers l, widths d, tokens k of  logsumexp(z) - z[y]     z = h^l[:d] W[:d] + b

The logits of a width are those of the width before it plus the product of the dimensions between them, so all
widths of a layer cost one product of the widest. Tiles of tokens are computed once more in the backward pass.
With a distillation each exit also follows the last layer's widest one, which gets no gradient from it:
KL(P_S ‖ P_T) at temperature 1. Source: m³BERT §2.1 (L_total; one head and one bias for all exits), A.2 (eq. 2
and 3). Differs: W is the input table; A.2 writes the softmax without b, here both sides have it.

Distillation of vectors and of hidden states is told at its function.

    Q queries    N documents, positives and further negatives    V vector dim or vocabulary    S surrogate dim
    M texts    K scored tokens    L layers    W widths    D model dim
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from jaxtyping import Bool, Float, Float32, Int64
from torch.utils.checkpoint import checkpoint

TILE: Final = 1_024
"""Queries and documents of one tile: 4 MiB of logits."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FalseNegatives:
    """What tells documents that are no certain negatives: surrogate vectors, numbers of equal texts.

    ``margin`` = 0 leaves out what scores at least as high as the positive; a negative one leaves out more,
    +inf nothing. ``own_Qk`` are negatives that no margin leaves out: those chosen for the query. A number
    that is no document's, such as -1, fills up.
    """

    query_QS: Float32[torch.Tensor, "Q S"]
    document_NS: Float32[torch.Tensor, "N S"]
    text_number_N: Int64[torch.Tensor, " N"]
    margin: float = 0.0
    own_Qk: Int64[torch.Tensor, "Q k"] | None = None


def contrastive_loss(
    query_QV: Float[torch.Tensor, "Q V"],
    document_NV: Float[torch.Tensor, "N V"],
    positive_Q: Int64[torch.Tensor, " Q"],
    false_negatives: FalseNegatives | None = None,
    *,
    temperature: float,
    tile: int = TILE,
) -> Float32[torch.Tensor, ""]:
    """Return the mean loss of the queries, each against all documents of the batch but those left out.

    Sums are in float32 whatever the vectors are. A batch of one document has the loss 0.
    """
    query_QV, document_NV = query_QV.float(), document_NV.float()

    def log_sum(queries: slice, documents: slice) -> torch.Tensor:
        logits_qn = query_QV[queries] @ document_NV[documents].T / temperature
        if false_negatives is not None:
            is_left_out_qn = left_out(false_negatives, positive_Q, queries, documents)
            logits_qn = logits_qn.masked_fill(is_left_out_qn, -torch.inf)
        return logits_qn.logsumexp(1)

    def tiles(count: int) -> list[slice]:
        return [slice(start, start + tile) for start in range(0, count, tile)]

    log_sums = [
        torch.stack([_again(log_sum, queries, documents) for documents in tiles(len(document_NV))])
        for queries in tiles(len(query_QV))
    ]
    positive_logit_Q = (query_QV * document_NV[positive_Q]).sum(1) / temperature
    return (torch.cat([sums.logsumexp(0) for sums in log_sums]) - positive_logit_Q).mean()


def _again(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that draws nothing, and again for its gradient, so that its graph is not kept."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def left_out(
    false_negatives: FalseNegatives,
    positive_Q: Int64[torch.Tensor, " Q"],
    queries: slice | Int64[torch.Tensor, " q"],
    documents: slice | Int64[torch.Tensor, " n"],
) -> Bool[torch.Tensor, "q n"]:
    """Mark the documents that stay out of queries' partition functions; the positive never does."""
    positive_q = positive_Q[queries]
    surrogate_qS = false_negatives.query_QS[queries]
    numbers_N = false_negatives.text_number_N
    threshold_q = (surrogate_qS * false_negatives.document_NS[positive_q]).sum(1) + false_negatives.margin
    scores_qn = surrogate_qS @ false_negatives.document_NS[documents].T
    left_out_qn = scores_qn >= threshold_q[:, None]
    places_n = torch.arange(len(numbers_N), device=positive_Q.device)[documents]
    if false_negatives.own_Qk is not None:
        for own_q in false_negatives.own_Qk[queries].T:
            left_out_qn &= places_n[None] != own_q[:, None]
    left_out_qn |= numbers_N[documents][None] == numbers_N[positive_q][:, None]
    return left_out_qn & (places_n[None] != positive_q[:, None])


def distillation_loss(
    student_MV: Float[torch.Tensor, "M V"], teacher_MV: Float[torch.Tensor, "M V"], *, temperature: float
) -> Float32[torch.Tensor, ""]:
    """Return mean (1 - cosine) plus KL(teacher ‖ student) of each text's softmax over the others.

    Vectors stay near a teacher's and rank one another as the teacher's do.

    The teacher gets no gradient. The KL is 0 with fewer than three texts, where a softmax over the others has
    nothing to rank. Source: the two terms of relational distillation (Park et al. 2019).
    """
    student = F.normalize(student_MV.float(), dim=1)
    teacher = F.normalize(teacher_MV.detach().float(), dim=1)
    distance = 1.0 - (student * teacher).sum(1).mean()
    if len(student) < 3:
        return distance
    return distance + F.kl_div(
        _ranking(student, temperature), _ranking(teacher, temperature), reduction="batchmean", log_target=True
    )


def _ranking(unit_MV: Float32[torch.Tensor, "M V"], temperature: float) -> Float32[torch.Tensor, "M others"]:
    """Return each text's log-softmax over the other texts."""
    similarity_MM = unit_MV @ unit_MV.T / temperature
    num_texts = len(unit_MV)
    is_other_MM = ~torch.eye(num_texts, dtype=torch.bool, device=unit_MV.device)
    return similarity_MM[is_other_MM].view(num_texts, num_texts - 1).log_softmax(1)


def spread_layers(num_student: int, num_teacher: int) -> tuple[int, ...]:
    """Return for each of the student's layers one of the teacher's, counted from 1, up to the last."""
    return tuple(max(1, round(layer * num_teacher / num_student)) for layer in range(1, num_student + 1))


def state_loss(
    student: Sequence[Float[torch.Tensor, "N D"]],
    teacher: Sequence[Float[torch.Tensor, "N D"]],
) -> Float32[torch.Tensor, ""]:
    """Return the mean over layers of how far a student's states are from a teacher's, token by token.

    The teacher gets no gradient. A layer's squared error is divided by the teacher's mean square, which
    differs tenfold between layers and is measured in the micro-batch, so other micro-batches give a slightly
    other MSE. Source: NV-Embed, appendix A.2, MSE of the states of each layer. Differs: layers are averaged.
    """
    losses: list[torch.Tensor] = []
    for own, taught in zip(student, teacher, strict=True):
        own, taught = own.float(), taught.detach().float()
        losses.append(F.mse_loss(own, taught) / taught.square().mean())
    return torch.stack(losses).mean()


TILE_NUMBERS: Final = 1 << 25
"""Numbers of all widths' logits in a tile: 128 MiB."""


def vocabulary_loss(
    states_LKD: Float[torch.Tensor, "L K D"],
    table_VD: Float[torch.Tensor, "V D"],
    bias_V: Float[torch.Tensor, " V"],
    labels_K: Int64[torch.Tensor, " K"],
    widths: Sequence[int],
    *,
    distillation_weight: float = 0.0,
    tile_numbers: int = TILE_NUMBERS,
) -> tuple[Float32[torch.Tensor, ""], Float32[torch.Tensor, "L W"]]:
    """Return the sum over layers, widths and tokens, and each exit's own sum of cross entropies.

    Only the first has a gradient. Sums are in float32; products run in autocast's precision. ``widths`` rise
    and end within the states. The exits follow the last with ``distillation_weight``.
    """
    exits = partial(_exits, widths=tuple(widths), weight=distillation_weight)
    step = max(1, tile_numbers // (len(table_VD) * (len(widths) + 2)))
    total, sums = states_LKD.new_zeros((), dtype=torch.float32), list[torch.Tensor]()
    for layer, states_KD in enumerate(states_LKD):
        sums.append(states_LKD.new_zeros(len(widths), dtype=torch.float32))
        for tile in (slice(start, start + step) for start in range(0, len(labels_K), step)):
            last_kD = states_LKD[-1, tile].detach() if layer < len(states_LKD) - 1 else None
            loss, own_W = _again(exits, states_KD[tile], last_kD, table_VD, bias_V, labels_K[tile])
            total, sums[-1] = total + loss, sums[-1] + own_W.detach()
    return total, torch.stack(sums)


def _exits(
    states_kD: torch.Tensor,
    last_kD: torch.Tensor | None,
    table_VD: torch.Tensor,
    bias_V: torch.Tensor,
    labels_k: torch.Tensor,
    *,
    widths: Sequence[int],
    weight: float,
) -> tuple[Float32[torch.Tensor, ""], Float32[torch.Tensor, " W"]]:
    """Return the loss of one layer's widths, and each cross entropy; ``last`` is None for the last layer."""
    logits_kV, every_width = bias_V.float().expand(len(states_kD), -1), list[torch.Tensor]()
    for start, end in zip((0, *widths), widths, strict=False):
        logits_kV = logits_kV + (states_kD[:, start:end] @ table_VD[:, start:end].T).float()
        every_width.append(logits_kV)
    losses_W = torch.stack([F.cross_entropy(logits, labels_k, reduction="sum") for logits in every_width])
    if not weight:
        return losses_W.sum(), losses_W
    followers = every_width if last_kD is not None else every_width[:-1]
    with torch.no_grad():
        taught_kV = every_width[-1]
        if last_kD is not None:
            taught_kV = bias_V.float() + (last_kD[:, : widths[-1]] @ table_VD[:, : widths[-1]].T).float()
        teacher = taught_kV.log_softmax(1)
    distilled = losses_W.new_zeros(())
    for logits in followers:
        student = logits.log_softmax(1)
        distilled = distilled + (student.exp() * (student - teacher)).sum()
    return losses_W.sum() + weight * distilled, losses_W
