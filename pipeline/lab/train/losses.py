"""What training minimises; every loss here is a pure function of tensors.

InfoNCE in tiles, without false negatives: memory grows with a tile, not with the batch squared.

    loss = mean over q of  logsumexp(d ∉ S(q), ⟨q, d⟩ / τ) - ⟨q, d⁺⟩ / τ
    S(q) = {d ≠ d⁺ : f(q, d) ≥ f(q, d⁺) + ε}

f is a cheap model's similarity: what it scores above the positive is no certain negative. Documents that are
the positive once more are left out too, by the number that equal texts share. Rows are taken as they are.
Source: Morris & Rush 2024 (CDE), eq. 4 and τ = 0.02; Cheng et al. 2024 (Inf-CL) for the tiles: the forward
pass keeps one logsumexp a query, the backward pass computes each tile once more. Differs: one process, no
rings of devices; f and its mask are computed in the same tiles.

Cross entropy over a vocabulary at several layers and widths; the matrix of all logits never exists.

    L = Σ over layers l, widths d, tokens k of  logsumexp(z) - z[y]     z = h^l[:d] W[:d] + b

The logits of a width are those of the width before it plus the product of the dimensions between them, so all
widths of a layer cost one product of the widest. Gradients are made in the forward pass, tile by tile of
tokens. With a distillation each exit also follows the last layer's widest one, which gets no gradient from
it: KL(P_S ‖ P_T) at temperature τ. Source: m³BERT §2.1 (L_total; one head and one bias for all exits), A.2
(eq. 2 and 3). Differs: W is the input table; A.2 writes the softmax without b, here both sides have it.

Distillation of vectors, of a query's candidates, and of hidden states is told at its function.

    Q queries    N documents, positives and further negatives    V vector dim or vocabulary    S surrogate dim
    M texts    K candidates or scored tokens    L layers    W widths    D model dim
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
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
    return _TiledContrast.apply(
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
    """Return the same loss from one matrix of all logits: the oracle."""
    everything = slice(None)
    logits_QN = _logits(
        query_QV.float(),
        document_NV.float(),
        positive_Q,
        false_negatives,
        temperature,
        everything,
        everything,
    )
    return F.cross_entropy(logits_QN, positive_Q)


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


class _TiledContrast(torch.autograd.Function):
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

    KL(softmax(teacher's logits) ‖ softmax(student's cosines / τ)) over the candidates of one query.
    ``places`` are documents of the batch; candidates whose logit is NaN do not count, whatever their place.
    Source: distillation of a reranker's scores, as LMK's fine-tuning and BGE-M3 have it.
    """
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


def spread_layers(num_student: int, num_teacher: int) -> tuple[int, ...]:
    """Return for each of the student's layers one of the teacher's, counted from 1, up to the last."""
    return tuple(max(1, round(layer * num_teacher / num_student)) for layer in range(1, num_student + 1))


def state_loss(
    student: Sequence[Float[torch.Tensor, "N D"]],
    teacher: Sequence[Float[torch.Tensor, "N D"]],
    kind: Literal["mse", "cosine"],
) -> Float32[torch.Tensor, ""]:
    """Return the mean over layers of how far a student's states are from a teacher's, token by token.

    The teacher gets no gradient. A layer's squared error is divided by the teacher's mean square, which
    differs tenfold between layers and is measured in the micro-batch, so other micro-batches give a slightly
    other MSE. Source: NV-Embed, appendix A.2, MSE of the states of each layer. Differs: layers are averaged.
    """
    losses: list[torch.Tensor] = []
    for own, taught in zip(student, teacher, strict=True):
        own, taught = own.float(), taught.detach().float()
        if kind == "cosine":
            losses.append(1.0 - F.cosine_similarity(own, taught, dim=1).mean())
        else:
            losses.append(F.mse_loss(own, taught) / taught.square().mean())
    return torch.stack(losses).mean()


TILE_NUMBERS: Final = 1 << 25
"""Numbers of all widths' logits in a tile: 128 MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfDistillation:
    """How strongly, and at which temperature, all exits follow the last layer's widest one."""

    weight: float = 1.0
    temperature: float = 1.0


def vocabulary_loss(
    states_LKD: Float[torch.Tensor, "L K D"],
    table_VD: Float[torch.Tensor, "V D"],
    bias_V: Float[torch.Tensor, " V"],
    labels_K: Int64[torch.Tensor, " K"],
    widths: Sequence[int],
    *,
    distillation: SelfDistillation | None = None,
    tile_numbers: int = TILE_NUMBERS,
) -> tuple[Float32[torch.Tensor, ""], Float32[torch.Tensor, "L W"]]:
    """Return the sum over layers, widths and tokens, and each exit's own sum of cross entropies.

    Only the first has a gradient. Sums are in float32; products run in autocast's precision. ``widths`` rise
    and end within the states.
    """
    total, sums_LW = _TiledVocabulary.apply(
        states_LKD, table_VD, bias_V, labels_K, tuple(widths), distillation, tile_numbers
    )  # pyright: ignore[reportGeneralTypeIssues]
    return total, sums_LW


class _TiledVocabulary(torch.autograd.Function):
    """Loss and gradients, one tile of tokens in memory at a time."""

    @staticmethod
    @override
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        states_LKD, table_VD, bias_V, labels_K, widths, distillation, tile_numbers = args
        device = states_LKD.device.type
        is_half = torch.is_autocast_enabled(device)
        products = torch.get_autocast_dtype(device) if is_half else torch.float32
        tile = _Tile(
            table_VD, bias_V, widths, distillation, products, wants_gradients=any(ctx.needs_input_grad)
        )
        num_layers, num_tokens, _ = states_LKD.shape
        sums_LW = states_LKD.new_zeros((num_layers, len(widths)), dtype=torch.float32)
        states_grad = torch.zeros_like(states_LKD, dtype=torch.float32)
        step = max(1, tile_numbers // (len(table_VD) * (len(widths) + 2)))
        for start in range(0, num_tokens, step):
            tokens = slice(start, start + step)
            tile.teacher = None
            # The last layer first: the others follow it.
            for layer in reversed(range(num_layers)):
                # Each tensor is cast once by hand, where autocast would at every product.
                with torch.autocast(device, enabled=False):
                    sums_LW[layer] += tile.add(
                        states_LKD[layer, tokens], labels_K[tokens], states_grad[layer, tokens]
                    )
        ctx.mark_non_differentiable(sums_LW)
        ctx.save_for_backward(states_grad, tile.table_grad, tile.bias_grad)
        ctx.dtypes = states_LKD.dtype, table_VD.dtype, bias_V.dtype
        return sums_LW.sum() + tile.distilled, sums_LW

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor | None, ...]:
        gradients = (
            (gradient * grad_outputs[0]).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *gradients, None, None, None, None


class _Tile:
    """Some tokens of one layer at a time; the gradients of table and bias add up over all of them."""

    def __init__(
        self,
        table_VD: torch.Tensor,
        bias_V: torch.Tensor,
        widths: Sequence[int],
        distillation: SelfDistillation | None,
        products: torch.dtype,
        *,
        wants_gradients: bool,
    ) -> None:
        self._products = products
        self._table_VD = table_VD.to(products)
        self._bias_V = bias_V.float()
        self._blocks = [slice(start, end) for start, end in zip((0, *widths), widths, strict=False)]
        self._distillation = distillation
        self._wants_gradients = wants_gradients
        self.table_grad = torch.zeros_like(table_VD, dtype=torch.float32)
        self.bias_grad = torch.zeros_like(self._bias_V)
        self.distilled = self._bias_V.new_zeros(())
        self.teacher: torch.Tensor | None = None

    def add(
        self, states_kD: torch.Tensor, labels_k: torch.Tensor, grad_kD: torch.Tensor
    ) -> Float32[torch.Tensor, " W"]:
        """Return the loss of each width, and fill in the states' gradient."""
        states_kD = states_kD.to(self._products)
        losses: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        logits_kV = self._bias_V.expand(len(states_kD), -1)
        every_width: list[torch.Tensor] = []
        for block in self._blocks:
            states, table = states_kD[:, block], self._table_VD[:, block].T
            logits_kV = (
                torch.addmm(logits_kV, states, table)
                if self._products == torch.float32
                else logits_kV + states @ table
            )
            every_width.append(logits_kV)
        is_teaching = self._distillation is not None and self.teacher is None
        if self._distillation is not None and is_teaching:
            self.teacher = (logits_kV / self._distillation.temperature).log_softmax(1)
        for place, logits in enumerate(every_width):
            shares = logits.log_softmax(1)
            losses.append(-shares.gather(1, labels_k[:, None]).sum())
            gradient = shares.exp_()  # in place: log-softmax is not needed again
            gradient[torch.arange(len(labels_k), device=labels_k.device), labels_k] -= 1.0
            if not (is_teaching and place == len(every_width) - 1):
                self._distil(logits, gradient)
            gradients.append(gradient)
        if self._wants_gradients:
            self._hand_back(states_kD, gradients, grad_kD)
        return torch.stack(losses)

    def _distil(self, logits_kV: torch.Tensor, gradient_kV: torch.Tensor) -> None:
        if self._distillation is None or self.teacher is None:
            return
        weight, temperature = self._distillation.weight, self._distillation.temperature
        student = (logits_kV / temperature).log_softmax(1)
        shares, distance = student.exp(), student.sub_(self.teacher)
        divergence_k = (shares * distance).sum(1, keepdim=True)
        self.distilled += weight * divergence_k.sum()
        gradient_kV.addcmul_(shares, distance.sub_(divergence_k), value=weight / temperature)

    def _hand_back(
        self, states_kD: torch.Tensor, gradients: Sequence[torch.Tensor], grad_kD: torch.Tensor
    ) -> None:
        """Add the gradients up: a dimension is in every width that reaches beyond it."""
        so_far = gradients[-1]
        for place in reversed(range(len(gradients))):
            if place < len(gradients) - 1:
                so_far += gradients[place]
            block, gradient = self._blocks[place], so_far.to(self._products)
            grad_kD[:, block] = gradient @ self._table_VD[:, block]
            self.table_grad[:, block] += gradient.T @ states_kD[:, block]
        self.bias_grad += so_far.sum(0)
