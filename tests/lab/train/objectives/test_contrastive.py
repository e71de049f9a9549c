from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.losses import (
    FalseNegatives,
    contrastive_loss,
    plain_contrastive_loss,
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


def test_contrastive_loss_several_queries_of_one_positive_sum_their_gradients():
    query, document, _ = batch()
    positive = torch.zeros(Q, dtype=torch.int64)
    expected = torch.autograd.grad(plain_contrastive_loss(query, document, positive), document)[0]
    found = torch.autograd.grad(contrastive_loss(query, document, positive, tile=9), document)[0]
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


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


def test_contrastive_loss_permuted_documents_give_the_same_loss():
    query, document, positive = batch()
    order = torch.randperm(N, generator=torch.Generator().manual_seed(9))
    moved = torch.argsort(order)[positive]
    one = loss_of(query, document, positive, tile=8)
    assert loss_of(query, document[order], moved, tile=8) == pytest.approx(one, abs=1e-5)


def test_contrastive_loss_of_one_document_is_zero():
    query, document, _ = batch()
    assert loss_of(query[:1], document[:1], torch.zeros(1, dtype=torch.int64)) == pytest.approx(0.0, abs=1e-5)


def test_contrastive_loss_bf16_vectors_are_summed_in_float32():
    query, document, positive = batch()
    rounded = query.detach().bfloat16().requires_grad_()
    loss = contrastive_loss(rounded, document.bfloat16(), positive)
    expected = plain_contrastive_loss(rounded.float(), document.bfloat16().float(), positive)
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    assert torch.autograd.grad(loss, rounded)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_contrastive_loss_temperature_that_is_not_positive_is_refused(temperature: float):
    query, document, positive = batch()
    with pytest.raises(ConfigError, match="positive number"):
        contrastive_loss(query, document, positive, temperature=temperature)


def test_contrastive_loss_tile_of_nothing_is_refused():
    query, document, positive = batch()
    with pytest.raises(ConfigError, match="at least one"):
        contrastive_loss(query, document, positive, tile=0)


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
