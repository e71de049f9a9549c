"""What every transformer offers to the rest of the pipeline.

A backbone turns token ids into last hidden states and knows nothing of chunks or pooling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from tokenizers import Tokenizer


@runtime_checkable
class Projection(Protocol):
    """What a checkpoint has between pooling and the vector."""

    @property
    def output_dim(self) -> int:
        """Return the width of what it gives."""
        ...

    def __call__(self, pooled_MD: Float32[torch.Tensor, "M D"], /) -> Float32[torch.Tensor, "M E"]:
        """Project pooled embeddings."""
        ...


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
    def config(self) -> Mapping[str, Any]:
        """Return what config.json says."""
        ...

    @property
    def own_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the checkpoint's tensors that are not the transformer's, such as a landmark mixer's."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Return what hidden states are computed in."""
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
