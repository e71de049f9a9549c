"""A trained mixer on disk: a folder of the mixer alone that names its base with the hash of its weights.

    cairn_config.json            base, the encoder's settings, and the context of training
    cairn_extra.safetensors      the mixer's tensors, float32, and what the base has in such a file of its own

``--model FOLDER`` and ``load_encoder`` read it; the base's weights stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from cairn.pipeline import durable
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.lab.train.output_folder import require_new
from cairn.pipeline.model.folders.checkpoint import EXTRA_NAME
from cairn.pipeline.model.folders.model_defaults import CAIRN_SETTINGS_NAME, Base, settings_of_a_folder
from cairn.pipeline.model.folders.own_tensors import LANDMARK_MIXER
from cairn.pipeline.model.landmark_mixer import LandmarkMixer
from safetensors.torch import save


def save_mixer(
    folder: Path,
    mixer: LandmarkMixer,
    base: Base,
    settings: EncoderConfig,
    base_extra: Mapping[str, torch.Tensor] | None = None,
    context: ContextConfig | None = None,
) -> None:
    """Write a mixer with its base and settings, whole or not at all.

    It was trained behind the ``context``, None: behind none. ``base_extra`` are tensors of ours beside the
    base's weights: the folder's stand in their place.
    """
    require_new(folder)
    with (
        durable.storage_errors(f"saving the mixer to {folder}"),
        durable.replacing_folder(folder) as temporary,
    ):
        durable.write_json(
            temporary / CAIRN_SETTINGS_NAME, {**settings_of_a_folder(settings, context), "base": asdict(base)}
        )
        tensors = {
            f"{LANDMARK_MIXER}{name}": tensor.detach().float().contiguous()
            for name, tensor in mixer.state_dict().items()
        }
        # As bytes: a file safetensors makes is for its owner alone.
        durable.write_bytes(
            temporary / EXTRA_NAME, save({**(base_extra or {}), **tensors}, metadata={"format": "pt"})
        )
