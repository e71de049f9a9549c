"""Settings of `cairn compress`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cairn.pipeline.errors import ConfigError
from cairn.pipeline.options import About, check_options, option

WeightFormat = Literal["int8", "int4"]


@dataclass(frozen=True, kw_only=True, slots=True)
class CompressConfig:
    """What to take away, and the texts that say what matters least; None keeps all."""

    layers: int | None = option(None, About("Layers to keep.", low=1, default_text="all"))
    weights: WeightFormat | None = option(
        None, About("Format of the layers' matrices.", default_text="as they are")
    )
    group_size: int = option(64, About("Weights of a row that share a scale in int4.", low=8, high=4_096))
    calibration_texts: int = option(128, About("Texts that are read, evenly spread.", low=8, high=100_000))
    max_tokens: int = option(128, About("Tokens of a text that are read.", low=8))

    def __post_init__(self) -> None:
        check_options(self)
        if self.layers is None and self.weights is None:
            raise ConfigError(
                "compression must take something away, got no setting that does; give layers or weights"
            )
