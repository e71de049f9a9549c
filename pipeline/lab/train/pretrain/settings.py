"""Settings of a pretraining run; with texts and base they determine every weight, bit for bit, on one thread.

Defaults follow m³BERT §2.3 (masking, peak rate, decay, cosine schedule) and, for RetroMAE's masks, Xiao et
al. 2022, which LMK §6.3 follows; sizes are those of a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.schedules import Schedule
from cairn.pipeline.lab.train.settings import TrainedPrecision
from cairn.pipeline.options import MAX_SEED, About, check_options, metadata_of, option

PretrainObjective = Literal["mlm", "retromae"]
DrawnFor = Literal["chunk", "row"]

MASK_SHARES: Final[Mapping[PretrainObjective, float]] = {"mlm": 0.15, "retromae": 0.3}
"""m³BERT §2.3; RetroMAE's encoder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig:
    """Settings of ``cairn pretrain``.

    ``batch_rows`` rows of up to ``max_tokens`` make a batch; documents are cut where a row is full, and those
    of a row do not see one another. A landmark ends each chunk of ``landmark_intervals`` tokens, one drawn
    for each chunk or for each document's part of a row; () leaves landmarks out but the last. ``mask_share``
    = None is the objective's own. Layers and dims as in :class:`TrainConfig`: () is the last, and all. With
    ``language_smoothing`` S a row's language is drawn with p ∝ n^S, n its tokens; None takes rows as they
    are.
    """

    steps: int = field(metadata=metadata_of(About("Optimiser steps, one a batch.", low=1)))
    objective: PretrainObjective = option("mlm", About("What is learned."))
    batch_rows: int = option(32, About("Rows of a batch.", low=1))
    max_tokens: int = option(512, About("Tokens of a row.", low=8))
    landmark_intervals: tuple[int, ...] = option(
        (), About("Tokens between landmarks, as 32,64,128,256.", default_text="no landmarks")
    )
    intervals_for: DrawnFor = option("chunk", About("What one of them is drawn for."))
    mask_share: float | None = option(
        None, About("Share of tokens that are masked.", above=0, high=0.9, default_text="0.15; retromae: 0.3")
    )
    decoder_mask_share: float = option(
        0.5, About("Share of tokens that RetroMAE's decoder does not see.", low=0, high=0.99)
    )
    matryoshka_dims: tuple[int, ...] = option(
        (), About("Widths that must predict by themselves, as 32,64,128.", default_text="all dims")
    )
    matryoshka_layers: tuple[int, ...] = option(
        (), About("Depths that must, ending with the last, as 4,8,12.", default_text="the last")
    )
    distillation_weight: float = option(
        0.0, About("Pull of each depth and width towards the last and widest.", low=0)
    )
    distillation_temperature: float = option(1.0, About("Temperature of that.", above=0))
    language_smoothing: float | None = option(
        None,
        About(
            "Exponent of languages' shares: 1 leaves them, 0 makes them equal.",
            low=0,
            high=1,
            default_text="rows as they come",
        ),
    )
    peak_lr: float = option(1e-4, About("Learning rate after the warm-up.", above=0, high=1))
    warmup_share: float = option(
        0.1, About("Share of the steps that warm up; the rest decays to 0.", low=0, high=1)
    )
    schedule: Schedule = option("cosine", About("How the rate decays."))
    weight_decay: float = option(0.01, About("Decay of matrices.", low=0, high=1))
    max_gradient_norm: float = option(1.0, About("Longer gradients are cut to it.", above=0))
    heldout_rows: int = option(16, About("Rows kept out to find the best step.", low=0))
    evaluate_every: int = option(100, About("Steps between scores of the held-out rows.", low=1))
    checkpoint_every: int = option(100, About("Steps between checkpoints.", low=1))
    micro_batch_tokens: int = option(16_384, About("Tokens computed at a time: bounds memory.", low=1))
    precision: TrainedPrecision = option("auto", About("Arithmetic of products."))
    seed: int = option(0, About("Seed of everything drawn.", low=0, high=MAX_SEED))

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("matryoshka_dims", "matryoshka_layers", "landmark_intervals"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.landmark_intervals and min(self.landmark_intervals) < 1:
            raise ConfigError(f"landmark_intervals must be at least 1, got {list(self.landmark_intervals)}")

    @property
    def own_lrs(self) -> Mapping[str, float]:
        """Return no parameters: all have the peak rate."""
        return {}

    @property
    def masked(self) -> float:
        """Return the share of tokens that the encoder's rows are masked with."""
        return MASK_SHARES[self.objective] if self.mask_share is None else self.mask_share
