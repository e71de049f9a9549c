"""Settings of a training run; with data and base they determine every weight, bit for bit, on one thread.

Defaults follow CDE §5 (τ, peak rate, sequence dropout, linear decay) and NV-Embed §4.1.1 (negatives below 95
% of the positive); sizes are those of a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pipeline.cluster.packing import Tour
from pipeline.config import Precision, require_kinds
from pipeline.errors import ConfigError

TrainedPooling = Literal["mean", "lmk"]
TrainedAttention = Literal["chunk", "landmark"]
TrainSurrogate = Literal["static", "encoder"]
LoraMatrices = Literal["attention", "all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Settings of ``cairn train``.

    ``batch_pairs`` pairs make a batch, in sequences of up to ``sequence_documents`` neighbouring documents of
    one source; ``context_documents`` of the batch are its context, None of them in a share
    ``context_absence`` of the steps, each replaced by the null token with ``context_dropout``.
    ``title_share`` of the sequences begin with their title as a chunk of its own. ``margin`` is ε of the
    false negatives. ``matryoshka_dims`` = () trains the whole vector only, ``matryoshka_layers`` = () the
    last layer only. ``freeze_embeddings`` leaves the input tables as the base has them, so that what changed
    is small enough to be shipped by itself. ``lora_rank`` > 0 leaves all of the base as it is and learns
    updates of that rank (LoRA) to its layers' matrices, those of attention or all, times ``lora_alpha`` /
    rank; None is twice the rank. ``evaluate_every`` and ``dev_every`` steps the held-out pairs and the dev
    sets are scored. ``precision`` is that of the products, auto: bf16 where the device has it; weights, sums
    and the optimiser are in float32. ``micro_batch_tokens`` bounds memory and moves nothing but rounding.
    """

    steps: int
    batch_pairs: int = 64
    sequence_documents: int = 4
    pooling: TrainedPooling = "lmk"
    attention: TrainedAttention = "landmark"
    max_query_tokens: int = 64
    max_document_tokens: int = 256
    context_documents: int = 64
    max_context_tokens: int = 64
    context_absence: float = 0.25
    context_dropout: float = 0.005
    title_share: float = 0.5
    hard_negatives: int = 0
    hard_negative_share: float = 0.95
    temperature: float = 0.02
    margin: float = 0.0
    matryoshka_dims: tuple[int, ...] = ()
    matryoshka_layers: tuple[int, ...] = ()
    distillation_weight: float = 0.5
    distillation_temperature: float = 0.05
    surrogate: TrainSurrogate = "static"
    tour: Tour = "greedy"
    peak_lr: float = 2e-5
    gate_lr: float = 1e-2
    warmup_share: float = 0.1
    weight_decay: float = 0.01
    max_gradient_norm: float = 1.0
    initial_gate: float = -1.0
    freeze_embeddings: bool = False
    lora_rank: int = 0
    lora_alpha: float | None = None
    lora_matrices: LoraMatrices = "all"
    heldout_pairs: int = 256
    evaluate_every: int = 50
    dev_every: int = 500
    checkpoint_every: int = 50
    micro_batch_tokens: int = 16_384
    precision: Precision = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        require_kinds(self)
        for name in (
            "steps",
            "sequence_documents",
            "max_context_tokens",
            "evaluate_every",
            "dev_every",
            "checkpoint_every",
            "micro_batch_tokens",
        ):
            _require(getattr(self, name) >= 1, name, "be at least 1", getattr(self, name))
        for name in ("context_documents", "hard_negatives", "heldout_pairs", "lora_rank", "seed"):
            _require(getattr(self, name) >= 0, name, "be at least 0", getattr(self, name))
        for name in ("max_query_tokens", "max_document_tokens"):
            _require(getattr(self, name) >= 8, name, "be at least 8 tokens", getattr(self, name))
        for name in ("context_absence", "context_dropout", "title_share", "warmup_share"):
            _require(0.0 <= getattr(self, name) <= 1.0, name, "lie between 0 and 1", getattr(self, name))
        for name in ("temperature", "distillation_temperature", "peak_lr", "max_gradient_norm"):
            _require(
                0.0 < getattr(self, name) < float("inf"), name, "be a positive number", getattr(self, name)
            )
        for name in ("distillation_weight", "gate_lr", "weight_decay"):
            _require(
                0.0 <= getattr(self, name) < float("inf"),
                name,
                "be a number of at least 0",
                getattr(self, name),
            )
        _require(
            self.batch_pairs >= 2,
            "batch_pairs",
            "be at least 2, as a pair's negatives are the others",
            self.batch_pairs,
        )
        _require(
            0.0 < self.hard_negative_share <= 1.0,
            "hard_negative_share",
            "lie between 0 and 1",
            self.hard_negative_share,
        )
        _require(not math.isnan(self.margin), "margin", "be a number", self.margin)
        _require(
            -20.0 <= self.initial_gate <= 5.0, "initial_gate", "lie between -20 and 5", self.initial_gate
        )
        _require(
            self.lora_alpha is None or 0.0 < self.lora_alpha < math.inf,
            "lora_alpha",
            "be a positive number",
            self.lora_alpha,
        )
        _require(
            self.lora_rank > 0 or (self.lora_alpha is None and self.lora_matrices == "all"),
            "lora_rank",
            "be at least 1 where lora_alpha or lora_matrices is given",
            self.lora_rank,
        )
        for name, choices in (
            ("pooling", get_args(TrainedPooling)),
            ("attention", get_args(TrainedAttention)),
            ("surrogate", get_args(TrainSurrogate)),
            ("tour", get_args(Tour)),
            ("lora_matrices", get_args(LoraMatrices)),
            ("precision", get_args(Precision)),
        ):
            _require(
                getattr(self, name) in choices, name, f"be one of {', '.join(choices)}", getattr(self, name)
            )
        # Lists when read from JSON.
        for name in ("matryoshka_dims", "matryoshka_layers"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def reads_context(self) -> bool:
        """Whether the model is trained to read a context."""
        return self.attention == "landmark" and self.context_documents > 0 and self.context_absence < 1.0


def _require(holds: bool, name: str, contract: str, value: object) -> None:
    if not holds:
        raise ConfigError(f"{name} must {contract}, got {value}")


def require_within(name: str, values: Sequence[int], most: int) -> None:
    """Raise :class:`ConfigError` for widths or layers that a model lacks or that are named twice."""
    if len(set(values)) < len(values) or not all(1 <= value <= most for value in values):
        raise ConfigError(
            f"{name} must be different numbers between 1 and the base model's {most}, got {list(values)}"
        )
