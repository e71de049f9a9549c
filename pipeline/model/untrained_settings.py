"""Encoder settings that a model was not trained for, and what they cost where it was measured.

A model's folder says what it was trained for (``folders/model_defaults.py``); a setting of this table that
differs from it makes one warning sentence in ``ingest``, ``--dry-run``, ``status`` and their JSON. Nothing is
refused: a model may gain from a setting that cost the measured one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pipeline.config import EncoderConfig
from pipeline.errors import CairnError
from pipeline.model.folders.model_defaults import base_of_folder, encoder_config
from pipeline.model.folders.names import model_folder
from pipeline.model.folders.sentence_transformers_folder import read_json_if_any

TRAINED_AT_EVERY_DEPTH: Final = frozenset({"m3bert"})
"""Model types whose first layers are trained to embed by themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLoss:
    """A setting, the value it was measured at, and nDCG@10 with it."""

    setting: str
    value: object
    ndcg: float
    is_any_value: bool = False

    def is_met_by(self, config: EncoderConfig) -> bool:
        """Whether the configuration has the setting at this value, or at any where that is enough."""
        value = getattr(config, self.setting)
        return value is not None and (self.is_any_value or value == self.value)


UNCHANGED_NDCG: Final = 0.876
MEASURED_LOSSES: Final = (
    MeasuredLoss(setting="layers", value=4, ndcg=0.581, is_any_value=True),
    MeasuredLoss(setting="use_context", value=True, ndcg=0.705),
    MeasuredLoss(setting="pooling", value="lmk", ndcg=0.791),
    MeasuredLoss(setting="temperature", value=0.8, ndcg=0.858),
    MeasuredLoss(setting="temperature", value=0.9, ndcg=0.866, is_any_value=True),
)
"""nDCG@10 of all-MiniLM-L6-v2 on 300 queries of SQuAD's passages, one setting changed at a time."""


def untrained_settings_warning(config: EncoderConfig) -> str | None:
    """Return a sentence on the settings the model was not trained for, None where there are none."""
    try:
        trained = encoder_config({"model": config.model})
        knows_depths = _knows_depths(config.model)
    except CairnError:  # the model cannot be read: whatever loads it says so
        return None
    met: dict[str, str] = {}
    for loss in MEASURED_LOSSES:
        name = loss.setting
        if getattr(config, name) == getattr(trained, name) or (name == "layers" and knows_depths):
            continue
        if loss.is_met_by(config) and name not in met:
            met[name] = f"{loss.ndcg:g} with {name} {_shown(loss.value)}"
    if not met:
        return None
    chosen = ", ".join(f"{name} {_shown(getattr(config, name))}" for name in met)
    return (
        f"{config.model} was not trained for {chosen}: nDCG@10 of all-MiniLM-L6-v2 on 300 queries of SQuAD "
        f"fell from {UNCHANGED_NDCG:g} to {', '.join(met.values())}; compare with `cairn evaluate`, or leave "
        "it out"
    )


def _knows_depths(model: str) -> bool:
    """Whether the model may embed with its first layers: m³BERT, and whole models that Cairn trained."""
    folder = model_folder(model)
    is_trained_whole = (folder / "cairn_config.json").is_file() and base_of_folder(folder) is None
    return (
        is_trained_whole
        or read_json_if_any(folder / "config.json").get("model_type") in TRAINED_AT_EVERY_DEPTH
    )


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
