"""Settings of a distillation; with texts, teacher and student they determine every weight on one thread."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.schedules import Schedule
from cairn.pipeline.lab.train.settings import TrainedPrecision
from cairn.pipeline.options import MAX_SEED, About, check_options, metadata_of, option

StateLoss = Literal["mse", "cosine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig:
    """Settings of ``cairn distill``.

    ``teacher_layers`` are the teacher's layers that the student's follow, one each; () spreads them evenly.
    ``state_weight`` = None is 1 for a teacher of the student's tokenizer, width, prefix and pooling, else 0.
    """

    steps: int = field(metadata=metadata_of(About("Optimiser steps, one a batch.", low=1)))
    batch_texts: int = option(32, About("Texts of a batch.", low=1, high=100_000))
    max_tokens: int = option(128, About("Tokens of a text that are read.", low=8, high=100_000))
    state_weight: float | None = option(
        None, About("Weight of hidden states.", low=0, default_text="1, or 0 where they do not compare")
    )
    state_loss: StateLoss = option("mse", About("Distance of hidden states."))
    vector_weight: float = option(1.0, About("Weight of the texts' vectors.", low=0))
    teacher_layers: tuple[int, ...] = option(
        (), About("Teacher's layers that the student's follow, as 2,4,6.", default_text="evenly spread")
    )
    peak_lr: float = option(1e-4, About("Learning rate after the warm-up.", above=0, high=1))
    schedule: Schedule = option("linear", About("How the rate decays."))
    warmup_share: float = option(0.1, About("Share of the steps that warm up.", low=0, high=1))
    weight_decay: float = option(0.01, About("Decay of matrices.", low=0, high=1))
    max_gradient_norm: float = option(1.0, About("Longer gradients are cut to it.", above=0))
    heldout_texts: int = option(
        64, About("Texts kept out to find the best step, at most a tenth.", low=0, high=100_000)
    )
    evaluate_every: int = option(50, About("Steps between their scores.", low=1))
    checkpoint_every: int = option(50, About("Steps between checkpoints.", low=1))
    micro_batch_tokens: int = option(16_384, About("Tokens computed at a time: bounds memory.", low=1))
    precision: TrainedPrecision = option("auto", About("Arithmetic of products."))
    seed: int = option(0, About("Seed of everything drawn.", low=0, high=MAX_SEED))

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "teacher_layers", tuple(self.teacher_layers))  # a list when read from JSON
        if not self.vector_weight and self.state_weight == 0:
            raise ConfigError(
                "state_weight or vector_weight must be above 0, got 0 for both; leave one of them out"
            )

    @property
    def own_lrs(self) -> Mapping[str, float]:
        """Return rates of single parameters: there are none."""
        return {}
