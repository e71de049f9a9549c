from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.losses import SelfDistillation, vocabulary_loss

LAYERS, TOKENS, DIM, WORDS, WIDTHS = 3, 11, 12, 29, (2, 5, 12)


def inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(LAYERS, TOKENS, DIM, generator=generator).requires_grad_()
    table = torch.randn(WORDS, DIM, generator=generator).requires_grad_()
    bias = torch.randn(WORDS, generator=generator).requires_grad_()
    return states, table, bias, torch.randint(WORDS, (TOKENS,), generator=generator)


def written_out(
    states: torch.Tensor,
    table: torch.Tensor,
    bias: torch.Tensor,
    labels: torch.Tensor,
    distillation: SelfDistillation | None = None,
) -> torch.Tensor:
    """m³BERT's L_total, and its eq. 2 and 3, with one matrix of logits for each layer and width."""
    logits = {
        (layer, width): states[layer, :, :width] @ table[:, :width].T + bias
        for layer in range(LAYERS)
        for width in WIDTHS
    }
    total = torch.stack([F.cross_entropy(z, labels, reduction="sum") for z in logits.values()]).sum()
    if distillation is None:
        return total
    teacher = logits[LAYERS - 1, WIDTHS[-1]].detach().div(distillation.temperature).softmax(1)
    for exit_, z in logits.items():
        if exit_ != (LAYERS - 1, WIDTHS[-1]):
            student = z.div(distillation.temperature).softmax(1)
            total = total + distillation.weight * (student * (student / teacher).log()).sum()
    return total


@pytest.mark.parametrize("distillation", [None, SelfDistillation(weight=0.7, temperature=1.5)])
@pytest.mark.parametrize("tile_numbers", [1, 3 * WORDS * 5, 1 << 20])
def test_vocabulary_loss_in_tiles_equals_the_loss_and_gradient_written_out(
    tile_numbers: int, distillation: SelfDistillation | None
):
    expected = written_out(*inputs()[:3], inputs()[3], distillation)
    plain, tiled = inputs(), inputs()
    (3.0 * written_out(*plain, distillation)).backward()
    total, sums = vocabulary_loss(*tiled, WIDTHS, distillation=distillation, tile_numbers=tile_numbers)
    (3.0 * total).backward()
    assert torch.allclose(total, expected, rtol=1e-5)
    for ours, theirs in zip(tiled[:3], plain[:3], strict=True):
        assert ours.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    assert sums.shape == (LAYERS, len(WIDTHS))
    if distillation is None:
        assert torch.allclose(sums.sum(), expected, rtol=1e-5)


def test_vocabulary_loss_gradient_equals_finite_differences():
    states, table, bias, labels = inputs()
    vocabulary_loss(states, table, bias, labels, WIDTHS)[0].backward()
    moved = states.detach().double()
    step = torch.zeros_like(moved)
    step[1, 4, 3] = 1e-4
    up, down = (written_out(moved + s, table.double(), bias.double(), labels) for s in (step, -step))
    assert states.grad is not None
    assert states.grad[1, 4, 3] == pytest.approx(((up - down) / 2e-4).item(), rel=1e-4)


def test_vocabulary_loss_dimensions_beyond_the_widest_get_no_gradient():
    states, table, bias, labels = inputs()
    vocabulary_loss(states, table, bias, labels, (2, 5))[0].backward()
    assert states.grad is not None
    assert table.grad is not None
    assert not states.grad[..., 5:].any()
    assert not table.grad[:, 5:].any()
    assert states.grad[..., :5].all()


@pytest.mark.parametrize("widths", [(), (0, 4), (5, 2), (4, 4), (13,)])
def test_vocabulary_loss_widths_that_are_none_are_refused(widths: tuple[int, ...]):
    with pytest.raises(ConfigError, match="must rise from 1 to at most 12"):
        vocabulary_loss(*inputs(), widths)


MEMORY_PROGRAM = """
import resource, torch
from cairn.pipeline.lab.train.losses import vocabulary_loss
torch.set_num_threads(1)
words, table = 20_000, torch.randn(20_000, 8, requires_grad=True)
def run(tokens):
    states = torch.randn(1, tokens, 8, requires_grad=True)
    labels = torch.zeros(tokens, dtype=torch.long)
    vocabulary_loss(states, table, torch.zeros(words), labels, (8,), tile_numbers=1 << 20)[0].backward()
run(20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run(3_000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_vocabulary_loss_memory_does_not_hold_all_logits():
    grown = subprocess.run(
        [sys.executable, "-c", MEMORY_PROGRAM], capture_output=True, check=True, text=True
    ).stdout
    all_logits = 3_000 * 20_000 * 4
    assert int(grown) * 1024 < all_logits / 4
