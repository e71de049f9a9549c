"""The seam between the line and a transformer: what every backbone offers, and how a name becomes one.

A backbone turns token ids into last hidden states and knows nothing of chunks or pooling. ``model_type`` of
the configuration says which implementation reads the weights. Nothing is downloaded: a model is the embedded
one or a folder.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Final, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from tokenizers import Tokenizer

from pipeline.config import CAUSAL_FAMILIES, EncoderConfig
from pipeline.errors import ConfigError, ModelError
from pipeline.model.engine.precision import default_device, resolve_precision
from pipeline.model.engine.transformer import Transformer
from pipeline.model.families import bert, decoder, gte, modernbert, nomic_bert
from pipeline.model.families.cde import read_cde
from pipeline.model.folders.cde_settings import is_cde
from pipeline.model.folders.checkpoint import read_checkpoint
from pipeline.model.folders.embedded_weights import MODEL_NAMES, require_official_weights
from pipeline.model.folders.names import model_folder
from pipeline.model.matryoshka import first_layers


@runtime_checkable
class Backbone(Protocol):
    """A bidirectional encoder in inference mode."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the fast tokenizer, without padding and truncation."""
        ...

    @property
    def cls_id(self) -> int | None:
        """Return the id of [CLS], else BOS.

        None where the tokenizer has neither and rows begin with their text.
        """
        ...

    @property
    def landmark_id(self) -> int:
        """Return the id of SEP, else EOS."""
        ...

    @property
    def pad_id(self) -> int:
        """Return the id that fills a batch."""
        ...

    @property
    def model_dim(self) -> int:
        """Return the width of a hidden state."""
        ...

    @property
    def embedding_dim(self) -> int:
        """Return the width of a chunk's embedding, after ``project``."""
        ...

    @property
    def context_dim(self) -> int:
        """Return the width of the context vectors it reads."""
        ...

    @property
    def max_context(self) -> int | None:
        """Return how many context vectors it reads at most; None for any number."""
        ...

    @property
    def first_stage(self) -> Backbone:
        """Return the backbone that embeds context documents.

        Itself, unless the checkpoint holds one of its own (CDE §4.2).
        """
        ...

    @property
    def max_positions(self) -> int:
        """Return the longest row of text the model reads."""
        ...

    @property
    def weights_fingerprint(self) -> str:
        """Identify weights, tokenizer and configuration."""
        ...

    @property
    def device(self) -> torch.device:
        """Return where the weights lie."""
        ...

    @property
    def token_embeddings(self) -> Float32[np.ndarray, "vocabulary D"]:
        """Return the input table, one row a token id."""
        ...

    def hidden_states(
        self,
        ids_BT: Int64[np.ndarray, "B T"],
        lengths_B: Int64[np.ndarray, " B"],
        context_CD: Float32[np.ndarray, "C D"] | None = None,
        temperature: float = 1.0,
    ) -> Float[torch.Tensor, "B T D"]:
        """Return the last hidden states of the text; positions at and after a row's length hold no meaning.

        With a context, its vectors stand before every row's text as input embeddings (CDE eq. 5 and 6): no
        position embedding and no rotation, so their order does not matter and text positions still start at
        0; then token type 0 where the family has types, and the embedding norm, as for tokens. Where layers
        are local, only global ones show the context. Their own outputs are not returned.

        ``temperature`` divides every attention logit (TempScale: softmax(QKᵀ / (τ √d)); Zhou et al.,
        "Length-Induced Embedding Collapse"): below 1 attention is sharper, against the collapse of long texts
        onto one direction. One τ serves all layers of a call.
        """
        ...

    def project(self, pooled_MD: Float32[torch.Tensor, "M D"]) -> Float32[torch.Tensor, "M E"]:
        """Apply what a checkpoint has behind its pooling; most have nothing."""
        ...


_FAMILIES: Final[Mapping[str, Callable[..., Transformer]]] = {
    **dict.fromkeys(bert.FAMILIES, bert.read_bert),
    **dict.fromkeys(modernbert.FAMILIES, modernbert.read_modernbert),
    **dict.fromkeys(nomic_bert.FAMILIES, nomic_bert.read_nomic_bert),
    **dict.fromkeys(gte.FAMILIES, gte.read_gte),
    **dict.fromkeys(decoder.FAMILIES, decoder.read_decoder),
}


def load_backbone(config: EncoderConfig, device: torch.device | None = None) -> Backbone:
    """Load the model a configuration names, its first layers or with its causal mask where told so, in its precision and on its backend."""
    on_openvino = config.backend == "openvino"
    device = device or (torch.device("cpu") if on_openvino else default_device())
    if on_openvino:
        _require_openvino(device)
    precision = resolve_precision(config.precision, device)
    dtype, run_on = (torch.float32, _to_openvino(precision)) if on_openvino else (precision, _packed)
    checkpoint = read_checkpoint(model_folder(config.model))
    if config.model in MODEL_NAMES:
        require_official_weights(checkpoint.weights_sha256)
    model_type = checkpoint.config.get("model_type")
    if config.causal and model_type not in CAUSAL_FAMILIES:
        raise ConfigError(
            f"causal must go with a decoder ({', '.join(CAUSAL_FAMILIES)}), got a model of type "
            f"{model_type}; "
            "leave it out: encoders see the whole text"
        )
    if is_cde(checkpoint.config):
        return read_cde(checkpoint, dtype=dtype, device=device, num_layers=config.num_layers, run_on=run_on)
    checkpoint = first_layers(decoder.language_model(checkpoint), config.num_layers)
    if model_type not in _FAMILIES:
        raise ModelError(
            f"model_type must be one of {', '.join(_FAMILIES)}, got {model_type!r}; choose a model of "
            "these families"
        )
    settings = {"is_causal": True} if config.causal else {}
    return run_on(_FAMILIES[model_type](checkpoint, dtype=dtype, device=device, **settings))


def _packed(engine: Transformer) -> Transformer:
    engine.pack()
    return engine


def _to_openvino(precision: torch.dtype) -> Callable[[Transformer], Transformer]:
    from pipeline.model.engine.openvino_backbone import OpenVinoTransformer  # an extra

    return lambda engine: OpenVinoTransformer(engine, precision)


def _require_openvino(device: torch.device) -> None:
    if device.type != "cpu":
        raise ConfigError(f"backend openvino must run on the CPU, got {device}; choose backend torch")
    if find_spec("openvino") is None:
        raise ConfigError(
            "backend openvino must have the package openvino, got none; install it with `pip install "
            "'cairn-retrieval[openvino]'` "
            "(in Cairn's own folder `pip install '.[openvino]'`), or choose backend torch"
        )
    try:
        importlib.import_module("pipeline.model.engine.openvino_runtime")
    # What its native libraries raise where they do not fit the machine is theirs to choose.
    except Exception as error:
        raise ConfigError(
            "backend openvino must have a package openvino that can be imported, got a broken one "
            f"({' '.join(str(error).split())}); "
            "install it again with `pip install --force-reinstall openvino`, or choose backend torch"
        ) from error
