"""What a run computes must be finite: losses, gradients, scores, vectors."""

from __future__ import annotations

import math
from collections.abc import Mapping

from cairn.pipeline.errors import ModelError


class NotFiniteError(ModelError):
    """A run came upon NaN or infinity."""


def require_finite(numbers: Mapping[str, float]) -> None:
    """Raise :class:`NotFiniteError` that names the numbers which are NaN or infinite."""
    others = {name: value for name, value in numbers.items() if not math.isfinite(value)}
    if others:
        values = " and ".join(str(value) for value in others.values())
        raise NotFiniteError(f"{' and '.join(others)} must be finite, got {values}")
