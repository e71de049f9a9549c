"""Settings of every training; with data and base they determine every weight, bit for bit, on one thread.

    RunConfig    what the one loop reads of any run
                 TrainConfig, PretrainConfig, DistillConfig, LandmarkConfig
    ExperimentConfig    what the trainings of an experiment share

Defaults of ``cairn train`` follow CDE §5 (τ, peak rate, sequence dropout, linear decay) and NV-Embed §4.1.1
(negatives below 95 % of the positive), those of ``cairn pretrain`` m³BERT §2.3 (masking, peak rate, decay,
cosine schedule); sizes are those of a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Final, Literal

from cairn.pipeline.config import ContextConfig
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.options import MAX_SEED, About, check_options, metadata_of, option

Schedule = Literal["linear", "cosine"]
TrainedPooling = Literal["mean", "lmk", "cls", "latent"]
TrainedAttention = Literal["chunk", "full"]
ExperimentName = Literal["cde", "lmk", "m3bert", "distil", "tempscale", "nvembed"]
TrainedPrecision = Literal["auto", "fp32", "bf16"]

MIN_INTERVAL: Final = 8
"""Fewest tokens between landmarks: those of an ingest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """What the loop of steps reads of a run's settings, whatever is trained.

    ``precision`` is that of the products, auto: bf16 where the device has it; weights, sums and the optimiser
    are in float32. ``micro_batch_tokens`` bounds memory and moves nothing but rounding.
    """

    steps: int = field(metadata=metadata_of(About("Optimiser steps, one a batch.", low=1)))
    peak_lr: float = option(1e-4, About("Learning rate after the warm-up.", above=0, high=1))
    weight_decay: float = option(0.01, About("Decay of matrices.", low=0, high=1))
    schedule: Schedule = option("linear", About("How the rate decays."))
    warmup_share: float = option(0.1, About("Share of steps that warm up; the rest decays.", low=0, high=1))
    evaluate_every: int = option(50, About("Steps between held-out scores.", low=1))
    checkpoint_every: int = option(50, About("Steps between checkpoints.", low=1))
    seed: int = option(0, About("Seed of everything drawn.", low=0, high=MAX_SEED))
    micro_batch_tokens: int = option(16_384, About("Tokens computed at a time: bounds memory.", low=1))
    precision: TrainedPrecision = option("auto", About("Arithmetic of products."))

    def __post_init__(self) -> None:
        check_options(self)
        for item in fields(self):
            if isinstance(value := getattr(self, item.name), list):  # as read from JSON or cairn.toml
                object.__setattr__(self, item.name, tuple(value))

    def lr_factor(self, step: int) -> float:
        """Return the share of the peak rate that step 0 … steps - 1 is made with.

        It rises to 1 while warming up, then falls to almost 0, along a line or half a cosine.
        """
        num_warming = round(self.warmup_share * self.steps)
        if step < num_warming:
            return (step + 1) / num_warming
        left = (self.steps - step) / max(1, self.steps - num_warming)
        return left if self.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(RunConfig):
    """Settings of ``cairn train``.

    Every step with a context draws how many vectors it has, so that any number up to ``context_documents``
    may be served. A context document is replaced by the null token with ``context_dropout``, drawn for every
    row; above 0, rows without a context read the null token, in training and when served. A first stage of
    its own shares the input tables where those stay as they are. Prefixes stand before the texts in training
    and, in the saved folder, at serving. ``landmark_intervals`` are LMK's variable granularity (§5), a single
    one its fixed granularity. With ``attention`` full a document is a row, with chunk each of its chunks.
    ``margin`` is ε of the false negatives. Chunks follow the vectors of the base by ``distillation_weight``:
    those of whole rows where it pools as is trained, else those of each chunk alone.
    """

    batch_pairs: int = option(64, About("Pairs of a batch.", low=2))
    batches: Literal["clustered", "mixed"] = option(
        "clustered", About("What a batch is of: a cluster of one source, or pairs of all, as drawn.")
    )
    sequence_documents: int = option(
        4, About("Neighbouring documents of one title that stay together in a batch.", low=1)
    )
    pooling: TrainedPooling = option("lmk", About("What a chunk's vector is pooled from."))
    attention: TrainedAttention = option("full", About("What a token sees: its chunk, or its window."))
    landmark_intervals: tuple[int, ...] = option(
        (32, 64, 128, 256),
        About("Tokens between landmarks; one is drawn for neighbours.", default_text="32,64,128,256"),
    )
    latents: int | None = option(
        None,
        About("Latents of pooling latent.", low=1, high=65_536, default_text="as the base has, else 512"),
    )
    query_prefix: str | None = option(
        None, About("Text before every query; read, never pooled.", default_text="as the base model has it")
    )
    document_prefix: str | None = option(
        None, About("Text before every row of a document.", default_text="as the base model has it")
    )
    max_query_tokens: int = option(64, About("Tokens of a query that are read.", low=8))
    max_document_tokens: int = option(256, About("Tokens of a document that are read.", low=8))
    context_documents: int = option(32, About("Most documents of a batch's context; 0: none.", low=0))
    context_from: Literal["batch", "source"] = option(
        "batch", About("Where they are drawn: the batch's documents, or all of its source.")
    )
    max_context_tokens: int = option(64, About("Tokens of a context document that are read.", low=1))
    context_absence: float = option(0.25, About("Share of steps without a context.", low=0, high=1))
    context_dropout: float = option(0.005, About("Share of context vectors that are dropped.", low=0, high=1))
    first_stage_layers: int = option(
        0, About("Layers of a first stage of its own, copied from the base; 0: none.", low=0, high=1_000)
    )
    title_share: float = option(0.5, About("Share of units whose rows begin with a title.", low=0, high=1))
    title_tokens: int = option(16, About("Tokens of a title that are read, also when served.", low=1))
    hard_negatives: int = option(0, About("Mined negatives of each query; 0: none.", low=0, high=1_000))
    hard_negative_share: float = option(
        0.95, About("Mine negatives that score below this share of the positive.", above=0, high=1)
    )
    negatives: Literal["batch", "own"] = option(
        "batch", About("What a query is ranked against: the batch's documents, or its own negatives alone.")
    )
    temperature: float = option(0.02, About("Temperature of the loss.", above=0))
    margin: float = option(
        0.0,
        About(
            "Leave out negatives that the base scores at least this far above the positive; inf: none.",
            low=-2,
            high=2,
            is_infinity_allowed=True,
        ),
    )
    matryoshka_dims: tuple[int, ...] = option(
        (), About("Widths that must retrieve by themselves, as 64,128,384.", default_text="all dims")
    )
    matryoshka_layers: tuple[int, ...] = option(
        (), About("Depths that must, ending with the last, as 3,6.", default_text="the last")
    )
    distillation_weight: float = option(0.5, About("Pull towards the base's vectors; 0: none.", low=0))
    peak_lr: float = option(2e-5, About("Learning rate after the warm-up.", above=0, high=1))
    freeze_embeddings: bool = option(False, About("Train the layers alone: 21 MB of changes in bf16."))
    heldout_pairs: int = option(256, About("Pairs kept out to find the best step.", low=0))
    dev_every: int = option(500, About("Steps between scores of the dev sets.", low=1))

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        if self.latents is not None and self.pooling != "latent":
            raise ConfigError(f"latents must go with pooling latent, got {self.pooling}; leave them out")
        if self.first_stage_layers and not self.reads_context:
            raise ConfigError(
                "first_stage_layers must go with a context that is read (context_documents above 0, "
                "context_absence below 1), got settings without; leave it out"
            )
        if min(self.landmark_intervals, default=0) < MIN_INTERVAL:
            raise ConfigError(
                f"landmark_intervals must be at least {MIN_INTERVAL}, got {list(self.landmark_intervals)}"
            )

    @property
    def reads_context(self) -> bool:
        """Whether the model is trained to read a context."""
        return self.context_documents > 0 and self.context_absence < 1.0

    @property
    def context(self) -> ContextConfig | None:
        """Return the context that the model is trained behind, None for none."""
        if not self.reads_context:
            return None
        return ContextConfig(
            context_documents=self.context_documents, max_document_tokens=self.max_context_tokens
        )


def require_exits(layers: Sequence[int], dims: Sequence[int], num_layers: int, width: int) -> None:
    """Raise :class:`ConfigError` for Matryoshka's layers or widths that a model lacks or that come twice."""
    for name, values, most in (("dims", dims, width), ("layers", layers, num_layers)):
        if len(set(values)) < len(values) or not all(1 <= value <= most for value in values):
            raise ConfigError(
                f"matryoshka_{name} must be different numbers between 1 and the base model's {most}, got "
                f"{list(values)}"
            )
    if layers and layers[-1] != num_layers:
        raise ConfigError(
            f"matryoshka_layers must end with the model's last layer {num_layers}, got {list(layers)}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig(RunConfig):
    """Settings of ``cairn pretrain``; documents are cut where a row is full, and see no other of their row.

    With ``language_smoothing`` S a row's language is drawn with p ∝ n^S, n its tokens.
    """

    batch_rows: int = option(32, About("Rows of a batch.", low=1))
    max_tokens: int = option(512, About("Tokens of a row.", low=8))
    landmark_intervals: tuple[int, ...] = option(
        (), About("Tokens between landmarks, drawn for each chunk.", default_text="no landmarks")
    )
    mask_share: float = option(0.15, About("Share of tokens that are masked.", above=0, high=0.9))
    matryoshka_dims: tuple[int, ...] = option(
        (), About("Widths that must predict by themselves, as 32,64,128.", default_text="all dims")
    )
    matryoshka_layers: tuple[int, ...] = option(
        (), About("Depths that must, ending with the last, as 4,8,12.", default_text="the last")
    )
    distillation_weight: float = option(0.0, About("Pull of every exit towards the last one.", low=0))
    language_smoothing: float | None = option(
        None,
        About(
            "Exponent of languages' shares: 1 as they are, 0 equal.",
            low=0,
            high=1,
            default_text="rows as they come",
        ),
    )
    schedule: Schedule = option("cosine", About("How the rate decays."))
    heldout_rows: int = option(16, About("Rows kept out to find the best step.", low=0))
    evaluate_every: int = option(100, About("Steps between scores of the held-out rows.", low=1))
    checkpoint_every: int = option(100, About("Steps between checkpoints.", low=1))

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        object.__setattr__(self, "matryoshka_dims", tuple(sorted(self.matryoshka_dims)))
        if self.landmark_intervals and min(self.landmark_intervals) < 1:
            raise ConfigError(f"landmark_intervals must be at least 1, got {list(self.landmark_intervals)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig(RunConfig):
    """Settings of ``cairn distill``.

    ``state_weight`` = None is 1 for a teacher of the student's tokenizer, width, prefix and pooling, else 0.
    """

    batch_texts: int = option(32, About("Texts of a batch.", low=1, high=100_000))
    max_tokens: int = option(128, About("Tokens of a text that are read.", low=8, high=100_000))
    state_weight: float | None = option(
        None, About("Weight of hidden states.", low=0, default_text="1, or 0 where they do not compare")
    )
    heldout_texts: int = option(64, About("Texts kept out for scores, at most a tenth.", low=0, high=100_000))


@dataclass(frozen=True, kw_only=True, slots=True)
class LandmarkConfig(RunConfig):
    """Settings of ``cairn train-landmarks``.

    A batch has ``batch_windows`` windows of up to ``window_tokens`` tokens, special ones and title included,
    each with one of ``landmark_intervals``. A share ``title_share`` of those whose document has a title
    begins with its first ``title_tokens``. ``token_weight`` is k of the loss
    (:mod:`cairn.pipeline.lab.train.landmark_distillation`). With ``document_context`` every step draws how
    many landmarks are read, up to so many.
    """

    peak_lr: float = option(3e-4, About("Learning rate after the warm-up.", above=0, high=1))
    batch_windows: int = option(8, About("Windows of a batch.", low=1, high=100_000))
    window_tokens: int = option(512, About("Tokens of a window, at most.", low=16, high=100_000))
    landmark_intervals: tuple[int, ...] = option(
        (32, 64, 128),
        About("Tokens between landmarks; one is drawn for each window.", default_text="32,64,128"),
    )
    title_share: float = option(0.75, About("Share of windows that begin with their title.", low=0, high=1))
    title_tokens: int = option(32, About("Tokens of a title that are read.", low=1, high=1_000))
    token_weight: float = option(0.3, About("Weight of the tokens' own states.", low=0))
    document_context: int = option(
        0,
        About(
            "Landmarks of a document's first window that its others read as input vectors, at most.",
            low=0,
            high=1_000,
        ),
    )
    context_absence: float = option(0.25, About("Share of such windows that read none.", low=0, high=1))
    heldout_windows: int = option(
        64, About("Windows kept out to find the best step, at most a tenth.", low=0, high=100_000)
    )

    @property
    def served_interval(self) -> int:
        """Return the middle interval, which the saved model is served with."""
        return sorted(self.landmark_intervals)[len(self.landmark_intervals) // 2]

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        shortest, longest = min(self.landmark_intervals, default=0), max(self.landmark_intervals, default=0)
        if shortest < MIN_INTERVAL or longest + self.title_tokens + 3 > self.window_tokens:
            raise ConfigError(
                f"landmark_intervals must be at least {MIN_INTERVAL} and fit window_tokens "
                f"{self.window_tokens} beside a title of {self.title_tokens} tokens, got "
                f"{list(self.landmark_intervals)}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ExperimentConfig:
    """Settings of ``cairn experiment``; every variant is trained with them, with each of ``seeds``."""

    seeds: int = option(3, About("Trainings of each variant, with seeds from 0.", low=1, high=100))
    steps: int = option(60, About("Steps of a training.", low=1))
    batch_pairs: int = option(64, About("Pairs of a batch.", low=2))
    layers: int = option(2, About("First layers of all-MiniLM-L6-v2 that are trained.", low=2, high=6))
    max_document_tokens: int = option(64, About("Tokens of a document that are read in training.", low=8))
    context_documents: int = option(16, About("Most documents of a context.", low=1))
    lengths: tuple[int, ...] = option(
        (256, 1024, 4096), About("Tokens of the texts asked for.", default_text="256,1024,4096")
    )
    max_queries: int = option(200, About("Queries drawn of each judged set.", low=1))
    max_documents: int = option(400, About("Documents drawn of each, judged ones first.", low=1))

    def __post_init__(self) -> None:
        check_options(self)
        object.__setattr__(self, "lengths", tuple(sorted(self.lengths)))
