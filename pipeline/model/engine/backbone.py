"""What every encoder that shows states of tokens offers to the rest of the pipeline.

A backbone turns token ids into last hidden states and knows nothing of chunks or pooling.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Set
from copy import copy
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.engine.projection import Projection
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from jaxtyping import Float, Float32, Int64
from tokenizers import Tokenizer

Ids = Int64[np.ndarray, "B T"]
Lengths = Int64[np.ndarray, " B"]
ContextRows = Float32[np.ndarray, "*B C D"] | None


class Backbone(ABC):
    """A bidirectional encoder in inference mode.

    ``tokenizer``: the fast one, without padding and truncation. ``cls_id``: the id of [CLS], else BOS, None
    where the tokenizer has neither and rows begin with their text. ``landmark_id``: that of SEP, else EOS.
    ``model_dim``: the width of a hidden state. ``context_dim`` and ``max_context``: the width of the context
    vectors it reads, and how many at most, None for any number. ``max_positions``: the longest row of text.
    ``weights_fingerprint``: of weights, tokenizer and configuration. ``own_tensors``: the checkpoint's that
    are not the transformer's, such as a landmark mixer's. ``projection``: what stands behind the pooling;
    most have nothing. ``own_first_stage``: the backbone that embeds context documents, where the checkpoint
    holds one of its own (CDE §4.2). ``takes_document_prefix``: as a first stage it was trained behind it.
    ``of_queries``: what reads queries, where that is another model.
    ``lacks``: the settings of :class:`cairn.pipeline.config.EncoderConfig` that it cannot follow.
    """

    tokenizer: Tokenizer
    cls_id: int | None
    landmark_id: int
    pad_id: int
    model_dim: int
    context_dim: int
    max_context: int | None = None
    max_positions: int
    weights_fingerprint: str
    config: Mapping[str, Any]
    own_tensors: Mapping[str, torch.Tensor]
    dtype: torch.dtype
    device: torch.device
    projection: Projection | None = None
    own_first_stage: Backbone | None = None
    takes_document_prefix: bool = False
    of_queries: Backbone | None = None
    lacks: tuple[str, ...] = ()

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self.tokenizer, self.config = checkpoint.tokenizer, checkpoint.config
        self.cls_id, self.landmark_id = checkpoint.cls_id, checkpoint.landmark_id
        self.pad_id = checkpoint.pad_id
        self.weights_fingerprint, self.own_tensors = checkpoint.fingerprint, checkpoint.own_tensors
        self.dtype, self.device = dtype, device

    @property
    def embedding_dim(self) -> int:
        """Return the width of a chunk's embedding, after ``project``."""
        return self.model_dim if self.projection is None else self.projection.output_dim

    @property
    def first_stage(self) -> Backbone:
        """Return the backbone that embeds the context: one of its own, or itself without its projection."""
        if self.own_first_stage is not None:
            return self.own_first_stage
        if self.projection is None:
            return self
        unprojected = copy(self)
        unprojected.projection = None
        return unprojected

    def project(self, pooled_MD: Float32[torch.Tensor, "M D"]) -> Float32[torch.Tensor, "M E"]:
        """Apply what a checkpoint has behind its pooling."""
        return pooled_MD if self.projection is None else self.projection(pooled_MD)

    @property
    @abstractmethod
    def token_embeddings(self) -> Float32[np.ndarray, "vocabulary D"]:
        """Return the input table, one row a token id."""

    @abstractmethod
    def hidden_states(
        self, ids_BT: Ids, lengths_B: Lengths, context_CD: ContextRows = None, temperature: float = 1.0
    ) -> Float[torch.Tensor, "B T D"]:
        """Return the last hidden states of the text; positions at and after a row's length hold no meaning.

        With a context, its vectors stand before every row's text, or each row's own before its text, as input
        embeddings (CDE eq. 5 and 6): no position embedding and no rotation, so their order does not matter
        and text positions still start at 0; then token type 0 where the family has types, and the embedding
        norm, as for tokens. Where layers are local, only global ones show the context. Their own outputs are
        not returned.

        ``temperature`` divides every attention logit (TempScale: softmax(QKᵀ / (τ √d)); Zhou et al.,
        "Length-Induced Embedding Collapse"): below 1 attention is sharper, against the collapse of long texts
        onto one direction. One τ serves all layers of a call.
        """

    def require_room(self, num_tokens: int) -> None:
        """Raise :class:`ModelError` for rows that are longer than the model reads."""
        if num_tokens > self.max_positions:
            raise ModelError(
                f"a row must have at most {self.max_positions} tokens, got {num_tokens}; choose a smaller "
                "window"
            )


UnderT = TypeVar("UnderT", bound=Backbone)


class BackboneOver(Backbone, Generic[UnderT]):
    """A backbone that stands on another one, and has of it all attributes but its ``own``."""

    def __init__(self, backbone: UnderT, own: Set[str]) -> None:
        self._backbone = backbone
        for name in Backbone.__annotations__.keys() - own:
            setattr(self, name, getattr(backbone, name))

    @property
    def token_embeddings(self) -> Float32[np.ndarray, "vocabulary D"]:
        """Return the input table, one row a token id."""
        return self._backbone.token_embeddings
