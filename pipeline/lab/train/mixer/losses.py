"""Losses of a mixer: a query finds its passage, its sequence and both fused, and ranks as the base does.

    passages    InfoNCE over all landmarks of the batch and all pairs of neighbours; answers lie inside the
                query's own document, so that the rest of its sequence is among the negatives
    documents   InfoNCE over sequences, by the mean of their landmarks, and again fused with the best of them,
                as a search ranks
    ranking     KL from the base model's softmax over passages to the mixer's

Near duplicates of the answer by the base model are no negatives: a passage whose cosine with the answering
document is above .9, a sequence whose cosine with the answering one is above .93.

Source: Morris & Rush 2024 (CDE), eq. 4 for the filter of false negatives by a surrogate; differs: the
surrogate compares answers with candidates, not queries.

    S sequences    L landmarks of the longest    Q queries    M passages    D width
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.lab.train.mixer.batches import MixerBatch
from cairn.pipeline.lab.train.mixer.settings import MixerConfig
from cairn.pipeline.model.landmark_mixer import LandmarkMixer
from jaxtyping import Bool, Float, Float32, Int64

SAME_PASSAGE: Final = 0.9
SAME_SEQUENCE: Final = 0.93
DOCUMENT_WEIGHT: Final = 0.5
FUSED_WEIGHT: Final = 0.5
LEFT_OUT: Final = -1e4
"""A logit that no softmax lets through."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Compared:
    """Cosines of a batch's queries with its passages, its sequences and each sequence's best landmark."""

    passage_QM: Float32[torch.Tensor, "Q M"]
    sequence_QS: Float32[torch.Tensor, "Q S"]
    best_QS: Float32[torch.Tensor, "Q S"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Judgements:
    """What the base model says of a batch, and what answers what."""

    base: Compared
    is_answer_QM: Bool[torch.Tensor, "Q M"]
    is_left_out_QM: Bool[torch.Tensor, "Q M"]
    is_left_out_QS: Bool[torch.Tensor, "Q S"]
    sequence_Q: Int64[torch.Tensor, " Q"]


def mix_batch(
    mixer: LandmarkMixer, batch: MixerBatch
) -> tuple[Float32[torch.Tensor, "S L D"], Float32[torch.Tensor, "Q D"]]:
    """Return landmarks and queries as the mixer makes them."""
    return mixer.mix(batch.stretches, batch.context_CD), mixer.mix_queries(batch.query_QD, batch.context_CD)


def first_dims(vectors: Float[torch.Tensor, "*rows D"], dim: int) -> Float[torch.Tensor, "*rows d"]:
    """Cut vectors to their first dimensions and normalise them."""
    return F.normalize(vectors[..., :dim], dim=-1)


def passages_of(y_SLD: Float32[torch.Tensor, "S L D"], batch: MixerBatch) -> Float32[torch.Tensor, "M D"]:
    """Return the landmarks, then the pairs of neighbours, of all sequences."""
    is_landmark_SL = batch.stretches.is_landmark_SL
    pairs_SLD = F.normalize(y_SLD[:, :-1] + y_SLD[:, 1:], dim=-1)
    return torch.cat([y_SLD[is_landmark_SL], pairs_SLD[is_landmark_SL[:, 1:]]])


def compare(
    y_SLD: Float32[torch.Tensor, "S L D"], query_QD: Float32[torch.Tensor, "Q D"], batch: MixerBatch
) -> Compared:
    """Compare queries with landmarks of one space."""
    is_landmark_SL = batch.stretches.is_landmark_SL
    landmark_QSL = torch.einsum("qd,sld->qsl", query_QD, y_SLD).masked_fill(~is_landmark_SL, LEFT_OUT)
    return Compared(
        passage_QM=query_QD @ passages_of(y_SLD, batch).T,
        sequence_QS=query_QD @ _sequence_vectors(y_SLD, batch).T,
        best_QS=landmark_QSL.amax(-1),
    )


@torch.no_grad()
def judge(batch: MixerBatch) -> Judgements:
    """Say what answers each query and what is too near to the answer to be a negative."""
    x_SLD, document_SL = batch.stretches.x_SLD, batch.document_SL
    is_landmark_SL = batch.stretches.is_landmark_SL
    first_M = torch.cat([document_SL[is_landmark_SL], document_SL[:, :-1][is_landmark_SL[:, 1:]]])
    last_M = torch.cat([document_SL[is_landmark_SL], document_SL[:, 1:][is_landmark_SL[:, 1:]]])
    begins_QM, ends_QM = (batch.answer_Q[:, None] == documents_M for documents_M in (first_M, last_M))
    is_answer_QM = begins_QM & ends_QM
    is_near_QM = batch.answer_QD @ passages_of(x_SLD, batch).T > SAME_PASSAGE
    sequence_SD = _sequence_vectors(x_SLD, batch)
    is_near_QS = (sequence_SD @ sequence_SD.T > SAME_SEQUENCE)[batch.sequence_Q]
    is_near_QS[torch.arange(len(is_near_QS)), batch.sequence_Q] = False
    return Judgements(
        base=compare(x_SLD, batch.query_QD, batch),
        is_answer_QM=is_answer_QM,
        # A pair half inside the answer is neither right nor wrong.
        is_left_out_QM=(begins_QM | ends_QM | is_near_QM) & ~is_answer_QM,
        is_left_out_QS=is_near_QS,
        sequence_Q=batch.sequence_Q,
    )


def mixing_loss(
    mixer: LandmarkMixer, batch: MixerBatch, config: MixerConfig
) -> tuple[Float32[torch.Tensor, ""], dict[str, float]]:
    """Return the loss of a step, and its terms for the log.

    ``hit`` and ``base_hit`` are the shares of queries whose best passage answers, mixed and not.
    """
    judged = judge(batch)
    compared = compare(*mix_batch(mixer, batch), batch)
    passages = passage_loss(compared.passage_QM, judged, config.temperature)
    documents = _sequence_loss(compared.sequence_QS, judged, config.temperature)
    fused = _sequence_loss(fused_scores(compared), judged, config.temperature)
    ranking = ranking_loss(compared.passage_QM, judged.base.passage_QM, config.distillation_temperature)
    terms = {
        "passages": passages.item(),
        "documents": documents.item(),
        "fused": fused.item(),
        "ranking": ranking.item(),
    }
    hits = {"hit": hit_rate(compared, judged), "base_hit": hit_rate(judged.base, judged)}
    return (
        passages + DOCUMENT_WEIGHT * documents + FUSED_WEIGHT * fused + config.distillation_weight * ranking,
        terms | hits,
    )


def passage_loss(
    cosine_QM: Float32[torch.Tensor, "Q M"], judged: Judgements, temperature: float
) -> Float32[torch.Tensor, ""]:
    """Return InfoNCE of queries with several answers each: -log of the answers' share."""
    logits_QM = (cosine_QM / temperature).masked_fill(judged.is_left_out_QM, LEFT_OUT)
    return (
        logits_QM.logsumexp(1) - logits_QM.masked_fill(~judged.is_answer_QM, LEFT_OUT).logsumexp(1)
    ).mean()


def ranking_loss(
    cosine_QM: Float32[torch.Tensor, "Q M"], teacher_QM: Float32[torch.Tensor, "Q M"], temperature: float
) -> Float32[torch.Tensor, ""]:
    """Return KL(teacher ‖ student) of the queries' softmax over passages; the teacher gets no gradient."""
    teacher = (teacher_QM.detach() / temperature).log_softmax(1)
    return F.kl_div((cosine_QM / temperature).log_softmax(1), teacher, reduction="batchmean", log_target=True)


def fused_scores(compared: Compared) -> Float32[torch.Tensor, "Q S"]:
    """Return a sequence's score as a search fuses it: half its own, half its best landmark's."""
    return (compared.sequence_QS + compared.best_QS) / 2


def hit_rate(compared: Compared, judged: Judgements) -> float:
    """Return the share of queries whose best passage answers."""
    best_Q = compared.passage_QM.detach().masked_fill(judged.is_left_out_QM, LEFT_OUT).argmax(1)
    return float(judged.is_answer_QM[torch.arange(len(best_Q)), best_Q].float().mean())


def _sequence_loss(
    score_QS: Float32[torch.Tensor, "Q S"], judged: Judgements, temperature: float
) -> Float32[torch.Tensor, ""]:
    return F.cross_entropy(
        (score_QS / temperature).masked_fill(judged.is_left_out_QS, LEFT_OUT), judged.sequence_Q
    )


def _sequence_vectors(
    y_SLD: Float32[torch.Tensor, "S L D"], batch: MixerBatch
) -> Float32[torch.Tensor, "S D"]:
    return F.normalize((y_SLD * batch.stretches.is_landmark_SL[..., None]).sum(1), dim=-1)
