"""InfoNCE over a batch without its false negatives; memory grows with a tile, not with the batch squared.

    loss = mean over q of  logsumexp(d ∉ S(q), ⟨q, d⟩ / τ) - ⟨q, d⁺⟩ / τ
    S(q) = {d ≠ d⁺ : f(q, d) ≥ f(q, d⁺) + ε}

f is a cheap model's similarity: what it scores above the positive is no certain negative. Documents that are
the positive once more are left out too, by the number that equal texts share. Rows need not be normalised,
and are taken as they are.

Source: Morris & Rush 2024 (CDE), eq. 4 and τ = 0.02; Cheng et al. 2024 (Inf-CL) for the tiles: the forward
pass keeps one logsumexp a query, the backward pass computes each tile once more. Differs: one process, no
rings of devices; f and its mask are computed in the same tiles. ``plain_contrastive_loss`` is the oracle.

    Q queries    N documents, positives and further negatives    V vector dim    S surrogate dim
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.errors import ConfigError
from jaxtyping import Bool, Float, Float32, Int64
from typing_extensions import override

TEMPERATURE: Final = 0.02
"""CDE §5."""

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
    temperature: float = TEMPERATURE,
    tile: int = TILE,
) -> Float32[torch.Tensor, ""]:
    """Return the mean loss of the queries, each against all documents of the batch but those left out.

    Sums are in float32 whatever the vectors are. A batch of one document has the loss 0.
    """
    _check(temperature, tile)
    return _TiledLoss.apply(
        query_QV.float(), document_NV.float(), positive_Q, false_negatives, temperature, tile
    )  # pyright: ignore[reportReturnType]


def plain_contrastive_loss(
    query_QV: Float[torch.Tensor, "Q V"],
    document_NV: Float[torch.Tensor, "N V"],
    positive_Q: Int64[torch.Tensor, " Q"],
    false_negatives: FalseNegatives | None = None,
    *,
    temperature: float = TEMPERATURE,
) -> Float32[torch.Tensor, ""]:
    """Return the same loss from one matrix of all logits."""
    _check(temperature, TILE)
    logits_QN = query_QV.float() @ document_NV.float().T / temperature
    everything = slice(None)
    if false_negatives is not None:
        logits_QN = logits_QN.masked_fill(
            left_out(false_negatives, positive_Q, everything, everything), -torch.inf
        )
    return F.cross_entropy(logits_QN, positive_Q)


def _check(temperature: float, tile: int) -> None:
    if not 0.0 < temperature < float("inf"):
        raise ConfigError(
            f"the temperature of the loss must be a positive number, got {temperature}; CDE's is "
            f"{TEMPERATURE}"
        )
    if tile < 1:
        raise ConfigError(
            f"a tile of the loss must hold at least one query and document, got {tile}; {TILE} is the default"
        )


def left_out(
    false_negatives: FalseNegatives,
    positive_Q: Int64[torch.Tensor, " Q"],
    queries: slice | Int64[torch.Tensor, " q"],
    documents: slice | Int64[torch.Tensor, " n"],
) -> Bool[torch.Tensor, "q n"]:
    """Mark the documents of a tile that stay out of its queries' partition functions.

    The positive never does.
    """
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


class _TiledLoss(torch.autograd.Function):
    """Loss and gradients, one tile of logits in memory at a time."""

    @staticmethod
    @override
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        query_QV, document_NV, positive_Q, false_negatives, temperature, tile = args
        log_sum_Q = query_QV.new_full((len(query_QV),), -torch.inf)
        for queries, documents in _tiles(len(query_QV), len(document_NV), tile):
            logits_qn = _logits(
                query_QV, document_NV, positive_Q, false_negatives, temperature, queries, documents
            )
            log_sum_Q[queries] = torch.logaddexp(log_sum_Q[queries], logits_qn.logsumexp(1))
        positive_logit_Q = (query_QV * document_NV[positive_Q]).sum(1) / temperature
        ctx.save_for_backward(query_QV, document_NV, positive_Q, log_sum_Q)
        ctx.settings = false_negatives, temperature, tile
        return (log_sum_Q - positive_logit_Q).mean()

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor | None, ...]:
        query_QV, document_NV, positive_Q, log_sum_Q = ctx.saved_tensors
        false_negatives, temperature, tile = ctx.settings
        scale = grad_outputs[0] / (len(query_QV) * temperature)
        # The positive's own share of the gradient, then the tiles' expectation under the softmax.
        query_grad_QV = -document_NV[positive_Q]
        document_grad_NV = torch.zeros_like(document_NV).index_add_(0, positive_Q, query_QV, alpha=-1.0)
        for queries, documents in _tiles(len(query_QV), len(document_NV), tile):
            logits_qn = _logits(
                query_QV, document_NV, positive_Q, false_negatives, temperature, queries, documents
            )
            share_qn = logits_qn.sub_(log_sum_Q[queries, None]).exp_()
            query_grad_QV[queries].addmm_(share_qn, document_NV[documents])
            document_grad_NV[documents].addmm_(share_qn.T, query_QV[queries])
        return query_grad_QV.mul_(scale), document_grad_NV.mul_(scale), None, None, None, None


def _tiles(num_queries: int, num_documents: int, tile: int) -> Iterator[tuple[slice, slice]]:
    for query in range(0, num_queries, tile):
        for document in range(0, num_documents, tile):
            yield slice(query, query + tile), slice(document, document + tile)


def _logits(
    query_QV: torch.Tensor,
    document_NV: torch.Tensor,
    positive_Q: torch.Tensor,
    false_negatives: FalseNegatives | None,
    temperature: float,
    queries: slice,
    documents: slice,
) -> torch.Tensor:
    logits_qn = (query_QV[queries] @ document_NV[documents].T).div_(temperature)
    if false_negatives is not None:
        logits_qn.masked_fill_(left_out(false_negatives, positive_Q, queries, documents), -torch.inf)
    return logits_qn
