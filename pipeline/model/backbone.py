"""The seam between the line and a transformer: what every backbone offers, and how a name becomes one.

A backbone turns token ids into last hidden states and knows nothing of chunks or pooling. BERT and its absolute-position kin are built
here; other families join by another implementation of the same protocol. Nothing is downloaded: a model is the embedded one or a folder.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from tokenizers import Tokenizer

from pipeline.config import EncoderConfig
from pipeline.model.bert import BertBackbone
from pipeline.model.checkpoint import read_checkpoint
from pipeline.model.embedded_weights import MODEL_NAMES, require_official_weights
from pipeline.model.names import model_folder
from pipeline.model.precision import default_device, resolve_precision


@runtime_checkable
class Backbone(Protocol):
    """A bidirectional encoder in inference mode."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the fast tokenizer, without padding and truncation."""
        ...

    @property
    def cls_id(self) -> int:
        """Return the id of [CLS], else BOS."""
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
    def max_positions(self) -> int:
        """Return the longest row of text the model reads."""
        ...

    @property
    def temperature(self) -> float:
        """Return τ, already in the weights."""
        ...

    @property
    def weights_fingerprint(self) -> str:
        """Identify weights, tokenizer and configuration; τ is not part of it."""
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
    ) -> Float[torch.Tensor, "B T D"]:
        """Return the last hidden states of the text; positions at and after a row's length hold no meaning.

        With a context, its vectors stand before every row's text as input embeddings (CDE eq. 5 and 6): no position embedding, so their
        order does not matter and text positions still start at 0; then token type 0 and the embedding LayerNorm, as for tokens. Their own
        outputs are not returned.
        """
        ...


def load_backbone(config: EncoderConfig, device: torch.device | None = None) -> Backbone:
    """Load the model a configuration names, in its precision and with its attention temperature."""
    device = device or default_device()
    checkpoint = read_checkpoint(model_folder(config.model))
    if config.model in MODEL_NAMES:
        require_official_weights(checkpoint.weights_sha256)
    return BertBackbone(checkpoint, temperature=config.temperature, dtype=resolve_precision(config.precision, device), device=device)
