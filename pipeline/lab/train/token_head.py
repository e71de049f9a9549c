"""Late interaction in training: a projection of token states, a weight for each token id, and their losses.

    document token    normalise(h W)              query token    normalise(h W), weighing exp(log_weight[id])

    loss = (1 - w) · InfoNCE(student) + w · KL(teacher ‖ student)

A query finds its document by MaxSim, and ranks as the untrained MaxSim over all dimensions of the base's
token states does, with query tokens weighted by their idf. ``cairn train-late`` trains the head on states of
a frozen base, ``cairn train`` together with the transformer:

    a micro-batch's states ─▶ own tokens ─▶ TokenHead ─▶ vectors and weights, a row a token of a text
    groups of neighbouring documents, and what was mined for their queries ─▶ MaxSim ─▶ late_loss

There a query's negatives are the documents of its group but those that the surrogate scores above its own.

Source: Khattab & Zaharia 2020 (ColBERT), eq. 3; Santhanam et al. 2022 (ColBERTv2) for the distillation.

    T tokens    V vector dim, V1 followed by a weight    D model dim    X vocabulary    Q queries, q tokens
    N documents, t tokens    g documents of a group
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.cluster.sampling import hash_order
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.corpus.tokenization import tokenize
from cairn.pipeline.lab.token_states import embed_tokens
from cairn.pipeline.lab.train.losses import FalseNegatives, left_out
from cairn.pipeline.lab.train.packed_rows import PackedRows
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.lab.train.sequences import SequenceBatch
from cairn.pipeline.lab.train.settings import LateConfig, TrainConfig
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.ragged import ranges
from cairn.pipeline.token_vectors.max_sim import token_idf
from cairn.pipeline.token_vectors.projection import TokenProjection, quantised_weights
from jaxtyping import Bool, Float, Float32, Int64
from torch import nn
from typing_extensions import override


def principal_rotation(vectors_ND: Float32[np.ndarray, "N D"]) -> Float32[np.ndarray, "D D"]:
    """Return the second moment's eigenvectors as columns, by falling eigenvalue, signs fixed."""
    moment_DD = vectors_ND.T.astype(np.float64) @ vectors_ND.astype(np.float64)
    _, columns_DD = np.linalg.eigh(moment_DD)
    columns_DD = columns_DD[:, ::-1]
    largest_D = np.take_along_axis(columns_DD, np.abs(columns_DD).argmax(0)[None], axis=0)[0]
    return np.ascontiguousarray(columns_DD * np.sign(largest_D), np.float32)


LOWEST_WEIGHT: Final = 1e-3
OBSERVED_SHARE: Final = 0.1
"""What a step adds to the running mean of squares: the steps of the codec follow the last twenty or so."""


class TokenHead(nn.Module):
    """The projection in training; ``mean_square_V`` is what its codec's steps are taken from."""

    mean_square_V: torch.Tensor

    def __init__(self, matrix_DV: torch.Tensor, weight_X: torch.Tensor) -> None:
        super().__init__()
        self.matrix = nn.Parameter(matrix_DV)
        self.log_weight = nn.Parameter(weight_X.clamp(min=LOWEST_WEIGHT).log())
        self.register_buffer("mean_square_V", torch.full((matrix_DV.shape[1],), 1 / matrix_DV.shape[1]))

    @classmethod
    def of(
        cls, states_SD: Float[np.ndarray, "S D"], idf_X: Float32[np.ndarray, " X"], dims: int
    ) -> TokenHead:
        """Begin at the principal directions of token states and at the tokens' idf."""
        sample_SD = states_SD.astype(np.float32)
        matrix_DV = principal_rotation(sample_SD)[:, :dims].copy()
        head = cls(torch.from_numpy(matrix_DV), torch.from_numpy(idf_X))
        head.observe(head(torch.from_numpy(sample_SD)).detach(), share=1.0)
        return head

    @override
    def forward(self, states_TD: Float[torch.Tensor, "*T D"]) -> Float[torch.Tensor, "*T V"]:
        """Return the unit vectors of token states."""
        return F.normalize(states_TD @ self.matrix, dim=-1)

    def weights_of(self, ids: Int64[torch.Tensor, "*T"]) -> Float[torch.Tensor, "*T"]:
        """Return what each token of a query weighs."""
        return self.log_weight[ids].exp()

    @torch.no_grad()
    def observe(self, vectors_TV: Float[torch.Tensor, "T V"], share: float = OBSERVED_SHARE) -> None:
        """Let ``share`` of the running mean of squares be those of these vectors of documents."""
        self.mean_square_V.lerp_(vectors_TV.float().square().mean(0), share)

    @torch.no_grad()
    def projection(
        self, base_sha256: str, *, bits: int, pool_tokens: int, rms_V: Float32[np.ndarray, " V"] | None = None
    ) -> TokenProjection:
        """Return what is saved, the matrix rounded to float16; ``rms_V`` = None takes the observed ones."""
        codes_X, step = quantised_weights(self.log_weight.detach().exp().cpu().numpy())
        return TokenProjection(
            matrix_DV=self.matrix.detach().cpu().half().float().numpy(),
            weight_codes_X=codes_X,
            weight_step=step,
            rms_V=self.mean_square_V.sqrt().cpu().numpy() if rms_V is None else rms_V,
            pool_tokens=pool_tokens,
            bits=bits,
            base_sha256=base_sha256,
        )


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


GROUP_DOCUMENTS: Final = 32
"""Documents whose tokens are compared with one another: a product of some 2,000 by 8,000 tokens."""

IDF_TEXTS: Final = 8_192
STATES_TEXTS: Final = 512
"""Documents, drawn by hash, that weights of tokens and principal directions of their states begin from."""

DEFAULT_INTERVAL: Final = EncoderConfig().landmark_interval


def begin_head(
    pairs: TrainingPairs, heldout: Int64[np.ndarray, " n"], base: str, config: TrainConfig
) -> tuple[TokenHead, Float32[torch.Tensor, " X"]]:
    """Return the head as training begins, from a sample of documents, and what token ids weigh there."""
    settings = EncoderConfig(model=base)
    backbone = load_backbone(settings)
    left_out_pairs = set(heldout.tolist())
    distinct = dict.fromkeys(
        document for number, document in enumerate(pairs.documents) if number not in left_out_pairs
    )
    texts = list(distinct)
    sample = [texts[place] for place in hash_order(texts, 0)[:IDF_TEXTS].tolist()]
    tokens = tokenize(backbone.tokenizer, sample)
    idf_X = token_idf(tokens.ids, tokens.text_offsets, backbone.tokenizer.get_vocab_size())
    states = embed_tokens(
        backbone,
        sample[:STATES_TEXTS],
        batch_tokens=settings.batch_tokens,
        row_tokens=DEFAULT_INTERVAL,
        max_tokens=config.max_document_tokens,
    )
    return TokenHead.of(states.states_TV, idf_X, config.late_dims), torch.from_numpy(idf_X)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Group:
    """Queries and documents of a batch that are compared; the answers are among the documents."""

    queries: Int64[np.ndarray, " q"]
    documents: Int64[np.ndarray, " g"]


def own_places(rows: PackedRows) -> Int64[np.ndarray, " T"]:
    """Return where the rows' own tokens lie: without [CLS], prefix and [LMK]."""
    ends_B = np.cumsum(rows.lengths_B) - 1
    return ranges(ends_B - rows.own_lengths, rows.own_lengths)


def project_tokens(
    head: TokenHead, states_ND: Float[torch.Tensor, "N D"], rows: PackedRows
) -> Float32[torch.Tensor, "T V1"]:
    """Return the vectors of the rows' own tokens, each followed by its weight in a query.

    The weight goes along so that its gradient, too, comes from one process alone.
    """
    places = own_places(rows)
    own = torch.from_numpy(places).to(states_ND.device)
    ids = torch.from_numpy(rows.ids_N[places].astype(np.int64)).to(states_ND.device)
    vectors_TV = head(states_ND[own].float())
    return torch.cat([vectors_TV, head.weights_of(ids)[:, None]], dim=1)


def own_states(states_ND: Float[torch.Tensor, "N D"], rows: PackedRows) -> Float32[torch.Tensor, "T D1"]:
    """Return the unit states of the rows' own tokens, each followed by 1, which says nothing of weights."""
    own = torch.from_numpy(own_places(rows)).to(states_ND.device)
    return F.pad(F.normalize(states_ND[own].float(), dim=1), (0, 1), value=1.0)


def groups_of(batch: SequenceBatch, mined_Qk: Int64[np.ndarray, "Q k"]) -> Iterator[Group]:
    """Cut a batch's documents into groups of neighbours; what was mined for their queries joins them."""
    num_answers = int(batch.positive_Q.max()) + 1
    number_of = {int(pair): num_answers + place for place, pair in enumerate(batch.pair_D[num_answers:])}
    for documents in np.array_split(np.arange(num_answers), -(-num_answers // GROUP_DOCUMENTS)):
        queries = np.flatnonzero((batch.positive_Q >= documents[0]) & (batch.positive_Q <= documents[-1]))
        mined = {number_of[pair] for pair in mined_Qk[queries].ravel().tolist() if pair in number_of}
        yield Group(queries=queries, documents=np.array([*documents.tolist(), *sorted(mined)], np.int64))


def batch_late_loss(
    token_TV1: Float32[torch.Tensor, "T V1"],
    teacher_TD1: Float32[torch.Tensor, "T D1"],
    idf_X: Float32[torch.Tensor, " X"],
    batch: SequenceBatch,
    mined_Qk: Int64[np.ndarray, "Q k"],
    false_negatives: FalseNegatives,
    distillation_weight: float,
) -> tuple[Float32[torch.Tensor, ""], Float32[torch.Tensor, "d V"]]:
    """Return the mean loss of the queries, and the vectors of documents' tokens, without a graph."""
    device, num_queries = token_TV1.device, len(batch.pair_Q)
    places = own_places(batch.rows)
    text_T = np.repeat(batch.text_B, batch.rows.own_lengths)
    is_text_T = text_T >= 0
    # Texts are numbered in the order of their rows, so that those of one lie together.
    counts_N = np.bincount(text_T[is_text_T], minlength=num_queries + len(batch.pair_D))
    offsets_N1 = np.concatenate([[0], np.cumsum(counts_N)])
    kept = torch.from_numpy(np.flatnonzero(is_text_T)).to(device)
    student, teacher = token_TV1[kept], teacher_TD1[kept]
    weight_T = idf_X.to(device)[
        torch.from_numpy(batch.rows.ids_N[places][is_text_T].astype(np.int64)).to(device)
    ]
    teacher = torch.cat([teacher[:, :-1], weight_T[:, None]], dim=1)
    positive_Q = torch.from_numpy(batch.positive_Q).to(device)
    config, total = LateConfig(distillation_weight=distillation_weight), student.new_zeros(())
    for group in groups_of(batch, mined_Qk):
        student_QN, teacher_QN = (
            _scores(vectors, offsets_N1, group, num_queries) for vectors in (student, teacher)
        )
        asked, candidates = (torch.from_numpy(x).to(device) for x in (group.queries, group.documents))
        is_left_out_QN = left_out(false_negatives, positive_Q, asked, candidates)
        answer_Q = torch.searchsorted(candidates, positive_Q[asked])
        loss, _ = late_loss(student_QN, teacher_QN, is_left_out_QN, config, answer_Q)
        total = total + len(group.queries) / num_queries * loss
    return total, student[int(offsets_N1[num_queries]) :, :-1].detach()


def _scores(
    token_TV1: Float32[torch.Tensor, "T V1"],
    offsets_N1: Int64[np.ndarray, " N1"],
    group: Group,
    num_queries: int,
) -> Float32[torch.Tensor, "q g"]:
    query, is_query = _padded_tokens(token_TV1, offsets_N1, group.queries)
    document, is_document = _padded_tokens(token_TV1, offsets_N1, num_queries + group.documents)
    return max_sims(query[..., :-1], query[..., -1] * is_query, document[..., :-1], is_document)


def _padded_tokens(
    token_TV1: Float32[torch.Tensor, "T V1"],
    offsets_N1: Int64[np.ndarray, " N1"],
    texts: Int64[np.ndarray, " n"],
) -> tuple[Float32[torch.Tensor, "n t V1"], torch.Tensor]:
    places, is_token = (torch.from_numpy(x).to(token_TV1.device) for x in padded_places(offsets_N1, texts))
    return token_TV1[places], is_token
