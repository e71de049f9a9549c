"""Encoder settings that a model was not trained for, and what they cost where it was measured.

A model's folder says what it was trained for (``folders/model_defaults.py``); a setting of this table that
differs from it makes one warning sentence in ``ingest``, ``--dry-run``, ``status`` and their JSON. Nothing is
refused: a model may gain from a setting that cost the measured one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cairn.pipeline.config import BASE_MODEL, DEFAULT_MODEL, WINDOW_TOKENS, ContextConfig, EncoderConfig
from cairn.pipeline.errors import CairnError
from cairn.pipeline.model.folders.model_defaults import base_of_folder, context_defaults, encoder_config
from cairn.pipeline.model.folders.names import MODEL_NAMES, model_folder
from cairn.pipeline.model.folders.sentence_transformers_folder import read_json_if_any

TRAINED_AT_EVERY_DEPTH: Final = frozenset({"m3bert"})
"""Model types whose first layers are trained to embed by themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLoss:
    """A setting, the value it was measured at, and nDCG@10 without it and with it.

    ``is_any_value``: other values of the setting are warned of too, ``is_any_smaller``: smaller values are;
    figures are this value's alone.
    """

    setting: str
    value: object
    before: float
    after: float
    is_any_value: bool = False
    is_any_smaller: bool = False

    def is_met_by(self, config: EncoderConfig) -> bool:
        """Whether the configuration has the setting, and it cost something."""
        value = getattr(config, self.setting)
        if value is None or self.after >= self.before:
            return False
        return (
            self.is_any_value
            or value == self.value
            or (self.is_any_smaller and isinstance(self.value, int) and value < self.value)
        )


MEASURED_LOSSES: Final = (
    MeasuredLoss(setting="layers", value=4, before=0.819, after=0.474, is_any_value=True),
    MeasuredLoss(setting="pooling", value="lmk", before=0.819, after=0.628),
    MeasuredLoss(setting="attention", value="full", before=0.819, after=0.811),
    MeasuredLoss(setting="attention", value="landmark", before=0.819, after=0.820),
    MeasuredLoss(setting="use_context", value=True, before=0.819, after=0.547),
    MeasuredLoss(setting="dims", value=64, before=0.819, after=0.686, is_any_smaller=True),
    MeasuredLoss(setting="landmark_interval", value=32, before=0.819, after=0.815),
    MeasuredLoss(setting="temperature", value=0.8, before=0.819, after=0.803),
    MeasuredLoss(setting="temperature", value=0.9, before=0.819, after=0.810, is_any_value=True),
)
"""nDCG@10 of all-MiniLM-L6-v2 on 300 queries of SQuAD over 907 passages, one setting changed at a time.

They are cairn/fused of ``cairn evaluate squad_passages --model all-MiniLM-L6-v2
--max-queries 300 SETTING``: commit 24143ff, 2026-11-22, and for dims, interval, context and temperature
236a6f7, 2026-11-23. The context had 64 documents. Landmark attention cost nothing, so it warns of nothing.
"""


def untrained_settings_warning(config: EncoderConfig) -> str | None:
    """Return a sentence on the settings the model was not trained for, None where there are none."""
    try:
        trained = encoder_config({"model": config.model})
        knows_depths = _knows_depths(config.model)
    except CairnError:  # the model cannot be read: whatever loads it says so
        return None
    met: dict[str, str | None] = {}
    for loss in MEASURED_LOSSES:
        name = loss.setting
        if getattr(config, name) == getattr(trained, name) or (name == "layers" and knows_depths):
            continue
        if name == "dims" and config.model not in MODEL_NAMES:  # others may have been trained for few
            continue
        if loss.is_met_by(config) and met.get(name) is None:
            is_measured = getattr(config, name) == loss.value
            met[name] = (
                f"{loss.before:.3f} to {loss.after:.3f} with {name} {_shown(loss.value)}"
                if is_measured
                else None
            )
    if not met:
        return None
    chosen = ", ".join(f"{name} {_shown(getattr(config, name))}" for name in met)
    measured = ", ".join(figures for figures in met.values() if figures)
    loss_sentence = "what it costs was not measured"
    if measured and config.model in (BASE_MODEL, DEFAULT_MODEL):
        loss_sentence = f"nDCG@10 of {BASE_MODEL} on 300 queries of SQuAD fell from {measured}"
        if config.model != BASE_MODEL:
            loss_sentence = f"what it costs was not measured for it; of its base model, {loss_sentence}"
    return (
        f"{config.model} was not trained for {chosen}: {loss_sentence}; compare with `cairn evaluate`, or "
        "leave it out"
    )


def window_warning(config: EncoderConfig) -> str | None:
    """Return a sentence on a window that has no effect, None where it has one or none was chosen."""
    default = WINDOW_TOKENS["chunk"]
    is_needed = config.longest_chunk_tokens + 2 > default  # [CLS] and the landmark
    if config.attention != "chunk" or config.window_tokens == default or is_needed:
        return None
    return (
        "window_tokens has no effect with attention chunk, whose rows are chunks; leave it out, or choose "
        "attention full or landmark"
    )


def context_warning(config: EncoderConfig, context: ContextConfig) -> str | None:
    """Return a sentence on a context larger than the model's folder says it was trained with, else None."""
    try:
        trained = context_defaults(config.model) if config.use_context else {}
    except CairnError:  # whatever loads the model says so
        return None
    larger = {name: most for name, most in trained.items() if getattr(context, name) > most}
    if not larger:
        return None
    chosen = ", ".join(f"{name} {getattr(context, name)}" for name in larger)
    most = ", ".join(map(str, larger.values()))
    return (
        f"{config.model} was not trained for {chosen}, but for {most}: what it costs was not measured; "
        "compare with `cairn evaluate`, or leave it out"
    )


def settings_warnings(config: EncoderConfig, context: ContextConfig) -> tuple[str, ...]:
    """Return a sentence on each thing to know about the settings of an encoder and its context."""
    found = (untrained_settings_warning(config), window_warning(config), context_warning(config, context))
    return tuple(each for each in found if each)


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
