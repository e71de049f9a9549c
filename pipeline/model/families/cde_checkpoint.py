"""A published CDE checkpoint taken apart: each stage's tensors, and the sizes its config.json does not give.

    first_stage_model.embedder.*              M1's backbone, of the sizes of the model that ``embedder`` names
    first_stage_model.mlp.*                   what its pooled states pass
    second_stage_model.backbone.*             M2's backbone, sized as ``dataset_backbone``, else ``embedder``
    second_stage_model.{prompt,output}_projection.*, .sequence_dropout_null_embedding

The configuration of a named model is looked for in the checkpoint's folder and beside it, as
``NAME/config.json`` or ``NAME.json`` with the last part of the name; then among the published sizes known
here, so that a folder means the same on every machine; then in the Hugging Face cache. Nothing is downloaded,
no remote code is run. A tensor that no part reads is refused as one that is missing is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from cairn.pipeline.model.folders.first_layers import first_layers
from cairn.pipeline.model.folders.names import model_folder

FIRST_STAGE: Final = "first_stage_model.embedder."
SECOND_STAGE: Final = "second_stage_model.backbone."

_LAYER_COUNTS: Final = {"nomic_bert": "n_layer", "modernbert": "num_hidden_layers"}
_TOKEN_TABLES: Final = ("embeddings.word_embeddings.weight", "embeddings.tok_embeddings.weight")
_MOST_NAMED: Final = 3
"""Tensors named in a refusal before the rest is only counted."""

_REQUIRED: Final[Mapping[str, tuple[Any, ...]]] = {
    "autoregressive_backbone": (False, None),
    "transductive_tokens_per_document": (1, None),
    "pooling_strategy": ("mean", None),
    "biencoder_pooling_strategy": ("mean", None),
}
"""Settings of the published code of which one value, or none, is read here."""

_PUBLISHED: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "nomic-bert-2048": {
            "model_type": "nomic_bert",
            "activation_function": "swiglu",
            "layer_norm_epsilon": 1e-12,
            "n_embd": 768,
            "n_head": 12,
            "n_inner": 3072,
            "n_layer": 12,
            "n_positions": 2048,
            "rotary_emb_base": 1000,
            "rotary_emb_fraction": 1.0,
            "type_vocab_size": 2,
            "vocab_size": 30528,
        },
        "ModernBERT-base": {
            "model_type": "modernbert",
            "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0,
            "hidden_activation": "gelu",
            "hidden_size": 768,
            "intermediate_size": 1152,
            "local_attention": 128,
            "local_rope_theta": 10000.0,
            "max_position_embeddings": 8192,
            "norm_eps": 1e-5,
            "num_attention_heads": 12,
            "num_hidden_layers": 22,
            "vocab_size": 50368,
        },
    }
)
"""Sizes of the backbones of cde-small-v1 and cde-small-v2, as their authors publish them."""


class StagedCheckpoint:
    """The parts of a CDE checkpoint; once all are read, ``require_whole`` refuses tensors left over.

    ``num_layers`` are the layers of the second stage that run (Matryoshka), of those the checkpoint has.
    """

    def __init__(self, checkpoint: Checkpoint, num_layers: int | None = None) -> None:
        for name, allowed in _REQUIRED.items():
            if checkpoint.config.get(name) not in allowed:
                raise ModelError(
                    f"{name} of a CDE model must be {allowed[0]!r}, got {checkpoint.config[name]!r}; "
                    "choose another model"
                )
        self._checkpoint = checkpoint
        self._tensors = _with_tied_tokens(checkpoint)
        self._read: set[str] = set()
        embedder = self._config_named("embedder")
        self.first_stage = self._backbone(FIRST_STAGE, embedder, "limit_layers_first_stage")
        backbone = (
            self._config_named("dataset_backbone") if checkpoint.config.get("dataset_backbone") else embedder
        )
        whole = self._backbone(SECOND_STAGE, backbone, "limit_layers")
        cut = first_layers(whole, num_layers)
        self._read |= set(whole.tensors) - set(cut.tensors)
        # The first stage's weights lie in the same file, whose hash is in the checkpoint's fingerprint.
        self.second_stage = replace(
            cut,
            fingerprint=fingerprint(kind="cde", first=self.first_stage.fingerprint, second=cut.fingerprint),
        )

    def tensors(self, prefix: str) -> Mapping[str, torch.Tensor]:
        """Return the tensors below a prefix, under their full names."""
        return _Watched(
            {name: tensor for name, tensor in self._tensors.items() if name.startswith(prefix)}, self._read
        )

    def watched(self, stage: Checkpoint) -> Checkpoint:
        """Return a stage's checkpoint so that what is read of it counts as read."""
        return replace(stage, tensors=_Watched(stage.tensors, self._read))

    def require_whole(self) -> None:
        """Raise :class:`ModelError` for tensors that no part has read."""
        surplus = sorted(set(self._checkpoint.tensors) - self._read)
        if surplus:
            more = f" and {len(surplus) - _MOST_NAMED} more" if len(surplus) > _MOST_NAMED else ""
            raise ModelError(
                "a CDE checkpoint must hold the tensors of its config.json and no others, got "
                f"{', '.join(surplus[:_MOST_NAMED])}{more}; "
                "the file does not fit its config.json"
            )

    def _config_named(self, setting: str) -> Mapping[str, Any]:
        name = self._checkpoint.config.get(setting)
        if not isinstance(name, str) or not name:
            raise ModelError(
                f"{setting} of a CDE model must name the model its backbone is made like, got {name!r}; "
                "fetch it again"
            )
        config = _find_config(self._checkpoint.folder, name)
        if config.get("model_type") not in _LAYER_COUNTS:
            raise ModelError(
                f"the backbone of a CDE model must be one of {', '.join(_LAYER_COUNTS)}, got "
                f"{config.get('model_type')!r} for {name}; "
                "choose another model"
            )
        return config

    def _backbone(self, prefix: str, config: Mapping[str, Any], limit_setting: str) -> Checkpoint:
        """Return a stage's backbone as a checkpoint, its configuration cut to the layers the file holds."""
        tensors = {name: tensor for name, tensor in self._tensors.items() if name.startswith(prefix)}
        nested = replace(
            self._checkpoint,
            config=config,
            tensors=tensors,
            fingerprint=fingerprint(
                kind="cde-stage",
                checkpoint=self._checkpoint.fingerprint,
                stage=prefix,
                config=dict(sorted(config.items())),
            ),
        )
        if self._checkpoint.config.get(limit_setting) is None:
            return nested
        # Tensors of layers beyond the limit stay: the file was saved without them, so they would be surplus.
        limited = first_layers(nested, self._checkpoint.integer(limit_setting))
        return replace(limited, tensors=tensors)


class _Watched(Mapping[str, torch.Tensor]):
    """Tensors that note the names of those taken out."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], read: set[str]) -> None:
        self._tensors = tensors
        self._read = read

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        self._read.add(name)
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _with_tied_tokens(checkpoint: Checkpoint) -> Mapping[str, torch.Tensor]:
    """Return the tensors with one token table for both stages where the configuration ties them.

    A file may hold it once.
    """
    if not checkpoint.config.get("transductive_tie_token_embeddings"):
        return checkpoint.tensors
    tensors = dict(checkpoint.tensors)
    for table in _TOKEN_TABLES:
        found = [tensors[stage + table] for stage in (FIRST_STAGE, SECOND_STAGE) if stage + table in tensors]
        if len(found) == 2 and not torch.equal(*found):
            raise ModelError(
                f"{table} must be the same in both stages (transductive_tie_token_embeddings), got two; "
                "fetch the model again"
            )
        if found:
            tensors |= {FIRST_STAGE + table: found[0], SECOND_STAGE + table: found[0]}
    return tensors


def _find_config(folder: Path, name: str) -> Mapping[str, Any]:
    last = name.rstrip("/").rpartition("/")[2]
    for place in (folder, folder.parent):
        for path in (place / last / "config.json", place / f"{last}.json"):
            if path.is_file():
                return _read_config(path)
    if last in _PUBLISHED:
        return _PUBLISHED[last]
    try:
        return _read_config(model_folder(name) / "config.json")
    except ConfigError as error:
        raise ModelError(
            f"the model that a CDE checkpoint is made like must be one of {', '.join(_PUBLISHED)}, or "
            "have its configuration beside the "
            f"checkpoint, got {name!r} and none; save its config.json as {last}.json in the checkpoint's "
            "folder"
        ) from error


def _read_config(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path.name} of a CDE model's backbone must be JSON, got an unreadable file; fetch it again"
        ) from error
    if not isinstance(config, dict):
        raise ModelError(
            f"{path.name} of a CDE model's backbone must hold settings, got something else; fetch it again"
        )
    return config
