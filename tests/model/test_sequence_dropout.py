from __future__ import annotations

import pytest
import torch

from pipeline.errors import ConfigError
from pipeline.model.sequence_dropout import drop_context


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


CONTEXT = torch.arange(4 * 500 * 3, dtype=torch.float32).view(4, 500, 3)
NULL = torch.tensor([-1.0, -2.0, -3.0])


def test_drop_context_every_vector_is_its_own_or_the_null_token():
    dropped = drop_context(CONTEXT, NULL, 0.3, drawn())
    is_null = (dropped == NULL).all(-1)
    assert ((dropped == CONTEXT).all(-1) ^ is_null).all()


def test_drop_context_share_of_null_tokens_is_the_probability():
    share = (drop_context(CONTEXT, NULL, 0.3, drawn()) == NULL).all(-1).float().mean()
    assert abs(float(share) - 0.3) < 0.04  # four standard deviations of 2,000 draws


def test_drop_context_rows_of_a_batch_are_drawn_apart():
    is_null = (drop_context(CONTEXT, NULL, 0.5, drawn()) == NULL).all(-1)
    assert (is_null[0] != is_null[1]).any()


def test_drop_context_same_seed_drops_the_same():
    assert torch.equal(drop_context(CONTEXT, NULL, 0.5, drawn(7)), drop_context(CONTEXT, NULL, 0.5, drawn(7)))
    assert not torch.equal(
        drop_context(CONTEXT, NULL, 0.5, drawn(7)), drop_context(CONTEXT, NULL, 0.5, drawn(8))
    )


@pytest.mark.parametrize(("probability", "expected"), [(0.0, CONTEXT), (1.0, NULL.expand_as(CONTEXT))])
def test_drop_context_at_the_ends_drops_nothing_or_everything(probability: float, expected: torch.Tensor):
    assert torch.equal(drop_context(CONTEXT, NULL, probability, drawn()), expected)


def test_drop_context_gradients_reach_what_stayed_and_the_null_token():
    context, null = CONTEXT.clone().requires_grad_(), NULL.clone().requires_grad_()
    dropped = drop_context(context, null, 0.5, drawn())
    dropped.sum().backward()
    is_null = (dropped.detach() == NULL).all(-1)
    assert context.grad is not None
    assert null.grad is not None
    assert torch.equal(context.grad, (~is_null)[..., None].float().expand_as(CONTEXT))
    assert torch.equal(null.grad, is_null.sum().float().expand(3))


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan")])
def test_drop_context_probability_outside_zero_and_one_is_refused(probability: float):
    with pytest.raises(ConfigError, match="between 0 and 1"):
        drop_context(CONTEXT, NULL, probability, drawn())
