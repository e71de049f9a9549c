"""Distillation: vectors stay near a teacher's (cosine) and rank one another as the teacher's do (KL).

Source: the two terms of relational distillation (Park et al. 2019), with the softmax over the other texts.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.errors import ConfigError
from jaxtyping import Float, Float32


def distillation_loss(
    student_MV: Float[torch.Tensor, "M V"], teacher_MV: Float[torch.Tensor, "M V"], *, temperature: float
) -> Float32[torch.Tensor, ""]:
    """Return mean (1 - cosine) plus KL(teacher ‖ student) of each text's softmax over the others.

    The teacher gets no gradient. The KL is 0 with fewer than three texts, where a softmax over the others has
    nothing to rank.
    """
    if not 0.0 < temperature < float("inf"):
        raise ConfigError(f"the temperature of distillation must be a positive number, got {temperature}")
    student = F.normalize(student_MV.float(), dim=1)
    teacher = F.normalize(teacher_MV.detach().float(), dim=1)
    distance = 1.0 - (student * teacher).sum(1).mean()
    if len(student) < 3:
        return distance
    return distance + F.kl_div(
        _ranking(student, temperature), _ranking(teacher, temperature), reduction="batchmean", log_target=True
    )


def _ranking(unit_MV: Float32[torch.Tensor, "M V"], temperature: float) -> Float32[torch.Tensor, "M others"]:
    """Return each text's log-softmax over the other texts."""
    similarity_MM = unit_MV @ unit_MV.T / temperature
    num_texts = len(unit_MV)
    is_other_MM = ~torch.eye(num_texts, dtype=torch.bool, device=unit_MV.device)
    return similarity_MM[is_other_MM].view(num_texts, num_texts - 1).log_softmax(1)
