"""Settings of a training run; with data and base they determine every weight, bit for bit, on one thread.

Defaults follow CDE §5 (τ, peak rate, sequence dropout, linear decay) and NV-Embed §4.1.1 (negatives below 95
% of the positive); sizes are those of a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from cairn.pipeline.config import Surrogate, Tour
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.schedules import Schedule
from cairn.pipeline.model.folders.own_tensors import GATE_NAMES
from cairn.pipeline.options import MAX_SEED, About, check_options, metadata_of, option
from cairn.pipeline.poolings import POOLING_RULES, POOLINGS
from cairn.pipeline.token_vectors.codes import require_packable

TrainedPooling = Literal["mean", "lmk", "cls", "latent"]
TrainedAttention = Literal["chunk", "landmark", "full"]
LoraMatrices = Literal["attention", "all"]
ContextFrom = Literal["batch", "source"]
Negatives = Literal["batch", "own"]
TrainedPrecision = Literal["auto", "fp32", "bf16"]

MIN_INTERVAL: Final = 8
"""Fewest tokens between landmarks: those of an ingest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Settings of ``cairn train``.

    ``batch_pairs`` pairs make a batch, in sequences of up to ``sequence_documents`` neighbouring documents of
    one source; ``context_documents`` of the batch are its context, none of them in a share
    ``context_absence`` of the steps. Each is replaced by the null token with ``context_dropout``, drawn for
    every text; above 0, texts without a context read the null token, in training and when served.
    ``first_stage_layers`` > 0 gives the model a first stage of its own, which starts as the base's first
    layers and alone embeds the context; it shares the input tables where those stay as they are. Prefixes
    stand before the texts in training and, in the saved folder, at serving; None takes the base's.
    ``landmark_intervals`` are LMK's variable granularity (§5), a single one its fixed granularity.
    ``title_share`` of the sequences begin with their title as a chunk of its own. With ``attention`` full
    every document is a row by itself, without neighbours, title and context. ``negatives`` of a query are all
    other documents of the batch, or its own alone: mined ones and those that the data brings. ``margin`` is ε
    of the false negatives. ``matryoshka_dims`` = () trains the whole vector only, ``matryoshka_layers`` = ()
    the last layer only. ``freeze_embeddings`` leaves the input tables as the base has them, so that what
    changed is small enough to be shipped by itself. ``lora_rank`` > 0 leaves all of the base as it is and
    learns updates of that rank (LoRA) to its layers' matrices, those of attention or all, times
    ``lora_alpha`` / rank; None is twice the rank. A step leaves a share ``lora_dropout`` of each update's
    inputs out. ``late_weight`` > 0 trains a token projection along, of ``late_dims`` dimensions in
    ``late_bits`` bits, with weights of query tokens. With a ``teacher`` texts follow its vectors and scores,
    instead of chunks those of the base. With a ``score_teacher`` a query's positive and own negatives are
    ranked as by its scores, too. ``evaluate_every`` and ``dev_every`` steps the held-out pairs and the dev
    sets are scored. ``precision`` is that of the products, auto: bf16 where the device has it; weights, sums
    and the optimiser are in float32. ``micro_batch_tokens`` bounds memory and moves nothing but rounding.
    """

    steps: int = field(metadata=metadata_of(About("Optimiser steps, one a batch.", low=1)))
    batch_pairs: int = option(64, About("Pairs of a batch.", low=2))
    sequence_documents: int = option(4, About("Neighbouring documents that make one sequence.", low=1))
    pooling: TrainedPooling = option("lmk", About("What a chunk's vector is pooled from."))
    attention: TrainedAttention = option("landmark", About("What a token sees."))
    landmark_intervals: tuple[int, ...] = option(
        (32, 64, 128, 256),
        About("Tokens between landmarks; one is drawn for each sequence.", default_text="32,64,128,256"),
    )
    latents: int | None = option(
        None,
        About(
            "Latents of pooling latent.",
            low=1,
            high=65_536,
            default_text="as the base model has, else 512",
        ),
    )
    query_prefix: str | None = option(
        None, About("Text before every query; read, never pooled.", default_text="as the base model has it")
    )
    document_prefix: str | None = option(
        None, About("Text before every row of a document.", default_text="as the base model has it")
    )
    max_query_tokens: int = option(64, About("Tokens of a query that are read.", low=8))
    max_document_tokens: int = option(256, About("Tokens of a document that are read.", low=8))
    context_documents: int = option(64, About("Documents of the batch that are its context; 0: none.", low=0))
    context_from: ContextFrom = option(
        "batch", About("Where they are drawn: the batch's documents, or all of its source.")
    )
    max_context_tokens: int = option(64, About("Tokens of a context document that are read.", low=1))
    context_absence: float = option(0.25, About("Share of steps without a context.", low=0, high=1))
    context_dropout: float = option(
        0.005, About("Share of context vectors that give way to the null token.", low=0, high=1)
    )
    first_stage_layers: int = option(
        0,
        About(
            "Layers of a first stage of its own for the context, copied from the base; 0: none.",
            low=0,
            high=1_000,
        ),
    )
    title_share: float = option(0.5, About("Share of sequences that begin with their title.", low=0, high=1))
    class_negatives: int = option(
        7, About("Texts of other classes for each text with a label.", low=1, high=1_000)
    )
    min_score: float = option(4.0, About("Score from which on two texts are a pair.", low=-1e6, high=1e6))
    hard_negatives: int = option(0, About("Mined negatives of each query; 0: none.", low=0, high=1_000))
    hard_negative_share: float = option(
        0.95, About("Mine negatives that score below this share of the positive.", above=0, high=1)
    )
    hard_negative_margin: float = option(
        0.0, About("Mine negatives that score this far below the positive.", low=0, high=2)
    )
    negatives: Negatives = option(
        "batch", About("What a query is ranked against: the batch's documents, or its own negatives alone.")
    )
    temperature: float = option(0.02, About("Temperature of the loss.", above=0))
    margin: float = option(
        0.0,
        About(
            "Leave out negatives that the surrogate scores at least this far above the positive; inf: none, "
            "-inf: all but a query's own.",
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
    teacher: str | None = option(
        None,
        About("Model whose vectors and scores are followed, by name or folder.", default_text="the base"),
    )
    score_teacher: str | None = option(
        None,
        About(
            "Cross-encoder whose scores of a query's own candidates are followed, by name or folder.",
            default_text="none",
        ),
    )
    score_weight: float = option(1.0, About("Weight of following its scores.", above=0, high=1e6))
    distillation_weight: float = option(0.5, About("Pull towards the teacher's vectors; 0: none.", low=0))
    distillation_temperature: float = option(
        0.05, About("Temperature of its ranking of the others.", above=0)
    )
    late_weight: float = option(
        0.0, About("Weight of the loss of token vectors, trained along; 0: trains none.", low=0)
    )
    late_dims: int = option(48, About("Dimensions of a token vector.", low=1, high=4_096))
    late_bits: int = option(2, About("Bits of a dimension in a collection: 2, 4 or 8."))
    late_distillation_weight: float = option(
        0.7, About("Share of that loss that follows the base's token states.", low=0, high=1)
    )
    late_lr: float = option(1e-3, About("Learning rate of the token projection.", above=0, high=1))
    late_term_lr: float = option(1e-2, About("The same for the query tokens' weights.", above=0, high=1))
    surrogate: Surrogate = option("static", About("What clusters, filters and mines."))
    cluster_pairs: int | None = option(
        None,
        About("Pairs of a cluster, on average; batches are made of clusters.", low=1, default_text="a batch"),
    )
    cluster_iterations: int = option(20, About("Iterations of K-means.", low=1, high=10_000))
    cluster_attempts: int = option(1, About("Attempts of K-means; the best is kept.", low=1, high=100))
    tour: Tour = option("greedy", About("How clusters are packed into batches."))
    peak_lr: float = option(2e-5, About("Learning rate after the warm-up.", above=0, high=1))
    gate_lr: float = option(1e-2, About("The same for gates.", low=0, high=1))
    warmup_share: float = option(
        0.1, About("Share of the steps that warm up; the rest decays to 0.", low=0, high=1)
    )
    schedule: Schedule = option("linear", About("How the rate decays."))
    weight_decay: float = option(0.01, About("Decay of matrices.", low=0, high=1))
    max_gradient_norm: float = option(1.0, About("Longer gradients are cut to it.", above=0))
    initial_gate: float = option(
        -1.0, About("Where gates start that the base does not have.", low=-20, high=5)
    )
    freeze_embeddings: bool = option(
        False, About("Train the layers alone; what changed is then 21 MB in bf16.")
    )
    lora_rank: int = option(
        0,
        About(
            "Learn updates of this rank (LoRA) and leave the base as it is; 0: train it whole.",
            low=0,
            high=1_000,
        ),
    )
    lora_alpha: float | None = option(
        None,
        About("What updates are multiplied with, over the rank.", above=0, default_text="twice the rank"),
    )
    lora_matrices: LoraMatrices = option("all", About("Matrices of a layer that get one."))
    lora_dropout: float = option(
        0.0, About("Share of the inputs that an update leaves out, drawn for each step.", low=0, high=0.9)
    )
    heldout_pairs: int = option(256, About("Pairs kept out to find the best step.", low=0))
    evaluate_every: int = option(50, About("Steps between scores of the held-out pairs.", low=1))
    dev_every: int = option(500, About("Steps between scores of the dev sets.", low=1))
    checkpoint_every: int = option(50, About("Steps between checkpoints.", low=1))
    micro_batch_tokens: int = option(16_384, About("Tokens computed at a time: bounds memory.", low=1))
    precision: TrainedPrecision = option("auto", About("Arithmetic of products."))
    seed: int = option(0, About("Seed of everything drawn.", low=0, high=MAX_SEED))

    def __post_init__(self) -> None:
        check_options(self)
        given = self.lora_alpha is not None or self.lora_matrices != "all" or self.lora_dropout > 0
        if not self.lora_rank and given:
            raise ConfigError(
                "lora_rank must be at least 1 where lora_alpha, lora_matrices or lora_dropout is given, got "
                "0; give a rank"
            )
        if self.latents is not None and self.pooling != "latent":
            raise ConfigError(f"latents must go with pooling latent, got {self.pooling}; leave them out")
        if self.teacher is not None and not self.distillation_weight:
            raise ConfigError(
                "distillation_weight must be above 0 with a teacher, got 0; leave one of them out"
            )
        if self.first_stage_layers and not self.reads_context:
            raise ConfigError(
                "first_stage_layers must go with a context that is read (attention landmark, "
                "context_documents above 0, context_absence below 1), got settings without; leave it out"
            )
        if self.late_weight and self.attention == "full":
            raise ConfigError(
                "late_weight must go with attention chunk or landmark, got full; leave one of them out"
            )
        require_packable(self.late_dims, self.late_bits)
        # Lists when read from JSON.
        for name in ("matryoshka_dims", "matryoshka_layers", "landmark_intervals"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        self._require_rows()

    def _require_rows(self) -> None:
        if self.pooling not in POOLINGS[self.attention]:
            raise ConfigError(
                f"pooling {self.pooling} must go with attention "
                f"{' or '.join(POOLING_RULES[self.pooling].attentions)}, got {self.attention}; choose another"
            )
        if min(self.landmark_intervals, default=0) < MIN_INTERVAL:
            raise ConfigError(
                f"landmark_intervals must be at least {MIN_INTERVAL}, got {list(self.landmark_intervals)}"
            )

    @property
    def own_lrs(self) -> Mapping[str, float]:
        """Return the peak rates of parameters, by name, that have one of their own."""
        of_head = {"head.matrix": self.late_lr, "head.log_weight": self.late_term_lr}
        return dict.fromkeys(GATE_NAMES, self.gate_lr) | of_head

    @property
    def reads_context(self) -> bool:
        """Whether the model is trained to read a context."""
        return self.attention == "landmark" and self.context_documents > 0 and self.context_absence < 1.0

    @property
    def only_own_negatives(self) -> bool:
        """Whether no other document of the batch is a query's negative."""
        return self.negatives == "own" or self.margin == -math.inf


def require_within(name: str, values: Sequence[int], most: int) -> None:
    """Raise :class:`ConfigError` for widths or layers that a model lacks or that are named twice."""
    if len(set(values)) < len(values) or not all(1 <= value <= most for value in values):
        raise ConfigError(
            f"{name} must be different numbers between 1 and the base model's {most}, got {list(values)}"
        )
