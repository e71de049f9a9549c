from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cairn.pipeline.lab.train.mixer import (
    Compared,
    Judgements,
    compare,
    first_dims,
    fused_scores,
    hit_rate,
    judge,
    mix_batch,
    mixing_loss,
    passage_loss,
    passages_of,
    ranking_loss,
)
from cairn.pipeline.lab.train.mixer_data import BatchMaker, MixerBatch
from cairn.pipeline.lab.train.settings import MixerConfig
from cairn.pipeline.model.landmark_mixer import LandmarkMixer, Stretches
from jaxtyping import TypeCheckError
from torch.nn import functional

E = torch.eye(6)


def batch_of(
    x_SLD: torch.Tensor,
    document_SL: list[list[int]],
    query_QD: torch.Tensor,
    answers: list[int],
    sequences: list[int],
) -> MixerBatch:
    document = torch.tensor(document_SL)
    is_landmark = document >= 0
    x_SLD = x_SLD * is_landmark[..., None]
    owned = [x_SLD[document == answer].sum(0) for answer in answers]
    return MixerBatch(
        source="s",
        stretches=Stretches(
            x_SLD=x_SLD,
            is_landmark_SL=is_landmark,
            mean_SD=functional.normalize(x_SLD.sum(1), dim=-1),
            num_landmarks_S=is_landmark.sum(1).float(),
        ),
        document_SL=document,
        query_QD=query_QD,
        answer_Q=torch.tensor(answers),
        sequence_Q=torch.tensor(sequences),
        answer_QD=functional.normalize(torch.stack(owned), dim=-1),
        context_CD=None,
    )


@pytest.fixture
def batch() -> MixerBatch:
    """Return two sequences: documents 0, 0, 1, and document 2, nearly document 1, with a place left over."""
    near = functional.normalize(E[2] + 0.3 * E[5], dim=-1)
    x_SLD = torch.stack([torch.stack([E[0], E[1], E[2]]), torch.stack([near, E[4], E[4]])])
    return batch_of(x_SLD, [[0, 0, 1], [2, 3, -1]], torch.stack([E[0], E[2]]), [0, 1], [0, 0])


def test_passages_are_landmarks_then_pairs_of_neighbours(batch: MixerBatch):
    x_SLD = batch.stretches.x_SLD
    rows = [x_SLD[0, 0], x_SLD[0, 1], x_SLD[0, 2], x_SLD[1, 0], x_SLD[1, 1]]
    pairs = [x_SLD[0, 0] + x_SLD[0, 1], x_SLD[0, 1] + x_SLD[0, 2], x_SLD[1, 0] + x_SLD[1, 1]]
    expected = torch.stack([*rows, *(functional.normalize(pair, dim=-1) for pair in pairs)])
    torch.testing.assert_close(passages_of(x_SLD, batch), expected)


def test_judge_takes_passages_inside_the_answer_and_leaves_out_what_touches_it_or_looks_like_it(
    batch: MixerBatch,
):
    judged = judge(batch)
    #                                    landmarks 0 0 1 | 2 3   pairs 00 01 | 23
    assert judged.is_answer_QM.int().tolist() == [[1, 1, 0, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0]]
    # Query 1's answer has a near copy in the other sequence, and half of it stands in the pair 01.
    assert judged.is_left_out_QM.int().tolist() == [[0, 0, 0, 0, 0, 0, 1, 0], [0, 0, 0, 1, 0, 0, 1, 0]]


def test_judge_leaves_out_sequences_that_look_like_the_answering_one():
    x_SLD = torch.stack([E[:1], functional.normalize(E[:1] + 0.2 * E[1:2], dim=-1), E[2:3]])
    judged = judge(batch_of(x_SLD, [[0], [1], [2]], E[:2], [0, 2], [0, 2]))
    assert judged.is_left_out_QS.int().tolist() == [[0, 1, 0], [0, 0, 0]]


def test_passage_loss_is_minus_log_of_the_answers_share():
    cosine_QM = torch.tensor([[0.9, 0.5, 0.8, 0.1], [0.2, 0.7, 0.3, 0.4]])
    is_answer = torch.tensor([[True, True, False, False], [False, False, True, False]])
    left_out = torch.tensor([[False, False, True, False], [False, False, False, False]])
    judged = Judgements(
        base=compare_nothing(),
        is_answer_QM=is_answer,
        is_left_out_QM=left_out,
        is_left_out_QS=torch.zeros(2, 1, dtype=torch.bool),
        sequence_Q=torch.zeros(2, dtype=torch.int64),
    )
    expected = []
    for cosines, answers, outs in zip(cosine_QM.tolist(), is_answer.tolist(), left_out.tolist(), strict=True):
        terms = [math.exp(cosine / 0.1) for cosine in cosines]
        right = sum(term for term, answer in zip(terms, answers, strict=True) if answer)
        expected.append(
            -math.log(right / sum(term for term, out in zip(terms, outs, strict=True) if not out))
        )
    assert passage_loss(cosine_QM, judged, 0.1).item() == pytest.approx(np.mean(expected), rel=1e-5)


def compare_nothing() -> Compared:
    return Compared(passage_QM=torch.zeros(2, 4), sequence_QS=torch.zeros(2, 1), best_QS=torch.zeros(2, 1))


def test_ranking_loss_is_nothing_for_the_same_ranking_and_kl_for_another():
    one, other = torch.tensor([[0.9, 0.1, 0.3]]), torch.tensor([[0.2, 0.5, 0.4]])
    assert ranking_loss(one, one, 0.05).item() == pytest.approx(0, abs=1e-6)
    p, q = (np.exp(np.array(cosines.tolist()[0]) / 0.2) for cosines in (other, one))
    p, q = p / p.sum(), q / q.sum()
    assert ranking_loss(one, other, 0.2).item() == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-4)
    teacher = other.clone().requires_grad_()
    student = one.clone().requires_grad_()
    ranking_loss(student, teacher, 0.2).backward()
    assert teacher.grad is None
    assert student.grad is not None


def test_compare_finds_the_best_landmark_of_a_sequence_and_no_padding(batch: MixerBatch):
    x_SLD = batch.stretches.x_SLD
    compared = compare(x_SLD, torch.stack([-E[0], E[2]]), batch)
    np.testing.assert_allclose(compared.best_QS[0], [0.0, 0.0], atol=1e-6)
    np.testing.assert_allclose(compared.best_QS[1], [1.0, 1 / math.sqrt(1.09)], atol=1e-6)
    np.testing.assert_allclose(compared.sequence_QS[1, 0], 1 / math.sqrt(3), atol=1e-6)
    np.testing.assert_allclose(fused_scores(compared)[1, 0], (1 + 1 / math.sqrt(3)) / 2, atol=1e-6)


def test_hit_rate_counts_queries_whose_best_passage_answers_unless_it_is_left_out(batch: MixerBatch):
    judged = judge(batch)
    assert hit_rate(judged.base, judged) == 1.0
    # A near copy of the answer scores highest and does not count; the other query now finds a passage of
    # document 3.
    asked = torch.stack([E[4], functional.normalize(E[2] + 0.3 * E[5], dim=-1)])
    assert hit_rate(compare(batch.stretches.x_SLD, asked, batch), judged) == 0.5


def test_mixing_loss_of_closed_gates_is_the_base_models(make_paged_world: Callable[..., Any]):
    config = MixerConfig(batch_queries=24, context_documents=40, min_pairs=4)
    batch = BatchMaker(make_paged_world().data(config), config).training_batch(0)
    mixer = LandmarkMixer(32, 2, 8)
    y_SLD, query_QD = mix_batch(mixer, batch)
    is_landmark = batch.stretches.is_landmark_SL
    torch.testing.assert_close(y_SLD[is_landmark], batch.stretches.x_SLD[is_landmark])
    torch.testing.assert_close(query_QD, batch.query_QD)
    loss, terms = mixing_loss(mixer, batch, config)
    assert terms["hit"] == terms["base_hit"] < 0.5
    assert terms["ranking"] == pytest.approx(0, abs=1e-5)
    assert loss.item() == pytest.approx(
        terms["passages"] + 0.5 * terms["documents"] + 0.5 * terms["fused"], rel=1e-5
    )
    loss.backward()
    assert mixer.title_gate.grad is not None
    assert mixer.title_gate.grad.item() < 0  # opening it lowers the loss


def test_first_dims_are_of_unit_length():
    torch.testing.assert_close(first_dims(torch.tensor([[3.0, 4.0, 5.0]]), 2), torch.tensor([[0.6, 0.8]]))


def test_losses_check_shapes():
    with pytest.raises(TypeCheckError):
        ranking_loss(torch.zeros(2, 3), torch.zeros(2, 4), 0.1)
