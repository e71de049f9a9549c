from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.losses import distillation_loss


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


def test_distillation_loss_two_texts_have_no_ranking():
    student, teacher = vectors(2, 0), vectors(2, 1)
    expected = 1 - F.cosine_similarity(student, teacher).mean()
    assert float(distillation_loss(student, teacher, temperature=0.05)) == pytest.approx(
        float(expected), abs=1e-6
    )


def test_distillation_loss_teacher_gets_no_gradient():
    student, teacher = vectors(4, 0).requires_grad_(), vectors(4, 1).requires_grad_()
    distillation_loss(student, teacher, temperature=0.1).backward()
    assert student.grad is not None
    assert teacher.grad is None


@pytest.mark.parametrize("temperature", [0.0, float("nan")])
def test_distillation_loss_temperature_that_is_not_positive_is_refused(temperature: float):
    with pytest.raises(ConfigError, match="positive"):
        distillation_loss(vectors(4, 0), vectors(4, 1), temperature=temperature)
