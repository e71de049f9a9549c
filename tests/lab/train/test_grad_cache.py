from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cairn.pipeline.lab.train.grad_cache import FirstStage, SecondStage, cached_backward, plain_backward
from cairn.pipeline.lab.train.losses import contrastive_loss
from cairn.pipeline.lab.train.processes import Processes
from torch import nn

C, M, W, D = 10, 24, 7, 5


class TwoStages(nn.Module):
    """Two small networks; the second attends to the context, some of which falls to a null token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.m1 = nn.Sequential(nn.Linear(W, 9), nn.Tanh(), nn.Linear(9, D))
        self.m2 = nn.Sequential(nn.Linear(W, 9), nn.Tanh(), nn.Linear(9, D))
        self.null = nn.Parameter(torch.randn(D))
        self.calls = 0
        self.rows: list[int] = []

    def first(self, documents: torch.Tensor) -> FirstStage:
        return lambda: self.m1(documents)

    def second(self, texts: torch.Tensor, seed: int) -> SecondStage:
        def embed(context: torch.Tensor | None) -> tuple[torch.Tensor]:
            self.calls += 1
            self.rows.append(len(texts))
            queries = self.m2(texts)
            if context is None:
                return (queries,)
            is_dropped = torch.rand(len(context), 1, generator=torch.Generator().manual_seed(seed)) < 0.3
            seen = torch.where(is_dropped, self.null, context)
            return (queries + (queries @ seen.T).softmax(1) @ seen,)

        return embed

    def micro_batches(
        self, documents_a_part: int, texts_a_part: int
    ) -> tuple[list[FirstStage], list[SecondStage]]:
        generator = torch.Generator().manual_seed(1)
        documents, texts = torch.randn(C, W, generator=generator), torch.randn(M, W, generator=generator)
        first = [self.first(part) for part in documents.split(documents_a_part)]
        second = [self.second(part, seed) for seed, part in enumerate(texts.split(texts_a_part))]
        return first, second


def loss_of(embedded: tuple[torch.Tensor, ...]) -> torch.Tensor:
    (embeddings,) = embedded
    queries, documents = nn.functional.normalize(embeddings, dim=1).split(M // 2)
    return contrastive_loss(queries, documents, torch.arange(M // 2), temperature=0.1, tile=5)


def gradients(
    backward: Callable[..., torch.Tensor], documents_a_part: int, texts_a_part: int
) -> tuple[float, dict[str, torch.Tensor]]:
    model = TwoStages()
    value = backward(*model.micro_batches(documents_a_part, texts_a_part), loss_of)
    assert not value.requires_grad
    return float(value), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize(("documents_a_part", "texts_a_part"), [(10, 24), (3, 5), (1, 1), (10, 7), (4, 24)])
def test_cached_backward_through_both_stages_equals_the_plain_gradient(
    documents_a_part: int, texts_a_part: int
):
    loss, found = gradients(cached_backward, documents_a_part, texts_a_part)
    expected_loss, expected = gradients(plain_backward, documents_a_part, texts_a_part)
    assert loss == pytest.approx(expected_loss, abs=1e-5)
    assert set(found) == set(expected) == {name for name, _ in TwoStages().named_parameters()}
    for name, gradient in expected.items():
        assert float((found[name] - gradient).abs().max()) <= 1e-5, name


@pytest.mark.parametrize(("size", "texts_a_part"), [(2, 5), (3, 7), (4, 12)])
def test_cached_backward_of_several_processes_adds_up_to_the_plain_gradient(
    in_threads: Callable[..., Any], size: int, texts_a_part: int
):
    models = [TwoStages() for _ in range(size)]  # before there are threads, which share torch's generator

    def share(processes: Processes) -> tuple[float, dict[str, torch.Tensor]]:
        model = models[processes.rank]
        value = cached_backward(*model.micro_batches(4, texts_a_part), loss_of, processes)
        processes.add_up_gradients(model.parameters())
        return float(value), {name: parameter.grad for name, parameter in model.named_parameters()}

    expected_loss, expected = gradients(plain_backward, 4, texts_a_part)
    for loss, found in in_threads(size, share):  # of two parts of texts, two of four processes have none
        assert loss == pytest.approx(expected_loss, abs=1e-5)
        for name, gradient in expected.items():
            assert float((found[name] - gradient).abs().max()) <= 1e-5, name


def test_cached_backward_without_context_leaves_the_first_stage_alone():
    model = TwoStages()
    cached_backward([], model.micro_batches(3, 5)[1], loss_of)
    assert all(parameter.grad is None for parameter in model.m1.parameters())
    assert all(parameter.grad is not None for parameter in model.m2.parameters())


def test_cached_backward_of_a_frozen_first_stage_trains_the_second():
    model = TwoStages()
    model.m1.requires_grad_(False)
    cached_backward(*model.micro_batches(3, 5), loss_of)
    assert all(parameter.grad is not None for parameter in model.m2.parameters())


def test_cached_backward_gradients_add_up_over_calls():
    model = TwoStages()
    cached_backward(*model.micro_batches(3, 5), loss_of)
    assert model.null.grad is not None
    once = model.null.grad.clone()
    cached_backward(*model.micro_batches(3, 5), loss_of)
    assert torch.allclose(model.null.grad, 2 * once, atol=1e-6)


def test_cached_backward_one_micro_batch_is_computed_once():
    model = TwoStages()
    cached_backward(*model.micro_batches(10, 24), loss_of)
    assert model.calls == 1


def test_cached_backward_several_micro_batches_are_computed_twice_each():
    model = TwoStages()
    cached_backward(*model.micro_batches(10, 6), loss_of)
    assert model.rows == [6] * 8
