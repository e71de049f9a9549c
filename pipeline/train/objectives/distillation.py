"""What training minimises beside the plain contrast: the same loss at several widths and depths, and closeness to a teacher.

Matryoshka: the first d dimensions, normalised again, must retrieve by themselves, for every d asked for; with
the vectors of several layers side by side, for every layer too. Distillation: vectors stay near those of a
teacher (cosine), and rank one another alike (KL of the softmax over the other texts), so that what the base
model could do is not lost.

Source: Kusupati et al. 2022 (Matryoshka representation learning), m³BERT §2.1 for layers; differs from neither but in weights that sum to
1. The two distillation terms are those of relational distillation, with the softmax without the text itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from jaxtyping import Float, Float32

from pipeline.errors import ConfigError


def over_widths(
    loss_of_width: Callable[[int], Float32[torch.Tensor, ""]],
    dims: Sequence[int],
    weights: Sequence[float] | None = None,
) -> Float32[torch.Tensor, ""]:
    """Return the weighted mean of a loss that is computed from the first so many dimensions.

    ``weights`` = None weighs all alike.
    """
    weights = [1.0] * len(dims) if weights is None else weights
    if len(weights) != len(dims) or not dims or min(weights) < 0 or not sum(weights) > 0:
        raise ConfigError(
            f"Matryoshka weights must be one number of at least 0 for each of the {len(dims)} dims, not "
            f"all 0, got {list(weights)}"
        )
    total = sum(weights)
    terms = [weight / total * loss_of_width(dim) for dim, weight in zip(dims, weights, strict=True) if weight]
    return torch.stack(terms).sum()


def require_dims(dims: Sequence[int], model_dim: int) -> None:
    """Raise :class:`ConfigError` for widths that a model's vectors do not have."""
    if not dims or len(set(dims)) < len(dims) or not all(1 <= dim <= model_dim for dim in dims):
        raise ConfigError(
            f"Matryoshka dims must be different numbers between 1 and the model's {model_dim}, got "
            f"{list(dims)}"
        )


def distillation_loss(
    student_MV: Float[torch.Tensor, "M V"], teacher_MV: Float[torch.Tensor, "M V"], *, temperature: float
) -> Float32[torch.Tensor, ""]:
    """Return mean (1 - cosine) plus KL(teacher ‖ student) of each text's softmax over the others; the teacher gets no gradient.

    The KL is 0 with fewer than three texts, where a softmax over the others has nothing to rank.
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
