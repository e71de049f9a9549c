"""A model folder on disk, read without remote code and without pickle: configuration, tokenizer, safetensors.

Knows the two published layouts: Hugging Face (config.json, model.safetensors, tokenizer.json in one folder; large models split their
weights over several files that model.safetensors.index.json names) and sentence-transformers (modules.json naming the folder of the
transformer). It says what lies there; what to make of the tensors is the backbone's business. Only the transformer is read: a pooling
other than the mean draws a warning, a further trained module is refused, as vectors without it mean
nothing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer

from pipeline import durable
from pipeline.errors import ModelError
from pipeline.manifest import fingerprint

logger = logging.getLogger(__name__)

WEIGHTS_NAME: Final = "model.safetensors"
WEIGHTS_INDEX_NAME: Final = "model.safetensors.index.json"
_MODULES_READ: Final = frozenset({"Transformer", "Pooling", "Normalize"})
_TOKEN_NAMES: Final = {
    "cls": (("cls_token", "bos_token"), ("[CLS]", "<s>", "<bos>")),
    "landmark": (("sep_token", "eos_token"), ("[SEP]", "</s>", "<eos>")),
    "pad": (("pad_token",), ("[PAD]", "<pad>")),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What a folder holds; ``fingerprint`` hashes the weights, the tokenizer and the configuration, whatever the folder is called."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    tokenizer: Tokenizer
    cls_id: int
    landmark_id: int
    pad_id: int
    weights_sha256: str
    fingerprint: str

    def number(self, *names: str, default: int | float | None = None) -> float:
        """Return the first of these settings that is not null, else the default; families name the same number differently."""
        value = next((self.config[name] for name in names if self.config.get(name) is not None), default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise ModelError(f"config.json of the model must give {' or '.join(names)} as a positive number, got {value!r}; fetch it again")
        return float(value)

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return such a setting as a whole number."""
        return int(self.number(*names, default=default))


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a model folder; raise :class:`ModelError` for one that is incomplete, damaged or not fit to be read safely."""
    folder = _transformer_folder(folder)
    config = _read_json(folder / "config.json")
    tokenizer_path, weights_paths = _require(folder / "tokenizer.json"), _weights_paths(folder)
    tokenizer = _read_tokenizer(tokenizer_path)
    hashes = {path.name: durable.sha256_of_file(path) for path in weights_paths}
    weights_sha256 = hashes[WEIGHTS_NAME] if WEIGHTS_NAME in hashes else fingerprint(shards=hashes)
    tensors: dict[str, torch.Tensor] = {}
    for path in weights_paths:
        tensors |= _read_tensors(path)
    special = _special_tokens(folder, tokenizer)
    return Checkpoint(
        folder=folder,
        config=config,
        tensors=tensors,
        tokenizer=tokenizer,
        cls_id=special["cls"],
        landmark_id=special["landmark"],
        pad_id=special["pad"],
        weights_sha256=weights_sha256,
        fingerprint=fingerprint(
            weights=weights_sha256, tokenizer=durable.sha256_of_file(tokenizer_path), config=dict(sorted(config.items())), special=special
        ),
    )


def _weights_paths(folder: Path) -> list[Path]:
    """Return the one file of weights, else all that the index names."""
    if (folder / WEIGHTS_NAME).is_file() or not (folder / WEIGHTS_INDEX_NAME).is_file():
        return [_require(folder / WEIGHTS_NAME)]
    index = _read_json(folder / WEIGHTS_INDEX_NAME)
    files: Any = index.get("weight_map") if isinstance(index, dict) else None
    names = set(files.values()) if isinstance(files, dict) else set[Any]()
    # A name is believed only when it lies in this very folder.
    if not names or not all(isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors") for name in names):
        raise ModelError(f"{WEIGHTS_INDEX_NAME} of the model must name safetensors files beside it, got others; fetch the model again")
    return [_require(folder / name) for name in sorted(names)]


def _read_tensors(path: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"{path.name} of the model must be a whole safetensors file, got a damaged one ({error}); fetch the model again"
        ) from error


def _transformer_folder(folder: Path) -> Path:
    modules_path = folder / "modules.json"
    if not modules_path.is_file():
        return folder
    modules: Any = _read_json(modules_path)
    transformer = folder
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in _MODULES_READ:
            raise ModelError(
                f"a model folder must hold a transformer with pooling and normalisation only, got the module {kind!r}; choose another model"
            )
        path = folder / str(module.get("path", ""))
        if kind == "Transformer":
            transformer = path
        if kind == "Pooling" and not _is_mean_pooling(path / "config.json"):
            logger.warning("the model was trained with a pooling other than the mean; its pooling setting is ignored")
    return transformer


def _is_mean_pooling(path: Path) -> bool:
    config = _read_json(path)
    return bool(config.get("pooling_mode_mean_tokens", config.get("pooling_mode") == "mean"))


def _require(path: Path) -> Path:
    if not path.is_file():
        hint = "save the model's fast tokenizer beside it"
        if path.suffix == ".safetensors":
            hint = "convert the weights to safetensors" if path.name == WEIGHTS_NAME else "fetch the rest of the model's weights"
        raise ModelError(f"a model folder must hold {path.name}, got none; {hint}")
    return path


def _read_json(path: Path) -> Any:
    if not path.is_file():
        raise ModelError(f"a model folder must hold {path.name}, got none; give a folder in Hugging Face or sentence-transformers layout")
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name} of the model must be JSON, got an unreadable file; fetch the model again") from error


def _read_tokenizer(path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    # The Rust side raises bare Exception.
    except Exception as error:
        raise ModelError(
            f"{path.name} of the model must be a fast tokenizer, got a damaged one ({error}); fetch the model again"
        ) from error
    # Published files carry a padding and a truncation of their own, which would cut texts silently.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _special_tokens(folder: Path, tokenizer: Tokenizer) -> dict[str, int]:
    """Return the ids of [CLS] (else BOS), of the landmark (SEP, else EOS) and of padding."""
    named: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            named = _read_json(folder / name) | named
    ids: dict[str, int] = {}
    for role, (keys, defaults) in _TOKEN_NAMES.items():
        candidates = [named.get(key) for key in keys] + list(defaults)
        tokens = [str(value["content"]) if isinstance(value, dict) else value for value in candidates]
        found = (tokenizer.token_to_id(token) for token in tokens if isinstance(token, str))
        token_id = next((value for value in found if value is not None), None)
        if token_id is None:
            if role != "pad":
                raise ModelError(f"the model's tokenizer must have a {role} token ({' or '.join(keys)}), got none; choose another model")
            token_id = 0
        ids[role] = token_id
    return ids
