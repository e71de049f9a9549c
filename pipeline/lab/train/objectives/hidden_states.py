"""Distillation of hidden states: a student's layers stay near those of a teacher, token by token.

    mse      mean over tokens of ‖s - t‖², divided by the teacher's mean ‖t‖² in the micro-batch
    cosine   mean over tokens of 1 - cos(s, t)

Source: NV-Embed, appendix A.2, MSE of the states of each layer. Differs: there the errors are summed over
layers and a contrastive loss is added; here layers are averaged, and texts alone are read. Each layer's error
is divided by the size of its states, which differs tenfold between layers, and layers are mapped where the
student has fewer. That size is measured in the micro-batch, so other micro-batches give a slightly other MSE.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from jaxtyping import Float, Float32


def spread_layers(num_student: int, num_teacher: int) -> tuple[int, ...]:
    """Return for each of the student's layers one of the teacher's, counted from 1, up to the last."""
    return tuple(max(1, round(layer * num_teacher / num_student)) for layer in range(1, num_student + 1))


def state_loss(
    student: Sequence[Float[torch.Tensor, "N D"]],
    teacher: Sequence[Float[torch.Tensor, "N D"]],
    kind: Literal["mse", "cosine"],
) -> Float32[torch.Tensor, ""]:
    """Return the mean over layers; the teacher gets no gradient."""
    losses: list[torch.Tensor] = []
    for own, taught in zip(student, teacher, strict=True):
        own, taught = own.float(), taught.detach().float()
        if kind == "cosine":
            losses.append(1.0 - F.cosine_similarity(own, taught, dim=1).mean())
        else:
            losses.append(F.mse_loss(own, taught) / taught.square().mean())
    return torch.stack(losses).mean()
