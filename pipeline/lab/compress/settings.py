"""Settings of `cairn compress`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cairn.pipeline.errors import ConfigError
from cairn.pipeline.options import MAX_SEED, About, check_options, option

WeightFormat = Literal["int8", "int4", "fp8"]
Rounding = Literal["gptq", "nearest"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressConfig:
    """What to take away, and the texts that say what matters least.

    None keeps all. ``heads`` and ``feed_forward`` are those of every layer.
    """

    layers: int | None = option(None, About("Layers to keep.", low=1, default_text="all"))
    heads: int | None = option(None, About("Attention heads to keep in a layer.", low=1, default_text="all"))
    feed_forward: int | None = option(
        None, About("Feed-forward neurons to keep in a layer.", low=1, default_text="all")
    )
    weights: WeightFormat | None = option(
        None, About("Format of the layers' matrices.", default_text="as they are")
    )
    rounding: Rounding = option("gptq", About("How weights are rounded; fp8: to the nearest alone."))
    group_size: int = option(64, About("Weights of a row that share a scale in int4.", low=8, high=4_096))
    calibration_texts: int = option(128, About("Texts that are read, evenly spread.", low=8, high=100_000))
    max_tokens: int = option(128, About("Tokens of a text that are read.", low=8))
    seed: int = option(0, About("Seed of everything drawn.", low=0, high=MAX_SEED))

    def __post_init__(self) -> None:
        check_options(self)
        if not self.is_pruning and self.weights is None:
            raise ConfigError(
                "compression must take something away, got no setting that does; give layers, heads, "
                "feed_forward or weights"
            )
        if self.weights == "fp8" and self.rounding == "gptq":
            raise ConfigError("weights fp8 must go with rounding nearest, got gptq; add rounding nearest")

    @property
    def is_pruning(self) -> bool:
        """Whether parts are to go."""
        return (self.layers, self.heads, self.feed_forward) != (None, None, None)
