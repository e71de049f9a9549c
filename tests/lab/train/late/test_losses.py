from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.lab.train.settings import LateConfig
from cairn.pipeline.lab.train.token_head import LateBatch, late_loss, max_sims, pool_padded

LENGTHS = torch.tensor([5, 1, 7, 4])


def states(rows: int, tokens: int, seed: int = 0, width: int = 6) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(rows, tokens, width, generator=generator), dim=-1)


def inside(lengths: torch.Tensor, tokens: int) -> torch.Tensor:
    return torch.arange(tokens) < lengths[:, None]


def batch_of(query: torch.Tensor, document: torch.Tensor) -> LateBatch:
    return LateBatch(
        query_QqD=query,
        query_ids_Qq=torch.zeros(query.shape[:2], dtype=torch.int64),
        is_query_Qq=torch.ones(query.shape[:2], dtype=torch.bool),
        document_NtD=document,
        is_document_Nt=inside(LENGTHS, document.shape[1]),
        is_left_out_QN=torch.zeros(len(query), len(document), dtype=torch.bool),
    )


def test_max_sims_equal_the_weighted_mean_of_best_cosines_written_out():
    query, document = states(3, 4, 1), states(4, 7, 2)
    weight = torch.rand(3, 4, generator=torch.Generator().manual_seed(3))
    found = max_sims(query, weight, document, inside(LENGTHS, 7))
    for q in range(3):
        for n in range(4):
            own = document[n, : LENGTHS[n]]
            best = torch.stack([(own @ token).max() for token in query[q]])
            assert float(found[q, n]) == pytest.approx(
                float((weight[q] * best).sum() / weight[q].sum()), abs=1e-5
            )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_pooled_neighbours_hold_no_token_beyond_the_text(size: int):
    document = states(4, 7, 2)
    pooled, held = pool_padded(document, inside(LENGTHS, 7), size)
    for n in range(4):
        own = document[n, : LENGTHS[n]]
        expected = [F.normalize(part.mean(0), dim=0) for part in own.split(size)]
        assert int(held[n].sum()) == len(expected)
        torch.testing.assert_close(pooled[n, : len(expected)], torch.stack(expected))


def test_late_loss_of_the_teacher_itself_is_the_contrast_alone():
    batch = batch_of(states(3, 4, 1), states(4, 7, 2))
    scores = torch.rand(3, 4, generator=torch.Generator().manual_seed(3))
    loss, terms = late_loss(scores, scores, batch.is_left_out_QN, LateConfig(distillation_weight=0.7))

    assert terms["ranking"] == pytest.approx(0.0, abs=1e-6)
    assert loss.item() == pytest.approx(0.3 * terms["contrast"])


def test_late_loss_a_document_left_out_is_no_negative():
    batch = batch_of(states(2, 4, 1), states(4, 7, 2))
    batch.is_left_out_QN[0, 3] = True
    scores = torch.tensor([[0.5, 0.1, 0.2, 0.9], [0.1, 0.5, 0.2, 0.3]])
    config = LateConfig(distillation_weight=0.0, temperature=0.1)
    loss, _ = late_loss(scores, scores, batch.is_left_out_QN, config)
    expected = -(scores[0, :3] / 0.1).log_softmax(0)[0] - (scores[1] / 0.1).log_softmax(0)[1]

    assert loss.item() == pytest.approx(expected.item() / 2, abs=1e-5)
