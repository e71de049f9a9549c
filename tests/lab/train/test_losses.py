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
    SelfDistillation,
    candidate_ranking_loss,
    contrastive_loss,
    distillation_loss,
    plain_contrastive_loss,
    spread_layers,
    state_loss,
    vocabulary_loss,
)

Q, N, V, S = 37, 53, 16, 6


def unit(rows: int, width: int, seed: int) -> torch.Tensor:
    return F.normalize(torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)), dim=1)


def loss_of(*arguments: object, **settings: object) -> float:
    return float(contrastive_loss(*arguments, **settings).detach())


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    positive = torch.randperm(N, generator=torch.Generator().manual_seed(2))[:Q]
    return unit(Q, V, 0).requires_grad_(), unit(N, V, 1).requires_grad_(), positive


def false_negatives(margin: float = 0.0) -> FalseNegatives:
    numbers = torch.arange(N)
    numbers[::7] = 0  # some texts stand in the batch several times
    return FalseNegatives(
        query_QS=unit(Q, S, 3), document_NS=unit(N, S, 4), text_number_N=numbers, margin=margin
    )


def naive_loss(
    query: torch.Tensor,
    document: torch.Tensor,
    positive: torch.Tensor,
    said: FalseNegatives | None,
    temperature: float,
) -> float:
    """Equation 4 as it is written, in Python floats."""
    total = 0.0
    for q in range(len(query)):
        own = int(positive[q])
        kept = []
        for d in range(len(document)):
            if d != own and said is not None:
                score, least = (
                    float(said.query_QS[q] @ said.document_NS[d]),
                    float(said.query_QS[q] @ said.document_NS[own]) + said.margin,
                )
                if score >= least or said.text_number_N[d] == said.text_number_N[own]:
                    continue
            kept.append(float(query[q] @ document[d]) / temperature)
        total += (
            math.log(sum(math.exp(logit) for logit in kept)) - float(query[q] @ document[own]) / temperature
        )
    return total / len(query)


@pytest.mark.parametrize("said", [None, false_negatives(), false_negatives(-0.3), false_negatives(0.2)])
def test_both_losses_equal_the_equation_written_out(said: FalseNegatives | None):
    query, document, positive = batch()
    expected = naive_loss(query.detach(), document.detach(), positive, said, 0.05)
    assert float(
        plain_contrastive_loss(query, document, positive, said, temperature=0.05).detach()
    ) == pytest.approx(expected, abs=1e-5)
    assert loss_of(query, document, positive, said, temperature=0.05, tile=8) == pytest.approx(
        expected, abs=1e-5
    )


@pytest.mark.parametrize("tile", [1, 7, 16, 37, 53, 1_024])
@pytest.mark.parametrize("said", [None, false_negatives(), false_negatives(-0.3)])
def test_contrastive_loss_in_tiles_equals_the_plain_loss_and_gradient(tile: int, said: FalseNegatives | None):
    query, document, positive = batch()
    plain = plain_contrastive_loss(query, document, positive, said)
    expected = torch.autograd.grad(3.0 * plain, (query, document))
    tiled = contrastive_loss(query, document, positive, said, tile=tile)
    found = torch.autograd.grad(3.0 * tiled, (query, document))
    assert float((tiled - plain).detach().abs()) <= 1e-5
    for tensor, reference in zip(found, expected, strict=True):
        assert float((tensor - reference).abs().max()) <= 1e-5 * max(1.0, float(reference.abs().max()))


def test_contrastive_loss_left_out_documents_get_no_gradient():
    query, document, positive = batch()
    everything = FalseNegatives(
        query_QS=torch.ones(Q, 1), document_NS=torch.ones(N, 1), text_number_N=torch.arange(N), margin=0.0
    )
    loss = contrastive_loss(query, document, positive, everything)
    assert float(loss.detach().abs()) <= 1e-6
    assert float(torch.autograd.grad(loss, document)[0].abs().max()) <= 1e-5


def test_contrastive_loss_infinite_margin_leaves_out_equal_texts_only():
    query, document, positive = batch()
    said = false_negatives(float("inf"))
    apart = FalseNegatives(
        query_QS=said.query_QS,
        document_NS=said.document_NS,
        text_number_N=torch.arange(N),
        margin=float("inf"),
    )
    plain = float(plain_contrastive_loss(query, document, positive).detach())
    assert loss_of(query, document, positive, apart) == pytest.approx(plain, abs=1e-5)
    assert loss_of(query, document, positive, said) < plain - 1e-3


def test_contrastive_loss_without_in_batch_negatives_keeps_those_chosen_for_the_query():
    query, document, positive = batch()
    own = torch.stack([(positive + 1) % N, (positive + 5) % N], dim=1)
    own[::3, 1] = -1
    said = FalseNegatives(
        query_QS=unit(Q, S, 3),
        document_NS=unit(N, S, 4),
        text_number_N=torch.arange(N),
        margin=-math.inf,
        own_Qk=own,
    )
    total = torch.zeros(())
    for q in range(Q):  # NV-Embed §3.3: the positive against the query's own negatives
        places = [int(positive[q]), *(place for place in own[q].tolist() if place >= 0)]
        total = total - torch.log_softmax(document[places] @ query[q] / 0.05, 0)[0]
    expected = torch.autograd.grad(total / Q, (query, document))
    loss = contrastive_loss(query, document, positive, said, temperature=0.05, tile=8)
    assert float(loss.detach()) == pytest.approx(float(total.detach()) / Q, abs=1e-5)
    for found, gradient in zip(torch.autograd.grad(loss, (query, document)), expected, strict=True):
        assert float((found - gradient).abs().max()) <= 1e-5


def test_contrastive_loss_bf16_vectors_are_summed_in_float32():
    query, document, positive = batch()
    rounded = query.detach().bfloat16().requires_grad_()
    loss = contrastive_loss(rounded, document.bfloat16(), positive)
    expected = plain_contrastive_loss(rounded.float(), document.bfloat16().float(), positive)
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    assert torch.autograd.grad(loss, rounded)[0].dtype == torch.bfloat16


def test_contrastive_loss_memory_does_not_grow_with_the_batch_squared():
    """8,192 x 8,192 logits are 256 MiB, and their gradient as much again; in tiles they need some MiB."""
    program = (
        "import torch, resource\n"
        "from cairn.pipeline.lab.train.losses import contrastive_loss\n"
        "torch.set_num_threads(1); x = torch.nn.functional.normalize(torch.randn(8_192, 8), "
        "dim=1).requires_grad_()\n"
        "warm = contrastive_loss(x[:64], x[:64], torch.arange(64)).backward()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "contrastive_loss(x, x, torch.arange(len(x))).backward()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    grown_kib = int(
        subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout
    )
    assert grown_kib < 128 * 1_024


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


def test_distillation_loss_of_the_teacher_itself_is_zero_at_any_length():
    teacher = vectors(5, 0)
    assert float(distillation_loss(3.0 * teacher, teacher, temperature=0.05)) == pytest.approx(0.0, abs=1e-5)


GENERATOR = torch.Generator().manual_seed(0)
QUERIES, DOCUMENTS = torch.randn(3, 8, generator=GENERATOR), torch.randn(6, 8, generator=GENERATOR)
NAN = math.nan
PLACES = torch.tensor([[0, 3, 4], [1, 5, -1], [2, -1, -1]])
LOGITS = torch.tensor([[4.0, 1.0, -2.0], [0.5, 3.0, NAN], [9.0, NAN, NAN]])


def ranking_written_out(queries: torch.Tensor, temperature: float) -> torch.Tensor:
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
    expected = ranking_written_out(other, 0.3)
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


def test_state_loss_equals_the_naive_mean():
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 2, 5, 8, generator=generator)
    naive = [
        ((own - taught) ** 2).sum() / (taught**2).sum() for own, taught in zip(student, teacher, strict=True)
    ]
    assert float(state_loss(list(student), list(teacher), "mse")) == pytest.approx(float(sum(naive)) / 2)
    own, taught = student[0], teacher[0]
    cosines = (own * taught).sum(1) / own.norm(dim=1) / taught.norm(dim=1)
    assert float(state_loss([own], [taught], "cosine")) == pytest.approx(float(1 - cosines.mean()))


def test_layers_are_spread_up_to_the_last():
    assert spread_layers(3, 6) == (2, 4, 6)
    assert spread_layers(4, 6) == (2, 3, 4, 6)
    assert spread_layers(6, 6) == (1, 2, 3, 4, 5, 6)


LAYERS, TOKENS, DIM, WORDS, WIDTHS = 3, 11, 12, 29, (2, 5, 12)


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
    expected = vocabulary_written_out(*vocabulary_inputs()[:3], vocabulary_inputs()[3], distillation)
    plain, tiled = vocabulary_inputs(), vocabulary_inputs()
    (3.0 * vocabulary_written_out(*plain, distillation)).backward()
    total, sums = vocabulary_loss(*tiled, WIDTHS, distillation=distillation, tile_numbers=tile_numbers)
    (3.0 * total).backward()
    assert torch.allclose(total, expected, rtol=1e-5)
    for ours, theirs in zip(tiled[:3], plain[:3], strict=True):
        assert ours.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)
    assert sums.shape == (LAYERS, len(WIDTHS))
    if distillation is None:
        assert torch.allclose(sums.sum(), expected, rtol=1e-5)


def test_vocabulary_loss_dimensions_beyond_the_widest_get_no_gradient():
    states, table, bias, labels = vocabulary_inputs()
    vocabulary_loss(states, table, bias, labels, (2, 5))[0].backward()
    assert states.grad is not None
    assert table.grad is not None
    assert not states.grad[..., 5:].any()
    assert not table.grad[:, 5:].any()
    assert states.grad[..., :5].all()


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
