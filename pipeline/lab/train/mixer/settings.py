"""Settings of a mixer's training; with data and base they determine every weight, on one thread.

A mixer has some hundred thousand weights and learns from vectors that are embedded once, so that its sizes
and rates are far from those of :mod:`settings`, which trains a transformer.
"""

from __future__ import annotations

from dataclasses import dataclass

from cairn.pipeline.config import ContextConfig
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.options import MAX_SEED, About, check_options, option


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerConfig:
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
    warmup_steps: int = option(100, About("Steps of the warm-up.", low=0))
    max_gradient_norm: float = option(1.0, About("Longer gradients are cut to it.", above=0))
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
    seed: int = option(0, About("Seed of everything drawn.", low=0, high=MAX_SEED))

    def __post_init__(self) -> None:
        check_options(self)
        # A list when read from cairn.toml.
        object.__setattr__(self, "rotation_dims", tuple(self.rotation_dims))

    @property
    def context(self) -> ContextConfig | None:
        """Return the context that a mixer is trained behind, as an ingest would draw it; None for none."""
        if not self.context_documents:
            return None
        return ContextConfig(
            context_documents=self.context_documents, max_document_tokens=self.max_context_tokens
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
