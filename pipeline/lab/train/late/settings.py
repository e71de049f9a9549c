"""Settings of a token projection's training; with data and base they determine every weight."""

from __future__ import annotations

from dataclasses import dataclass

from cairn.pipeline.options import MAX_SEED, About, check_options, option
from cairn.pipeline.token_vectors.codes import require_packable


@dataclass(frozen=True, kw_only=True, slots=True)
class LateConfig:
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
    term_lr: float = option(1e-2, About("Learning rate of the query tokens' weights.", above=0, high=1))
    warmup_steps: int = option(40, About("Steps of the warm-up.", low=0))
    hold_out: float = option(0.05, About("Share of the batches that finds the best step.", low=0, high=0.5))
    evaluate_every: int = option(100, About("Steps between held-out scores.", low=1))
    seed: int = option(0, About("Seed of everything drawn.", low=0, high=MAX_SEED))

    def __post_init__(self) -> None:
        check_options(self)
        require_packable(self.dims, self.bits)
