"""From the name of a model to its backbone: its files, its family's reader, its backend.

Nothing is downloaded: a model is the embedded one or a folder.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Generator
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Final

import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import CairnError, ConfigError, ModelError, install_command
from cairn.pipeline.model.cde import read_cde
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.engine.precision import default_device, resolve_precision
from cairn.pipeline.model.engine.projection import read_projection
from cairn.pipeline.model.engine.transformer import Transformer
from cairn.pipeline.model.families import language_model
from cairn.pipeline.model.folders.checkpoint import Checkpoint, read_checkpoint, weights_sha256_of
from cairn.pipeline.model.folders.first_layers import first_layers, split_stages
from cairn.pipeline.model.folders.late_interaction import LateInteraction
from cairn.pipeline.model.folders.model_defaults import query_settings
from cairn.pipeline.model.folders.model_types import (
    CAUSAL_TYPES,
    MODEL_TYPES,
    STATIC,
    is_cde,
    is_run_by_transformers,
)
from cairn.pipeline.model.folders.names import (
    MODEL_NAMES,
    is_endpoint,
    model_folder,
    require_official_weights,
    require_shipped_files,
)
from cairn.pipeline.model.folders.sentence_transformers_folder import SentenceTransformersFolder
from cairn.pipeline.model.late_backbone import LateBackbone, linear_of
from cairn.pipeline.model.static_backbone import StaticBackbone
from cairn.pipeline.model.transformers_backbone import TransformersBackbone
from cairn.pipeline.token_vectors.projection import LATE_NAME, TokenProjection, read_token_projection

_ODD: Final = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What reading a list for a number, NaN, or a name for a mapping ends in."""
MAX_SENTENCE_CHARACTERS: Final = 1_000
"""A longer sentence quotes a file's content and not a setting."""


_NOT_ACROSS_MODELS: Final = ("token_bytes", "use_context", "layers", "temperature", "query_temperature")
"""Settings that need queries and documents to be read by one model."""


def load_backbone(
    config: EncoderConfig,
    device: torch.device | None = None,
    modules: SentenceTransformersFolder | None = None,
) -> Backbone:
    """Load a model as its configuration says: precision, backend, first layers, causal mask.

    ``modules`` stand for what its folder says.
    """
    if is_endpoint(config.model):
        raise ConfigError(
            f"a model must run here for this, got the endpoint {config.model}; choose a name or a folder"
        )
    on_openvino = config.backend == "openvino"
    device = device or (torch.device("cpu") if on_openvino else default_device())
    if on_openvino:
        _require_openvino(device)
    folder = model_folder(config.model)
    require_shipped_files(config.model)
    with odd_files_reported(folder):
        checkpoint = read_checkpoint(folder, modules=modules)
    if config.model in MODEL_NAMES:
        require_official_weights(checkpoint.weights_sha256)
    backbone = _loaded(config, checkpoint, device)
    asked = None if checkpoint.asking is None else query_settings(config)
    if asked is not None:
        backbone.of_queries = load_backbone(asked, device, checkpoint.asking)
        backbone.lacks = (*backbone.lacks, *_NOT_ACROSS_MODELS)
    return backbone


def _loaded(config: EncoderConfig, checkpoint: Checkpoint, device: torch.device) -> Backbone:
    precision = resolve_precision(config.precision, device)
    on_openvino, folder = config.backend == "openvino", model_folder(config.model)
    dtype, run_on = (torch.float32, _to_openvino(precision)) if on_openvino else (precision, _packed)
    model_type = checkpoint.config.get("model_type")
    if is_run_by_transformers(checkpoint.config):
        return _run_beside_engine(config, checkpoint, precision, device)
    if config.causal and model_type not in CAUSAL_TYPES:
        raise ConfigError(
            f"causal must go with a decoder ({', '.join(CAUSAL_TYPES)}), got a model of type {model_type}; "
            "leave it out: encoders see the whole text"
        )
    with odd_files_reported(folder):
        if is_cde(checkpoint.config):
            return read_cde(checkpoint, dtype=dtype, device=device, num_layers=config.layers, run_on=run_on)
        read = reader_of(model_type)
        second, first = split_stages(checkpoint)
        cut = first_layers(language_model(second), config.layers)
        engine = read(cut, dtype=dtype, device=device, **({"is_causal": True} if config.causal else {}))
        require_embeddings(checkpoint, len(engine.embedding.tokens_VD))
        if checkpoint.late is not None:
            return _late(run_on(engine), checkpoint, checkpoint.late)
        engine.projection = read_projection(checkpoint.steps, engine.model_dim, device)
        if first is not None:
            engine.own_first_stage = run_on(read(first, dtype=dtype, device=device))
        return run_on(engine)


def _run_beside_engine(
    config: EncoderConfig, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device
) -> Backbone:
    if config.backend != "torch":
        raise ConfigError(
            f"backend {config.backend} must go with a model_type of {', '.join(MODEL_TYPES)}, got "
            f"{checkpoint.config.get('model_type')!r}; choose backend torch"
        )
    with odd_files_reported(model_folder(config.model)):
        if checkpoint.config.get("model_type") == STATIC:
            backbone = StaticBackbone(checkpoint, device=device)
        else:
            backbone = TransformersBackbone(checkpoint, dtype=dtype, device=device)
        require_embeddings(checkpoint, backbone.num_embeddings)
        if checkpoint.late is not None:
            return _late(backbone, checkpoint, checkpoint.late)
        backbone.projection = read_projection(checkpoint.steps, backbone.model_dim, device)
        return backbone


def _late(backbone: Backbone, checkpoint: Checkpoint, late: LateInteraction) -> LateBackbone:
    """Return a transformer with the layers that make its states token vectors."""
    projection = read_projection(checkpoint.steps, backbone.model_dim, backbone.device)
    return LateBackbone(backbone, projection or linear_of(checkpoint.tensors, backbone.device), late)


@contextlib.contextmanager
def odd_files_reported(folder: Path) -> Generator[None]:
    """Report what reading odd files raises as a :class:`ModelError` without a word of their content."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except CairnError as error:
        if len(str(error)) <= MAX_SENTENCE_CHARACTERS:
            raise
        raise ModelError(
            f"the files of the model in {folder} must hold values Cairn knows, got one that is too long to "
            "show; fetch the model again"
        ) from None
    except _ODD as error:
        raise ModelError(
            f"the files of the model in {folder} must fit together, got {type(error).__name__} while they "
            "were read; fetch the model again"
        ) from error


def require_embeddings(checkpoint: Checkpoint, num_embeddings: int) -> None:
    """Refuse a tokenizer with a token that has no embedding."""
    last = max(checkpoint.tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if last >= num_embeddings:
        raise ModelError(
            f"tokenizer.json of the model must name no token beyond its {num_embeddings} embeddings, got the "
            f"id {last}; fetch the model again"
        )


def token_projection_of(config: EncoderConfig, backbone: Backbone) -> TokenProjection | None:
    """Return a folder's token projection for all its layers, None without one; a misfit raises."""
    if not brings_projection(config):
        return None
    folder = model_folder(config.model)
    return read_token_projection(
        folder,
        model_dim=backbone.model_dim,
        vocabulary_size=backbone.tokenizer.get_vocab_size(),
        weights_sha256=weights_sha256_of(folder),
    )


def brings_projection(config: EncoderConfig) -> bool:
    """Say whether a model's folder holds a token projection for all of its layers."""
    return config.layers is None and (model_folder(config.model) / LATE_NAME).is_file()


def _packed(engine: Transformer) -> Transformer:
    engine.pack()
    return engine


def _to_openvino(precision: torch.dtype) -> Callable[[Transformer], Transformer]:
    from cairn.pipeline.model.engine.openvino_backbone import OpenVinoTransformer  # an extra

    return lambda engine: OpenVinoTransformer(engine, precision)


def _require_openvino(device: torch.device) -> None:
    if device.type != "cpu":
        raise ConfigError(f"backend openvino must run on the CPU, got {device}; choose backend torch")
    if find_spec("openvino") is None:
        raise ConfigError(
            "backend openvino must have the package openvino, got none; install it with "
            f"{install_command('openvino')}, or choose backend torch"
        )
    try:
        importlib.import_module("cairn.pipeline.model.engine.openvino_backbone")
    # What its native libraries raise where they do not fit the machine is theirs to choose.
    except Exception as error:
        raise ConfigError(
            "backend openvino must have a package openvino that can be imported, got a broken one "
            f"({' '.join(str(error).split())}); "
            "install it again with `pip install --force-reinstall openvino`, or choose backend torch"
        ) from error


def reader_of(model_type: object) -> Callable[..., Transformer]:
    """Return a family's reader: of a checkpoint, with ``dtype``, ``device``, of decoders ``is_causal``."""
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        raise ModelError(
            f"model_type must be one of {', '.join(MODEL_TYPES)}, got {model_type!r}; choose a model of "
            "these families"
        )
    return resolve_name(MODEL_TYPES[model_type].reader)
