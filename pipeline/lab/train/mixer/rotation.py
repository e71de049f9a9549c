"""The rotation behind the mixing: an orthogonal matrix whose first columns say most.

A rotation changes no cosine between whole vectors, so it costs nothing where they are kept whole, and can
only help where they are cut. It begins with the principal directions of the base model's vectors, not
centred, because cosines are not. Then it is trained alone, on the vectors the trained mixer makes: cut to few
dimensions they rank passages as whole (KL), and find answers by themselves (InfoNCE).

Steps stay on the orthogonal matrices by the Cayley transform of a skew-symmetric one, so no step has to be
taken back.

Source: Kusupati et al. 2022 (Matryoshka representation learning) for the loss at several widths; differs:
only the rotation learns it, so that the whole vectors are those of a mixer trained without it.

    N vectors    Q queries    M passages    D width
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.lab.train.mixer.losses import Judgements, first_dims, passage_loss, ranking_loss
from jaxtyping import Float32
from torch import nn
from torch.nn.utils import parametrizations

RotationBatch = tuple[torch.Tensor, torch.Tensor, Judgements]
"""Queries ``Q D`` and passages ``M D`` in one space, both unit vectors, and what answers what."""


def train_rotation(
    rotation_DD: Float32[torch.Tensor, "D D"],
    draw: Callable[[int], RotationBatch],
    *,
    steps: int,
    dims: Sequence[int],
    lr: float,
    temperature: float,
    ranking_temperature: float,
    on_step: Callable[[int, float], None] | None = None,
) -> Float32[torch.Tensor, "D D"]:
    """Return an orthogonal matrix, trained from ``rotation_DD``, whose first ``dims`` columns rank like all.

    ``draw(step)`` gives vectors before the rotation. ``on_step`` hears each step's loss; one that is not
    finite raises :class:`ModelError`.
    """
    layer = nn.Linear(*rotation_DD.shape, bias=False)
    with torch.no_grad():
        layer.weight.copy_(rotation_DD)
    parametrizations.orthogonal(layer, orthogonal_map="cayley")
    optimizer = torch.optim.Adam(layer.parameters(), lr=lr)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * step / steps))
        query_QD, passage_MD, judged = draw(step)
        loss = _loss_of_cut(
            query_QD,
            passage_MD,
            judged,
            layer.weight,
            dims=dims,
            temperature=temperature,
            ranking_temperature=ranking_temperature,
        )
        if not math.isfinite(loss.item()):
            raise ModelError(
                f"the rotation's loss must be finite, got {loss.item()} in step {step + 1}; lower rotation_lr"
            )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if on_step is not None:
            on_step(step, loss.item())
    # What rounding has added over the steps goes: the nearest orthogonal matrix.
    left_DD, _, right_DD = torch.linalg.svd(layer.weight.detach().double())
    return (left_DD @ right_DD).float()


def _loss_of_cut(
    query_QD: Float32[torch.Tensor, "Q D"],
    passage_MD: Float32[torch.Tensor, "M D"],
    judged: Judgements,
    rotation_DD: Float32[torch.Tensor, "D D"],
    *,
    dims: Sequence[int],
    temperature: float,
    ranking_temperature: float,
) -> Float32[torch.Tensor, ""]:
    whole_QM = query_QD @ passage_MD.T
    rotated_Qd, rotated_Md = query_QD @ rotation_DD[:, : max(dims)], passage_MD @ rotation_DD[:, : max(dims)]
    terms: list[torch.Tensor] = []
    for dim in dims:
        cut_QM = first_dims(rotated_Qd, dim) @ first_dims(rotated_Md, dim).T
        terms += [
            ranking_loss(cut_QM, whole_QM, ranking_temperature),
            passage_loss(cut_QM, judged, temperature),
        ]
    return torch.stack(terms).mean()
