"""Losses against the equations written out, in tiles and whole."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.lab.train.losses import (
    FalseNegatives,
    contrastive_loss,
    distillation_loss,
    spread_layers,
    state_loss,
    vocabulary_loss,
)

Q, N, V, S = 37, 53, 16, 6


def unit(rows: int, width: int, seed: int) -> torch.Tensor:
    return F.normalize(torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)), dim=1)


def plain_contrastive_loss(
    query: torch.Tensor,
    document: torch.Tensor,
    positive: torch.Tensor,
    said: FalseNegatives | None = None,
    *,
    temperature: float = 0.02,
) -> torch.Tensor:
    """Equation 4 from one matrix of all logits."""
    logits = query @ document.T / temperature
    if said is not None:
        scores = said.query_QS @ said.document_NS.T
        own = torch.arange(Q), positive
        same = said.text_number_N == said.text_number_N[positive][:, None]
        out = scores >= scores[own][:, None] + said.margin
        if said.own_Qk is not None:
            out &= ~(torch.arange(N) == said.own_Qk[..., None]).any(1)
        out |= same
        out[own] = False
        logits = logits.masked_fill(out, -torch.inf)
    return F.cross_entropy(logits, positive)


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    positive = torch.randperm(N, generator=torch.Generator().manual_seed(2))[:Q]
    return unit(Q, V, 0).requires_grad_(), unit(N, V, 1).requires_grad_(), positive


def false_negatives(margin: float = 0.0) -> FalseNegatives:
    """Return those of a margin; at minus infinity queries keep two negatives of their own, or one."""
    numbers = torch.arange(N)
    numbers[::7] = 0  # some texts stand in the batch several times
    own_Qk = torch.stack([(torch.arange(Q) + 1) % N, (torch.arange(Q) + 5) % N], dim=1)
    own_Qk[::3, 1] = -1
    return FalseNegatives(
        query_QS=unit(Q, S, 3),
        document_NS=unit(N, S, 4),
        text_number_N=numbers,
        margin=margin,
        own_Qk=own_Qk if margin == -math.inf else None,
    )


@pytest.mark.parametrize("tile", [7, 16, 37, 53, 1_024])
@pytest.mark.parametrize("said", [None, *map(false_negatives, (0.0, -0.3, 0.2, math.inf, -math.inf))])
@pytest.mark.parametrize("temperature", [0.02, 0.05])
def test_contrastive_loss_in_tiles_equals_the_plain_loss_and_gradient(tile, said, temperature):
    query, document, positive = batch()
    plain = plain_contrastive_loss(query, document, positive, said, temperature=temperature)
    expected = torch.autograd.grad(3.0 * plain, (query, document))
    tiled = contrastive_loss(query, document, positive, said, temperature=temperature, tile=tile)
    found = torch.autograd.grad(3.0 * tiled, (query, document))
    assert float((tiled - plain).detach().abs()) <= 1e-5
    for tensor, reference in zip(found, expected, strict=True):
        assert float((tensor - reference).abs().max()) <= 1e-5 * max(1.0, float(reference.abs().max()))
    rounded = query.detach().bfloat16().requires_grad_()  # sums are in float32
    loss = contrastive_loss(rounded, document.bfloat16(), positive, said, temperature=temperature)
    plain = plain_contrastive_loss(
        rounded.float(), document.bfloat16().float(), positive, said, temperature=temperature
    )
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), abs=1e-5)
    assert torch.autograd.grad(loss, rounded)[0].dtype == torch.bfloat16


def vectors(rows: int, seed: int, width: int = 12) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def naive_distillation(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> float:
    """Cosine and KL, text by text."""
    student, teacher = F.normalize(student, dim=1), F.normalize(teacher, dim=1)
    total = 0.0
    for row in range(len(student)):
        total += 1 - float(student[row] @ teacher[row])
        others = [other for other in range(len(student)) if other != row]
        weights = []
        for side in (teacher, student):
            raised = [math.exp(float(side[row] @ side[other]) / temperature) for other in others]
            weights.append([weight / sum(raised) for weight in raised])
        total += sum(wanted * math.log(wanted / got) for wanted, got in zip(*weights, strict=True))
    return total / len(student)


def test_distillation_loss_equals_cosine_and_kl_written_out():
    student, teacher = vectors(7, 0), vectors(7, 1)
    assert float(distillation_loss(student, teacher, temperature=0.3)) == pytest.approx(
        naive_distillation(student, teacher, 0.3), abs=1e-5
    )


def test_state_loss_equals_the_naive_mean():
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 2, 5, 8, generator=generator)
    naive = [
        ((own - taught) ** 2).sum() / (taught**2).sum() for own, taught in zip(student, teacher, strict=True)
    ]
    assert float(state_loss(list(student), list(teacher))) == pytest.approx(float(sum(naive)) / 2)


def test_layers_are_spread_up_to_the_last():
    assert spread_layers(3, 6) == (2, 4, 6)
    assert spread_layers(4, 6) == (2, 3, 4, 6)
    assert spread_layers(6, 6) == (1, 2, 3, 4, 5, 6)


LAYERS, TOKENS, DIM, WORDS, WIDTHS = 3, 11, 13, 29, (2, 5, 12)  # the last dimension predicts nothing


def vocabulary_inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(LAYERS, TOKENS, DIM, generator=generator).requires_grad_()
    table = torch.randn(WORDS, DIM, generator=generator).requires_grad_()
    bias = torch.randn(WORDS, generator=generator).requires_grad_()
    return states, table, bias, torch.randint(WORDS, (TOKENS,), generator=generator)


def vocabulary_written_out(
    states: torch.Tensor,
    table: torch.Tensor,
    bias: torch.Tensor,
    labels: torch.Tensor,
    weight: float = 0.0,
) -> torch.Tensor:
    """m³BERT's L_total, and its eq. 2 and 3, with one matrix of logits for each layer and width."""
    logits = {
        (layer, width): states[layer, :, :width] @ table[:, :width].T + bias
        for layer in range(LAYERS)
        for width in WIDTHS
    }
    total = torch.stack([F.cross_entropy(z, labels, reduction="sum") for z in logits.values()]).sum()
    if not weight:
        return total
    teacher = logits[LAYERS - 1, WIDTHS[-1]].detach().softmax(1)
    for exit_, z in logits.items():
        if exit_ != (LAYERS - 1, WIDTHS[-1]):
            student = z.softmax(1)
            total = total + weight * (student * (student / teacher).log()).sum()
    return total


@pytest.mark.parametrize("weight", [0.0, 0.7])
@pytest.mark.parametrize("tile_numbers", [1, 3 * WORDS * 5, 1 << 20])
def test_vocabulary_loss_in_tiles_equals_the_loss_and_gradient_written_out(tile_numbers, weight):
    plain, tiled = vocabulary_inputs(), vocabulary_inputs()
    expected = vocabulary_written_out(*plain, weight)
    (3.0 * expected).backward()
    total, sums = vocabulary_loss(*tiled, WIDTHS, distillation_weight=weight, tile_numbers=tile_numbers)
    (3.0 * total).backward()
    assert torch.allclose(total, expected, rtol=1e-5)
    for ours, theirs in zip(tiled[:3], plain[:3], strict=True):
        assert ours.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    assert sums.shape == (LAYERS, len(WIDTHS))
    if not weight:
        assert torch.allclose(sums.sum(), expected, rtol=1e-5)


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


@pytest.mark.slow
def test_vocabulary_loss_memory_does_not_hold_all_logits():
    grown = subprocess.run(
        [sys.executable, "-c", MEMORY_PROGRAM], capture_output=True, check=True, text=True
    ).stdout
    all_logits = 3_000 * 20_000 * 4
    assert int(grown) * 1024 < all_logits / 4
