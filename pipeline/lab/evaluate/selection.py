"""The systems that an evaluation scores, from the encoder settings that were chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cairn.pipeline.config import DEFAULT_MODEL, EncoderConfig
from cairn.pipeline.encode.encoder_fit import require_fit
from cairn.pipeline.errors import CairnError
from cairn.pipeline.lab.evaluate.systems import (
    System,
    baseline_systems,
    configured_systems,
    our_systems,
    select_systems,
)
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.folders.model_defaults import base_of_folder, encoder_config
from cairn.pipeline.model.folders.names import model_folder

_SHARED_OPTIONS: Final = ("precision", "backend")
_MODEL_OPTIONS: Final = (
    "model",
    "dims",
    "layers",
    "causal",
    "query_prefix",
    "document_prefix",
    "pool_prefix",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The systems to score, and why others, by name, were left out."""

    systems: Sequence[System]
    left_out: Mapping[str, str]


def baseline_config(chosen: Mapping[str, Any], baseline_model: str | None) -> EncoderConfig:
    """Return the settings of the baselines: their model's own, without Cairn's chunks and pooling.

    Without ``baseline_model`` it is the model the evaluated one was trained on, else that model itself.
    """
    base = base_of_folder(model_folder(chosen.get("model", DEFAULT_MODEL)))
    model = baseline_model or (base.model if base else None)
    kept = _SHARED_OPTIONS if baseline_model else (*_SHARED_OPTIONS, *_MODEL_OPTIONS)
    options = {name: chosen[name] for name in kept if name in chosen}
    return encoder_config({**options, **({"model": model} if model else {})})


def choose_systems(
    base: EncoderConfig, baseline: EncoderConfig, patterns: Sequence[str], *, is_whole_table: bool
) -> Selection:
    """Return the systems whose names match a pattern, without those the models have no room or head for.

    ``is_whole_table`` adds every encoder, with no, random and corpus context, ranked in every way.
    """
    backbones = {config.model: load_backbone(config) for config in (base, baseline)}
    own, left_out = backbones[base.model], dict[str, str]()
    ours = our_systems(base, max_positions=own.max_positions) if is_whole_table else []
    ours = _servable(ours, backbones, left_out)
    known = {system.encoding for system in ours}
    require_fit(base, own)
    ours += [system for system in configured_systems(base) if system.encoding not in known]
    tokenizer = backbones[baseline.model].tokenizer
    prefix_tokens = max(
        len(tokenizer.encode(prefix, add_special_tokens=False).ids)
        for prefix in (baseline.query_prefix, baseline.document_prefix)
    )
    baselines = baseline_systems(baseline, backbones[baseline.model].max_positions, prefix_tokens)
    systems = [*_servable(baselines, backbones, left_out), *ours]
    return Selection(systems=select_systems(systems, patterns), left_out=left_out)


def _servable(
    systems: Sequence[System], backbones: Mapping[str, Backbone], left_out: dict[str, str]
) -> list[System]:
    """Return the systems that fit their model; the reason of each other one is added to ``left_out``."""
    for system in systems:
        config = system.encoding.encoder
        try:
            require_fit(config, backbones[config.model])
        except CairnError as error:
            left_out[system.name] = str(error)
    return [system for system in systems if system.name not in left_out]
