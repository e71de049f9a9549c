"""Our checkpoint format: read back by Cairn without loss, by Sentence-Transformers as a stock model.

    model.safetensors, config.json, tokenizer.json …    the transformer, as published
    cairn_quantized.safetensors                         in its place where weights are quantised
    cairn_extra.safetensors                             tensors that no stock module has (``own_tensors``)
    cairn_config.json                                   the encoder's settings (``model_defaults`` reads them)
    modules.json, 1_Pooling/, 2_Dense/ …                the same for Sentence-Transformers, where it can

For texts of one chunk that library gives the same vectors, unless the settings go beyond its modules;
``beyond_stock_modules`` says how. The folder is written beside its place and renamed: it is whole, or what
stood there stays. A model of fewer layers is saved as the model of these layers.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from cairn.pipeline import durable
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.model.folders.checkpoint import (
    EXTRA_NAME,
    QUANTIZED_NAME,
    WEIGHTS_NAME,
    Checkpoint,
    read_tokenizer,
)
from cairn.pipeline.model.folders.model_defaults import CAIRN_SETTINGS_NAME, settings_of_a_folder
from cairn.pipeline.model.folders.model_types import CAUSAL_TYPES, MODEL_TYPES, is_cde
from cairn.pipeline.model.folders.own_tensors import LANDMARK_MIXER, OWN_PREFIXES
from cairn.pipeline.model.folders.sentence_transformers_folder import (
    MODULES_NAME,
    QUANTIZER,
    SETTINGS_NAME,
    TRANSFORMER_SETTINGS_NAME,
    read_json_if_any,
)
from cairn.pipeline.poolings import pooling_rule
from cairn.pipeline.quantized_matrix import QuantizedTensors
from safetensors.torch import save_file
from tokenizers import Tokenizer, processors

_NESTED_PREFIX: Final = "embedding_model."
"""What NV-Embed puts before the names of its transformer."""

_NOMIC_NAMES: Final[Mapping[str, str]] = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
}
"""NomicBERT's published configuration in the names transformers gives it, which reads no others."""

_PLAIN_TOKENIZER: Final = "PreTrainedTokenizerFast"
_COPIED: Final = ("special_tokens_map.json", "added_tokens.json", "vocab.txt", TRANSFORMER_SETTINGS_NAME)


def beyond_stock_modules(
    settings: EncoderConfig, config: Mapping[str, Any], tensor_names: Iterable[str] = ()
) -> list[str]:
    """Name what Sentence-Transformers' modules lack: its vectors would be others, or none."""
    named = {
        f"pooling {settings.pooling}": pooling_rule(settings.pooling).saved_as is None,
        f"attention {settings.attention} with pooling mean": settings.attention == "full"
        and settings.pooling == "mean",
        "temperature": settings.temperature != 1.0,
        "query_temperature": settings.query_temperature not in (None, 1.0),
        "title_tokens": settings.title_tokens > 0,
        "use_context": settings.use_context,
        "document_context": settings.document_context > 0,
        "quantised weights": isinstance(tensor_names, QuantizedTensors),
        "landmark mixer": any(name.startswith(LANDMARK_MIXER) for name in tensor_names),
        f"model_type {config.get('model_type')}": not _is_in_transformers(config),
    }
    return [name for name, is_beyond in named.items() if is_beyond]


def _is_in_transformers(config: Mapping[str, Any]) -> bool:
    family = MODEL_TYPES.get(str(config.get("model_type")))
    return family is None or family.in_transformers


def save_encoder_folder(
    folder: Path,
    checkpoint: Checkpoint,
    settings: EncoderConfig,
    *,
    copies_weights: bool = False,
    replaces: bool = False,
    late_path: Path | None = None,
    context: ContextConfig | None = None,
) -> None:
    """Write a checkpoint with its settings; ``copies_weights`` copies the files it was read from.

    Tensors may be others than those read (trained ones); everything else comes from the checkpoint's folder.
    ``late_path`` is a token projection, which goes along with the weights it was trained for.
    A place that is taken raises :class:`ConfigError`, unless the new folder ``replaces`` what stands there.
    So does a CDE model, whose two stages no stock module runs. Weights that are NaN raise
    :class:`ModelError`.
    """
    if not replaces and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"the folder to save a model to must be new or empty, got {str(folder)!r}; choose another"
        )
    if is_cde(checkpoint.config):
        raise ConfigError(
            "a model to save must be one transformer, got a CDE model of two; copy its folder instead"
        )
    if checkpoint.late is not None:
        raise ConfigError(
            "a model to save must have one vector a text, got a late-interaction model; copy its "
            "folder instead"
        )
    checkpoint.require_alone()
    for name, tensor in checkpoint.tensors.items():
        # A gate may be -inf, which closes it.
        if tensor.is_floating_point() and not bool((tensor < float("inf")).all()):
            raise ModelError(
                f"{name} of a model to save must be finite, got NaN or infinity; fetch or train the "
                "model again"
            )
    with (
        durable.storage_errors(f"saving the model to {folder}"),
        durable.replacing_folder(folder) as temporary,
    ):
        _write_weights(temporary, checkpoint, copies_weights=copies_weights)
        _write_tokenizer(temporary, checkpoint)
        _write_settings(temporary, checkpoint, settings, context)
        if late_path is not None and copies_weights and late_path.is_file():
            shutil.copyfile(late_path, temporary / late_path.name)


def _write_settings(
    folder: Path, checkpoint: Checkpoint, settings: EncoderConfig, context: ContextConfig | None
) -> None:
    config = _with_native_names(checkpoint.config)
    if config.get("model_type") in CAUSAL_TYPES and not settings.causal:
        config["is_causal"] = False
    durable.write_json(folder / "config.json", config)
    own = settings_of_a_folder(replace(settings, layers=None), context)
    durable.write_json(folder / CAIRN_SETTINGS_NAME, own)
    for name in _COPIED:
        if (checkpoint.folder / name).is_file():
            shutil.copyfile(checkpoint.folder / name, folder / name)
    _write_modules(folder, checkpoint, settings)


def _with_native_names(config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("model_type") != "nomic_bert" or "n_embd" not in config:
        return dict(config)
    native = {name: config[published] for published, name in _NOMIC_NAMES.items() if published in config}
    rope = {"rope_type": "default", "rope_theta": config.get("rotary_emb_base", 1_000.0)}
    return {**native, "rope_parameters": rope, **config}


def _write_weights(folder: Path, checkpoint: Checkpoint, *, copies_weights: bool) -> None:
    if copies_weights and (checkpoint.folder / WEIGHTS_NAME).is_file():
        shutil.copyfile(checkpoint.folder / WEIGHTS_NAME, folder / WEIGHTS_NAME)
        if checkpoint.extra_path is not None:
            shutil.copyfile(checkpoint.extra_path, folder / EXTRA_NAME)
        return
    if isinstance(checkpoint.tensors, QuantizedTensors):
        _write_quantized(folder, checkpoint.tensors)
        return
    own = {name: tensor for name, tensor in checkpoint.tensors.items() if name.startswith(OWN_PREFIXES)}
    transformer = {
        name.removeprefix(_NESTED_PREFIX): tensor
        for name, tensor in checkpoint.tensors.items()
        if name not in own
    }
    for name, tensors in ((WEIGHTS_NAME, transformer), (EXTRA_NAME, own)):
        if tensors:
            contiguous = {key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}
            save_file(contiguous, folder / name, metadata={"format": "pt"})


def _write_quantized(folder: Path, tensors: QuantizedTensors) -> None:
    stored = dict(tensors.plain)
    for name, matrix in tensors.matrices.items():
        stored |= {f"{name}.codes": matrix.codes, f"{name}.scales": matrix.scales_EG}
        if matrix.zeros_EG is not None:
            stored[f"{name}.zeros"] = matrix.zeros_EG
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in stored.items()}
    save_file(contiguous, folder / QUANTIZED_NAME)


def _write_tokenizer(folder: Path, checkpoint: Checkpoint) -> None:
    """Copy the tokenizer; one that frames a text otherwise than its model was run here gets that frame."""
    source = checkpoint.folder / "tokenizer.json"
    tokenizer = read_tokenizer(source)
    names = {
        token_id: str(tokenizer.id_to_token(token_id))
        for token_id in (*_frame_ids(checkpoint), checkpoint.pad_id)
    }
    plain = {"tokenizer_class": _PLAIN_TOKENIZER}
    settings = read_json_if_any(checkpoint.folder / "tokenizer_config.json") or plain
    # What the library calls special decides how long it takes a prompt to be.
    special = {
        "cls_token": checkpoint.cls_id,
        "sep_token": checkpoint.landmark_id,
        "pad_token": checkpoint.pad_id,
    }
    for role, token_id in special.items():
        if token_id is not None and not settings.get(role):
            settings[role] = names[token_id]
    if _frames_as_run(tokenizer, checkpoint):
        shutil.copyfile(source, folder / "tokenizer.json")
    else:
        *opening, ending = (names[token_id] for token_id in _frame_ids(checkpoint))
        frame: Any = processors.TemplateProcessing(
            single=[*opening, "$A", ending],
            special_tokens=[(names[token_id], token_id) for token_id in sorted({*_frame_ids(checkpoint)})],
        )
        # The byte-level one trims offsets and stays; any other is a frame, which this one replaces.
        if isinstance(tokenizer.post_processor, processors.ByteLevel):
            frame = processors.Sequence([tokenizer.post_processor, frame])
        tokenizer.post_processor = frame
        tokenizer.save(str(folder / "tokenizer.json"))
        settings["tokenizer_class"] = _PLAIN_TOKENIZER  # other classes would frame texts themselves
    durable.write_json(folder / "tokenizer_config.json", settings)


def _frame_ids(checkpoint: Checkpoint) -> list[int]:
    return (
        [checkpoint.landmark_id] if checkpoint.cls_id is None else [checkpoint.cls_id, checkpoint.landmark_id]
    )


def _frames_as_run(tokenizer: Tokenizer, checkpoint: Checkpoint) -> bool:
    *opening, ending = _frame_ids(checkpoint)
    return tokenizer.encode("a").ids == [
        *opening,
        *tokenizer.encode("a", add_special_tokens=False).ids,
        ending,
    ]


def _write_modules(folder: Path, checkpoint: Checkpoint, settings: EncoderConfig) -> None:
    """Describe the model in Sentence-Transformers' terms, the nearest there are."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")]
    pooling = pooling_rule(settings.pooling).saved_as or "mean"
    (folder / "1_Pooling").mkdir()
    width = checkpoint.integer("hidden_size", "n_embd", "d_model", "dim")
    includes_prompt = settings.pool_prefix or pooling != "mean"
    durable.write_json(
        folder / "1_Pooling" / "config.json",
        {"embedding_dimension": width, "pooling_mode": pooling, "include_prompt": includes_prompt},
    )
    for step in checkpoint.steps:
        modules.append((f"{len(modules)}_{step.kind}", step.kind))
        if step.kind != QUANTIZER and step.folder.is_dir():
            shutil.copytree(step.folder, folder / modules[-1][0])
    modules.append((f"{len(modules)}_Normalize", "Normalize"))
    listed = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(modules)
    ]
    described: dict[str, Any] = {
        "prompts": {"query": settings.query_prefix, "document": settings.document_prefix},
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    }
    if settings.dims is not None:
        described["truncate_dim"] = settings.dims
    durable.write_json(folder / SETTINGS_NAME, described)
    durable.write_json(folder / MODULES_NAME, listed)
