"""Settings of a mixer's training; with data and base they determine every weight, on one thread.

A mixer has some hundred thousand weights and learns from vectors that are embedded once, so that its sizes
and rates are far from those of :mod:`settings`, which trains a transformer.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config import require_kinds
from pipeline.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerConfig:
    """Settings of ``cairn train-mixer``.

    At most ``max_pairs`` of a source are used, None: all; one with fewer than ``min_pairs`` is left out.
    ``hold_out`` is the share of each source that finds the best step. A batch has ``batch_queries`` queries
    and a few more; ``grouped_share`` of the batches have long sequences of neighbouring documents, the others
    each document by itself. ``title_absence`` of the sequences show no title, ``context_absence`` of the
    batches no context; the others see 32 to ``context_documents`` documents, 0: never any. ``rotation_steps``
    train the rotation behind the mixing, so that the first ``rotation_dims`` dimensions rank like all; () is
    a third and a sixth of the width.
    """

    steps: int = 1_000
    num_heads: int = 2
    head_dim: int = 32
    batch_queries: int = 96
    grouped_share: float = 0.6
    title_absence: float = 0.3
    context_documents: int = 256
    context_absence: float = 0.25
    temperature: float = 0.03
    distillation_weight: float = 1.0
    distillation_temperature: float = 0.05
    peak_lr: float = 2e-3
    weight_decay: float = 0.05
    warmup_steps: int = 100
    max_gradient_norm: float = 1.0
    rotation_steps: int = 300
    rotation_lr: float = 1e-3
    rotation_dims: tuple[int, ...] = ()
    max_pairs: int | None = None
    min_pairs: int = 48
    hold_out: float = 0.02
    evaluate_every: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        require_kinds(self)
        for name in ("steps", "num_heads", "head_dim", "min_pairs", "evaluate_every"):
            _require(getattr(self, name) >= 1, name, "be at least 1", getattr(self, name))
        for name in ("context_documents", "warmup_steps", "rotation_steps", "seed"):
            _require(getattr(self, name) >= 0, name, "be at least 0", getattr(self, name))
        for name in ("grouped_share", "title_absence", "context_absence"):
            _require(0.0 <= getattr(self, name) <= 1.0, name, "lie between 0 and 1", getattr(self, name))
        for name in (
            "temperature",
            "distillation_temperature",
            "peak_lr",
            "rotation_lr",
            "max_gradient_norm",
        ):
            _require(
                0.0 < getattr(self, name) < float("inf"), name, "be a positive number", getattr(self, name)
            )
        for name in ("distillation_weight", "weight_decay"):
            _require(
                0.0 <= getattr(self, name) < float("inf"),
                name,
                "be a number of at least 0",
                getattr(self, name),
            )
        _require(
            self.batch_queries >= 2,
            "batch_queries",
            "be at least 2, as a query's negatives are the others'",
            self.batch_queries,
        )
        _require(self.max_pairs is None or self.max_pairs >= 1, "max_pairs", "be at least 1", self.max_pairs)
        _require(0.0 <= self.hold_out <= 0.5, "hold_out", "lie between 0 and 0.5", self.hold_out)
        # A list when read from cairn.toml.
        object.__setattr__(self, "rotation_dims", tuple(self.rotation_dims))

    def dims_of(self, width: int) -> tuple[int, ...]:
        """Return the dimensions that are to rank like all ``width``, widest first.

        Raise :class:`ConfigError` for some there are not.
        """
        dims = self.rotation_dims or tuple(dim for dim in (width // 3, width // 6) if dim)
        if len(set(dims)) < len(dims) or not all(1 <= dim < width for dim in dims):
            raise ConfigError(
                f"rotation_dims must be different numbers below the base model's {width}, got {list(dims)}"
            )
        return tuple(sorted(dims, reverse=True))


def _require(holds: bool, name: str, contract: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"{name} must {contract}, got {value}")
