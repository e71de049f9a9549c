"""Settings of every training; with data and base they determine every weight, bit for bit, on one thread.

    RunConfig            what the one loop reads of any run
    EncoderRunConfig     runs that change a transformer     TrainConfig, PretrainConfig, DistillConfig
    VectorRunConfig      runs beside a frozen base          MixerConfig, LateConfig

Defaults of ``cairn train`` follow CDE §5 (τ, peak rate, sequence dropout, linear decay) and NV-Embed §4.1.1
(negatives below 95 % of the positive), those of ``cairn pretrain`` m³BERT §2.3 (masking, peak rate, decay,
cosine schedule) and Xiao et al. 2022 for RetroMAE's masks; sizes are those of a CPU. A mixer and a token
projection have some hundred thousand weights and learn from vectors that are embedded once, so that their
sizes and rates are far from those of a transformer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar, Final, Literal

from cairn.pipeline.config import ContextConfig, Surrogate, Tour
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.model.folders.own_tensors import GATE_NAMES
from cairn.pipeline.options import MAX_SEED, About, check_options, metadata_of, option
from cairn.pipeline.poolings import POOLING_RULES, POOLINGS
from cairn.pipeline.token_vectors.codes import require_packable
from typing_extensions import override

Schedule = Literal["linear", "cosine"]
TrainedPooling = Literal["mean", "lmk", "cls", "latent"]
TrainedAttention = Literal["chunk", "landmark", "full"]
LoraMatrices = Literal["attention", "all"]
ContextFrom = Literal["batch", "source"]
Negatives = Literal["batch", "own"]
TrainedPrecision = Literal["auto", "fp32", "bf16"]

MIN_INTERVAL: Final = 8
"""Fewest tokens between landmarks: those of an ingest."""

LOWEST_LR: Final = 0.05
"""Share of the peak rate that the last steps beside a frozen base are made with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(ABC):
    """What the loop of steps reads of a run's settings, whatever is trained."""

    betas: ClassVar[tuple[float, float]] = (0.9, 0.999)
    """Of AdamW."""

    steps: int = field(metadata=metadata_of(About("Optimiser steps, one a batch.", low=1)))
    peak_lr: float = option(1e-4, About("Learning rate after the warm-up.", above=0, high=1))
    weight_decay: float = option(0.01, About("Decay of matrices.", low=0, high=1))
    max_gradient_norm: float = option(
        1.0, About("Longer gradients are cut to it.", above=0, is_infinity_allowed=True)
    )
    evaluate_every: int = option(50, About("Steps between held-out scores.", low=1))
    checkpoint_every: int = option(50, About("Steps between checkpoints.", low=1))
    seed: int = option(0, About("Seed of everything drawn.", low=0, high=MAX_SEED))

    def __post_init__(self) -> None:
        check_options(self)
        for item in fields(self):
            if isinstance(value := getattr(self, item.name), list):  # as read from JSON or cairn.toml
                object.__setattr__(self, item.name, tuple(value))

    @property
    def own_lrs(self) -> Mapping[str, float]:
        """Return the peak rates of parameters, by name, that have one of their own and no decay."""
        return {}

    @abstractmethod
    def lr_factor(self, step: int) -> float:
        """Return the share of the peak rate that step 0 … steps - 1 is made with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderRunConfig(RunConfig):
    """Settings of a run that changes a transformer.

    ``precision`` is that of the products, auto: bf16 where the device has it; weights, sums and the optimiser
    are in float32. ``micro_batch_tokens`` bounds memory and moves nothing but rounding.
    """

    schedule: Schedule = option("linear", About("How the rate decays."))
    warmup_share: float = option(
        0.1, About("Share of the steps that warm up; the rest decays to 0.", low=0, high=1)
    )
    micro_batch_tokens: int = option(16_384, About("Tokens computed at a time: bounds memory.", low=1))
    precision: TrainedPrecision = option("auto", About("Arithmetic of products."))

    @override
    def lr_factor(self, step: int) -> float:
        """Rise to 1 while warming up, then fall to almost 0, along a line or half a cosine."""
        num_warming = round(self.warmup_share * self.steps)
        if step < num_warming:
            return (step + 1) / num_warming
        left = (self.steps - step) / max(1, self.steps - num_warming)
        return left if self.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))


@dataclass(frozen=True, kw_only=True, slots=True)
class VectorRunConfig(RunConfig):
    """Settings of a run on vectors of a base that stays as it is."""

    betas: ClassVar[tuple[float, float]] = (0.9, 0.98)

    warmup_steps: int = option(100, About("Steps of the warm-up.", low=0))
    checkpoint_every: int = option(100, About(low=1))

    @override
    def lr_factor(self, step: int) -> float:
        """Return a linear warm-up times a cosine to LOWEST_LR."""
        made = step + 1
        cosine = LOWEST_LR + (1 - LOWEST_LR) * 0.5 * (1 + math.cos(math.pi * made / self.steps))
        return min(1.0, made / max(1, self.warmup_steps)) * cosine


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig(EncoderRunConfig):
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
    sets are scored.
    """

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
    dev_every: int = option(500, About("Steps between scores of the dev sets.", low=1))

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
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
    @override
    def own_lrs(self) -> Mapping[str, float]:
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


PretrainObjective = Literal["mlm", "retromae"]
DrawnFor = Literal["chunk", "row"]

MASK_SHARES: Final[Mapping[PretrainObjective, float]] = {"mlm": 0.15, "retromae": 0.3}
"""m³BERT §2.3; RetroMAE's encoder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig(EncoderRunConfig):
    """Settings of ``cairn pretrain``.

    ``batch_rows`` rows of up to ``max_tokens`` make a batch; documents are cut where a row is full, and those
    of a row do not see one another. A landmark ends each chunk of ``landmark_intervals`` tokens, one drawn
    for each chunk or for each document's part of a row; () leaves landmarks out but the last. ``mask_share``
    = None is the objective's own. Layers and dims as in :class:`TrainConfig`: () is the last, and all. With
    ``language_smoothing`` S a row's language is drawn with p ∝ n^S, n its tokens; None takes rows as they
    are.
    """

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
    schedule: Schedule = option("cosine", About("How the rate decays."))
    heldout_rows: int = option(16, About("Rows kept out to find the best step.", low=0))
    evaluate_every: int = option(100, About("Steps between scores of the held-out rows.", low=1))
    checkpoint_every: int = option(100, About("Steps between checkpoints.", low=1))

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        object.__setattr__(self, "matryoshka_dims", tuple(sorted(self.matryoshka_dims)))
        if self.landmark_intervals and min(self.landmark_intervals) < 1:
            raise ConfigError(f"landmark_intervals must be at least 1, got {list(self.landmark_intervals)}")

    @property
    def masked(self) -> float:
        """Return the share of tokens that the encoder's rows are masked with."""
        return MASK_SHARES[self.objective] if self.mask_share is None else self.mask_share


StateLoss = Literal["mse", "cosine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DistillConfig(EncoderRunConfig):
    """Settings of ``cairn distill``.

    ``teacher_layers`` are the teacher's layers that the student's follow, one each; () spreads them evenly.
    ``state_weight`` = None is 1 for a teacher of the student's tokenizer, width, prefix and pooling, else 0.
    """

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
    heldout_texts: int = option(
        64, About("Texts kept out to find the best step, at most a tenth.", low=0, high=100_000)
    )

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        if not self.vector_weight and self.state_weight == 0:
            raise ConfigError(
                "state_weight or vector_weight must be above 0, got 0 for both; leave one of them out"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerConfig(VectorRunConfig):
    """Settings of ``cairn train-mixer``.

    At most ``max_pairs`` of a source are used, None: all; one with fewer than ``min_pairs`` is left out.
    ``hold_out`` is the share of each source that finds the best step. A batch has ``batch_queries`` queries
    and a few more; ``grouped_share`` of the batches have long sequences of neighbouring documents, the others
    each document by itself. ``title_absence`` of the sequences show no title, ``context_absence`` of the
    batches no context; the others see ``context_documents`` of their source, all of a smaller one, 0: never
    any. ``max_context_tokens`` of such a document are read, as in an ingest. ``rotation_steps``
    train the rotation behind the mixing, so that the first ``rotation_dims`` dimensions rank like all; () is
    a third and a sixth of the width.
    """

    steps: int = option(1_000, About("Steps of the mixing, one a batch.", low=1))
    num_heads: int = option(2, About("Heads of each attention.", low=1, high=64))
    head_dim: int = option(32, About("Dimensions of a head.", low=1, high=1_024))
    batch_queries: int = option(96, About("Queries of a batch, about.", low=2))
    grouped_share: float = option(
        0.6, About("Share of batches with long sequences of neighbours.", low=0, high=1)
    )
    title_absence: float = option(0.3, About("Share of sequences that show no title.", low=0, high=1))
    context_documents: int = option(
        512, About("Documents of a source that are its context; 0: none.", low=0, high=65_536)
    )
    max_context_tokens: int = option(256, About("Tokens of a context document that are read.", low=3))
    context_absence: float = option(0.25, About("Share of batches without a context.", low=0, high=1))
    temperature: float = option(0.03, About("Temperature of the loss.", above=0))
    distillation_weight: float = option(1.0, About("Pull towards the base model's own ranking.", low=0))
    distillation_temperature: float = option(0.05, About("Temperature of that ranking.", above=0))
    peak_lr: float = option(2e-3, About("Learning rate after the warm-up.", above=0, high=1))
    weight_decay: float = option(0.05, About("Decay of matrices.", low=0, high=1))
    rotation_steps: int = option(
        300, About("Steps of the rotation, after the mixing; 0: principal directions.", low=0)
    )
    rotation_lr: float = option(1e-3, About("Learning rate of the rotation.", above=0, high=1))
    rotation_dims: tuple[int, ...] = option(
        (), About("First dimensions that must rank like all.", default_text="a third and a sixth")
    )
    max_pairs: int | None = option(
        None,
        About("Use at most so many pairs of a source, whole pages at a time.", low=1, default_text="all"),
    )
    min_pairs: int = option(48, About("Leave smaller sources out.", low=1))
    hold_out: float = option(0.02, About("Share of each source that finds the best step.", low=0, high=0.5))
    evaluate_every: int = option(200, About("Steps between held-out scores.", low=1))

    @property
    def context(self) -> ContextConfig | None:
        """Return the context that a mixer is trained behind, as an ingest would draw it; None for none."""
        if not self.context_documents:
            return None
        return ContextConfig(
            context_documents=self.context_documents, max_document_tokens=self.max_context_tokens
        )

    @property
    def of_rotation(self) -> EncoderRunConfig:
        """Return the settings of the rotation's steps."""
        return EncoderRunConfig(
            steps=self.rotation_steps,
            peak_lr=self.rotation_lr,
            schedule="cosine",
            warmup_share=0.0,
            weight_decay=0.0,
            max_gradient_norm=math.inf,
            evaluate_every=self.rotation_steps,
            checkpoint_every=self.checkpoint_every,
            seed=self.seed,
        )

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


@dataclass(frozen=True, kw_only=True, slots=True)
class LateConfig(VectorRunConfig):
    """Settings of ``cairn train-late``.

    ``max_batches`` batches of ``batch_queries`` neighbouring pairs of one source are embedded and passed
    through as often as the steps ask for; ``hold_out`` of them find the best step. Documents are read as they
    are served: their first ``document_tokens`` in rows of ``row_tokens``, neighbours pooled by
    ``pool_tokens``. Each query sees the documents of its batch and ``mined_negatives`` more of its source.
    ``distillation_weight`` of the loss is the KL divergence to the MaxSim of whole token states.
    """

    steps: int = option(800, About("Steps, one a batch.", low=1))
    dims: int = option(48, About("Dimensions of a token vector.", low=1, high=4_096))
    pool_tokens: int = option(1, About("Neighbouring tokens that become one vector.", low=1))
    bits: int = option(2, About("Bits of a dimension in a collection: 2, 4 or 8."))
    batch_queries: int = option(24, About("Queries of a batch, neighbours in their source.", low=2))
    max_batches: int = option(500, About("Use at most so many batches.", low=2))
    mined_negatives: int = option(
        1, About("Hard negatives of each query beside its batch.", low=0, high=1_000)
    )
    query_tokens: int = option(48, About("Read so many tokens of a query.", low=1))
    document_tokens: int = option(128, About("Read so many tokens of a document.", low=1))
    row_tokens: int = option(
        64, About("Encode so many tokens together, as the landmark interval will.", low=1)
    )
    distillation_weight: float = option(
        0.7, About("Share of the loss that follows whole token states.", low=0, high=1)
    )
    temperature: float = option(0.02, About("Temperature of the contrast.", above=0))
    distillation_temperature: float = option(0.02, About("Temperature of the rankings compared.", above=0))
    peak_lr: float = option(1e-3, About("Learning rate of the projection.", above=0, high=1))
    weight_decay: float = option(0.0, About(low=0))
    max_gradient_norm: float = option(math.inf, About(above=0, is_infinity_allowed=True))
    term_lr: float = option(1e-2, About("Learning rate of the query tokens' weights.", above=0, high=1))
    warmup_steps: int = option(40, About("Steps of the warm-up.", low=0))
    hold_out: float = option(0.05, About("Share of the batches that finds the best step.", low=0, high=0.5))
    evaluate_every: int = option(100, About("Steps between held-out scores.", low=1))

    def __post_init__(self) -> None:
        RunConfig.__post_init__(self)
        require_packable(self.dims, self.bits)

    @property
    @override
    def own_lrs(self) -> Mapping[str, float]:
        return {"matrix": self.peak_lr, "log_weight": self.term_lr}


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryWriterConfig:
    """Who writes queries for ``--documents``; the key is read from ``CAIRN_QUERY_WRITER_KEY``."""

    query_writer: str | None = option(
        None,
        About(
            "Address of an OpenAI-compatible server whose model writes the queries of --documents.",
            default_text="none: queries are cut from the documents",
        ),
    )
    query_writer_model: str | None = option(None, About("Name of that model.", default_text="none"))
    query_writer_timeout_seconds: float = option(
        60.0, About("Wait so long for an answer.", above=0, high=3_600)
    )

    def __post_init__(self) -> None:
        check_options(self)
        if (self.query_writer is None) != (self.query_writer_model is None):
            raise ConfigError(
                "query_writer and query_writer_model must be given together, got one alone; give both"
            )
