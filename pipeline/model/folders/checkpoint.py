"""A model folder on disk, read without remote code and without pickle: configuration, tokenizer, safetensors.

Knows the two published layouts: Hugging Face (config.json, model.safetensors, tokenizer.json in one folder;
large models split their weights over several files that model.safetensors.index.json names) and
sentence-transformers (modules.json naming the folder of the transformer and the modules behind it). A third
one is ours: a folder of nothing but what was trained beside a transformer, whose cairn_config.json names that
transformer as its base, with the hash of its weights.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Generator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from cairn.pipeline import durable
from cairn.pipeline.errors import ModelError
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.folders.late_interaction import LateInteraction
from cairn.pipeline.model.folders.model_defaults import Base, base_of_folder
from cairn.pipeline.model.folders.model_types import PPLX, STATIC
from cairn.pipeline.model.folders.names import model_folder
from cairn.pipeline.model.folders.own_tensors import OWN_PREFIXES
from cairn.pipeline.model.folders.sentence_transformers_folder import (
    SentenceTransformersFolder,
    Step,
    read_json,
    read_sentence_transformers_folder,
    steps_fingerprint,
)
from cairn.pipeline.quantized_matrix import QuantizedMatrix, QuantizedTensors
from cairn.pipeline.token_vectors.projection import LATE_NAME
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

WEIGHTS_NAME: Final = "model.safetensors"
WEIGHTS_INDEX_NAME: Final = "model.safetensors.index.json"
EXTRA_NAME: Final = "cairn_extra.safetensors"
"""Tensors of ours beside a stock model's: a latent attention, a null token, a landmark mixer."""

QUANTIZED_NAME: Final = "cairn_quantized.safetensors"
"""Stands in place of ``model.safetensors``; another library says that this is missing and computes nothing.

    NAME                        a tensor as published, such as embeddings, norms and biases
    NAME.codes NAME.scales      a quantised matrix (``pipeline/quantized_matrix.py``)
    NAME.zeros                  the same, of int4
"""

_COPIED_BYTES: Final = 1 << 16
"""Tensors smaller than this, such as norms and biases, are copied when weights are read."""

_COPIES_KEPT: Final = ContextVar("copies_kept", default=False)

_NORM_PARTS: Final = {"gamma": "weight", "beta": "bias"}
_TOKEN_NAMES: Final = {
    "cls": (("cls_token", "bos_token"), ("[CLS]", "<s>", "<bos>", "<|begin_of_text|>")),
    "landmark": (("sep_token", "eos_token"), ("[SEP]", "</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>")),
    "pad": (("pad_token",), ("[PAD]", "<pad>")),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What a folder holds; ``fingerprint`` hashes weights, tokenizer and configuration.

    ``cls_id`` = None: the tokenizer has neither [CLS] nor BOS, and rows begin with their text.
    """

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, torch.Tensor]
    tokenizer: Tokenizer
    cls_id: int | None
    landmark_id: int
    pad_id: int
    steps: tuple[Step, ...] = ()
    late: LateInteraction | None = None
    asking: SentenceTransformersFolder | None = None
    extra_path: Path | None = None
    weights_sha256: str
    fingerprint: str

    @property
    def own_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the tensors that are not the transformer's."""
        own = [name for name in self.tensors if any(f".{prefix}" in f".{name}" for prefix in OWN_PREFIXES)]
        return {name: self.tensors[name] for name in own}

    def require_alone(self) -> None:
        """Raise :class:`ModelError` where another model reads queries: it would be left behind."""
        if self.asking is not None:
            raise ModelError(
                "a model to save, train or compress must be one transformer, got one with a Router, which "
                "has another for queries; copy its folder, or give that of one route"
            )

    def number(self, *names: str, default: int | float | None = None) -> float:
        """Return the first of these settings, which families name differently, else the default."""
        value = next((self.config[name] for name in names if self.config.get(name) is not None), default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ModelError(
                f"config.json of the model must give {' or '.join(names)} as a positive number, got "
                f"{value!r}; fetch it again"
            )
        return float(value)

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return such a setting as a whole number."""
        return int(self.number(*names, default=default))


def read_checkpoint(
    folder: Path, extra_path: Path | None = None, modules: SentenceTransformersFolder | None = None
) -> Checkpoint:
    """Read a model folder; raise :class:`ModelError` for one that is incomplete, damaged or unsafe to read.

    ``extra_path`` stands for the folder's own file of our tensors, ``modules`` for what the folder says.
    """
    if extra_path is None and modules is None and (base := base_of_folder(folder)) is not None:
        return _on_base(folder, base)
    described = modules or read_sentence_transformers_folder(folder)
    modules = described or SentenceTransformersFolder(transformer=folder)
    extra_path = extra_path or folder / EXTRA_NAME
    folder = modules.transformer
    config = {"model_type": STATIC} if modules.is_static else read_json(folder / "config.json")
    tokenizer_path, weights_paths = _require(folder / "tokenizer.json"), _weights_paths(folder)
    tokenizer = read_tokenizer(tokenizer_path)
    if lowercases := modules.lowercases and _normalized(tokenizer, "A") != "a":
        own: Any = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *own])
    weights_sha256 = _sha256_of(weights_paths)
    stored: dict[str, torch.Tensor] = {}
    for path in weights_paths:
        stored |= read_tensors(path)
    added: dict[str, Any] = {}
    if extra_path.is_file():
        stored |= read_tensors(extra_path)
        added["extra"] = durable.sha256_of_file(extra_path)
    if modules.steps:
        added["steps"] = steps_fingerprint(modules.steps)
    if lowercases:
        added["lowercases"] = True
    if modules.late is not None:
        added["late"] = asdict(modules.late)
        _mark(tokenizer, modules.late.markers)
    cls_id, landmark_id, pad_id = (None, 0, 0) if modules.is_static else _special_tokens(folder, tokenizer)
    if config.get("model_type") == PPLX:
        cls_id = None  # whatever the tokenizer's files name
    special = {"cls": cls_id, "landmark": landmark_id, "pad": pad_id}
    return Checkpoint(
        folder=folder,
        config=config,
        tensors=_quantized_tensors(stored) if weights_paths[0].name == QUANTIZED_NAME else stored,
        tokenizer=tokenizer,
        cls_id=cls_id,
        landmark_id=landmark_id,
        pad_id=pad_id,
        steps=modules.steps,
        late=modules.late,
        asking=modules.asking,
        extra_path=extra_path if extra_path.is_file() else None,
        weights_sha256=weights_sha256,
        fingerprint=fingerprint(
            weights=weights_sha256,
            tokenizer=durable.sha256_of_file(tokenizer_path),
            config=dict(sorted(config.items())),
            special=special,
            **added,
        ),
    )


def weights_sha256_of(folder: Path) -> str:
    """Return the hash of a model's transformer, as :class:`Checkpoint` has it, without reading tensors."""
    base = base_of_folder(folder)
    if base is not None:
        return base.weights_sha256
    modules = read_sentence_transformers_folder(folder) or SentenceTransformersFolder(transformer=folder)
    return _sha256_of(_weights_paths(modules.transformer))


def _sha256_of(weights_paths: Sequence[Path]) -> str:
    hashes = {path.name: durable.sha256_of_file(path) for path in weights_paths}
    only = next(iter(hashes.values()))
    return only if hashes.keys() <= {WEIGHTS_NAME, QUANTIZED_NAME} else fingerprint(shards=hashes)


def _on_base(folder: Path, base: Base) -> Checkpoint:
    base_folder = model_folder(base.model)
    if base_of_folder(base_folder) is not None:
        raise ModelError(
            f"the base of the model in {folder} must be a whole model, got {base.model!r}, which has a "
            "base of its own"
        )
    has_projection_alone = (folder / LATE_NAME).is_file() and not (folder / EXTRA_NAME).exists()
    checkpoint = read_checkpoint(base_folder, None if has_projection_alone else _require(folder / EXTRA_NAME))
    if checkpoint.weights_sha256 != base.weights_sha256:
        raise ModelError(
            f"the model in {folder} was trained for {base.model!r} with weights {base.weights_sha256}, got "
            f"{checkpoint.weights_sha256}; restore those, or train it for these"
        )
    return checkpoint


def _weights_paths(folder: Path) -> list[Path]:
    """Return the one file of weights, else the quantised one, else all that the index names."""
    quantized = folder / QUANTIZED_NAME
    if quantized.is_file() and not (folder / WEIGHTS_NAME).is_file():
        return [quantized]
    if (folder / WEIGHTS_NAME).is_file() or not (folder / WEIGHTS_INDEX_NAME).is_file():
        return [_require(folder / WEIGHTS_NAME)]
    index = read_json(folder / WEIGHTS_INDEX_NAME)
    files: Any = index.get("weight_map")
    names = set(files.values()) if isinstance(files, dict) else set[Any]()
    # A name is believed only when it lies in this very folder.
    if not names or not all(
        isinstance(name, str) and Path(name).name == name and name.endswith(".safetensors") for name in names
    ):
        raise ModelError(
            f"{WEIGHTS_INDEX_NAME} of the model must name safetensors files beside it, got others; fetch "
            "the model again"
        )
    return [_require(folder / name) for name in sorted(names)]


def _quantized_tensors(stored: Mapping[str, torch.Tensor]) -> QuantizedTensors:
    """Return what the file holds; a matrix that is there whole, too, as one trained since, is read whole."""
    matrices: dict[str, QuantizedMatrix] = {}
    for name in stored:
        if name.endswith(".codes"):
            base = name.removesuffix(".codes")
            matrices[base] = QuantizedMatrix(
                codes=stored[name], scales_EG=stored[f"{base}.scales"], zeros_EG=stored.get(f"{base}.zeros")
            )
    parts = {f"{base}.{part}" for base in matrices for part in ("codes", "scales", "zeros")}
    plain = {name: tensor for name, tensor in stored.items() if name not in parts}
    return QuantizedTensors(plain, {name: each for name, each in matrices.items() if name not in plain})


@contextlib.contextmanager
def weights_in_memory() -> Generator[None]:
    """Copy what stays as it lies in the files of models that are read in the block: embeddings, a mixer.

    A server lives long. A mapped file that is cut would end it, and one that is written into change its
    answers.
    """
    token = _COPIES_KEPT.set(True)
    try:
        yield
    finally:
        _COPIES_KEPT.reset(token)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a file of weights so that matrices leave memory once they are packed and let go.

    They are mapped together. What may stay as it lies in the file does not keep that mapping: embeddings
    have mappings of their own, or are copied in :func:`weights_in_memory`, and small tensors are copied.
    """
    try:
        return {_today(name): _apart(path, name, tensor) for name, tensor in load_file(path).items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(
            f"{path.name} of the model must be a whole safetensors file, got a damaged one ({error}); "
            "fetch the model again"
        ) from error


def _today(name: str) -> str:
    """Return the name that a tensor has in checkpoints of today; BERT's norms were published otherwise."""
    return re.sub(r"(LayerNorm\.)(gamma|beta)$", lambda found: found[1] + _NORM_PARTS[found[2]], name)


def _apart(path: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.nbytes < _COPIED_BYTES:
        return tensor.clone()
    if _COPIES_KEPT.get() and ("embed" in name or path.name in (EXTRA_NAME, QUANTIZED_NAME)):
        return tensor.clone()
    if "embed" not in name:
        return tensor
    with safe_open(path, "pt") as stored:
        return stored.get_tensor(name)


def _require(path: Path) -> Path:
    if not path.is_file():
        hint = "save the model's fast tokenizer beside it"
        if path.name == WEIGHTS_NAME:
            hint = "convert the weights to safetensors"
        elif path.suffix == ".safetensors":
            hint = "fetch the rest of the model's weights"
        raise ModelError(f"the model's folder {path.parent} must hold {path.name}, got none; {hint}")
    return path


def read_tokenizer(path: Path) -> Tokenizer:
    """Return a fast tokenizer that neither pads nor cuts; a damaged file raises :class:`ModelError`."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    # The Rust side raises bare Exception.
    except Exception as error:
        raise ModelError(
            f"{path.name} of the model must be a fast tokenizer, got a damaged one ({error}); fetch the "
            "model again"
        ) from error
    # Published files carry a padding and a truncation of their own, which would cut texts silently.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    words: Any = tokenizer.model
    longest = getattr(words, "max_input_chars_per_word", None)
    if longest and tokenizer.pre_tokenizer is not None:  # a longer word is one token, however long it is
        pieces = pre_tokenizers.Split(Regex(f".{{{longest + 1}}}"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([tokenizer.pre_tokenizer, pieces])
    return tokenizer


def _mark(tokenizer: Tokenizer, markers: Sequence[str]) -> None:
    """Let each marker that the vocabulary holds be one token, with the space behind it or without."""
    for marker in markers:
        names = (marker, *marker.split(None, 1)[:1])
        known = next((name for name in names if name and tokenizer.token_to_id(name) is not None), None)
        if known is not None:
            tokenizer.add_special_tokens([AddedToken(known, normalized=False, special=True)])


def _normalized(tokenizer: Tokenizer, text: str) -> str:
    normalizer: Any = tokenizer.normalizer
    return text if normalizer is None else normalizer.normalize_str(text)


def _special_tokens(folder: Path, tokenizer: Tokenizer) -> tuple[int | None, int, int]:
    """Return the ids of [CLS] (else BOS, else None), of the landmark (SEP, else EOS) and of padding.

    A tokenizer that ends texts itself goes before names: Qwen3-Embedding was trained to end in another token
    than its ``eos_token``, and opens with none.
    """
    named: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            named = read_json(folder / name) | named
    ids = {
        role: _named_token(tokenizer, named, keys, defaults)
        for role, (keys, defaults) in _TOKEN_NAMES.items()
    }
    cls_id, landmark_id = _own_ends(tokenizer)
    if landmark_id is None:
        cls_id, landmark_id = ids["cls"], ids["landmark"]
    if landmark_id is None:
        raise ModelError(
            "the model's tokenizer must have a landmark token (sep_token or eos_token), got none; choose "
            "another model"
        )
    return cls_id, landmark_id, ids["pad"] or 0


def _named_token(
    tokenizer: Tokenizer, named: Mapping[str, Any], keys: tuple[str, ...], defaults: tuple[str, ...]
) -> int | None:
    """Return the first token that the files beside the tokenizer name, else the first default it has."""
    tokens = [value.get("content") if isinstance(value, dict) else value for value in map(named.get, keys)]
    found = (tokenizer.token_to_id(token) for token in (*tokens, *defaults) if isinstance(token, str))
    return next((token_id for token_id in found if token_id is not None), None)


def _own_ends(tokenizer: Tokenizer) -> tuple[int | None, int | None]:
    """Return the special tokens that the tokenizer itself puts before and after a text."""
    encoding = tokenizer.encode("a")
    is_special = [bool(mark) for mark in encoding.special_tokens_mask]
    if len(encoding) < 2:
        return None, None
    return encoding.ids[0] if is_special[0] else None, encoding.ids[-1] if is_special[-1] else None
