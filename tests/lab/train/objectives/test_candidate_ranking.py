from __future__ import annotations

import math

import pytest
import torch
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.losses import candidate_ranking_loss

GENERATOR = torch.Generator().manual_seed(0)
QUERIES, DOCUMENTS = torch.randn(3, 8, generator=GENERATOR), torch.randn(6, 8, generator=GENERATOR)
NAN = math.nan
PLACES = torch.tensor([[0, 3, 4], [1, 5, -1], [2, -1, -1]])
LOGITS = torch.tensor([[4.0, 1.0, -2.0], [0.5, 3.0, NAN], [9.0, NAN, NAN]])


def written_out(queries: torch.Tensor, temperature: float) -> torch.Tensor:
    """Sum p log(p / q) over each query's candidates, one by one; the third query has one alone."""
    losses = []
    for query, places, logits in ((0, [0, 3, 4], [4.0, 1.0, -2.0]), (1, [1, 5], [0.5, 3.0])):
        cosines = [torch.cosine_similarity(queries[query], DOCUMENTS[place], dim=0) for place in places]
        weights = [math.exp(logit) for logit in logits]
        student = [torch.exp(cosine / temperature) for cosine in cosines]
        losses.append(
            sum(
                weight
                / sum(weights)
                * torch.log((weight / sum(weights)) / (own / torch.stack(student).sum()))
                for weight, own in zip(weights, student, strict=True)
            )
        )
    return torch.stack(losses).mean()


def test_loss_and_gradient_equal_the_divergence_written_out():
    one, other = (QUERIES.clone().requires_grad_() for _ in range(2))
    found = candidate_ranking_loss(one, DOCUMENTS, PLACES, LOGITS, temperature=0.3)
    expected = written_out(other, 0.3)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    found.backward()
    expected.backward()
    assert one.grad is not None
    assert torch.allclose(one.grad, other.grad, atol=1e-6)
    assert not one.grad[2].any()


def test_loss_is_zero_where_the_student_ranks_as_the_teacher_and_without_candidates():
    cosines = (
        torch.nn.functional.normalize(QUERIES, dim=1) @ torch.nn.functional.normalize(DOCUMENTS, dim=1).T
    )
    logits = cosines.gather(1, PLACES.clamp(min=0)) / 0.3
    logits[PLACES < 0] = NAN
    assert candidate_ranking_loss(QUERIES, DOCUMENTS, PLACES, logits, temperature=0.3).item() < 1e-6
    nothing = torch.full((3, 3), NAN)
    assert candidate_ranking_loss(QUERIES, DOCUMENTS, PLACES, nothing, temperature=0.3).item() == 0.0


def test_temperature_of_zero_is_refused():
    with pytest.raises(ConfigError, match="temperature of a ranking must be a positive number"):
        candidate_ranking_loss(QUERIES, DOCUMENTS, PLACES, LOGITS, temperature=0.0)
