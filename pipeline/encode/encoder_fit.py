"""Whether settings, prefixes and a context fit a model: refused before anything is encoded."""

from __future__ import annotations

from typing import Final

import numpy as np
from cairn.pipeline.config import EncoderConfig, IngestConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.context.whitening import Whitening
from cairn.pipeline.encode.prefixes import Prefix
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.landmark_reader import require_transformer
from cairn.pipeline.model.latent_attention import require_latent_attention
from cairn.pipeline.model.pooling import require_dims
from cairn.pipeline.poolings import pooling_rule
from jaxtyping import Float32

_LONGER_ROWS: Final = {
    "chunk": ", or choose attention full or landmark, whose rows are windows of many chunks"
}


def require_fit(config: EncoderConfig, backbone: Backbone) -> int:
    """Return the width of the vectors.

    Raise for settings the model has no room for, or an attention it cannot have.
    """
    max_positions, num_special = backbone.max_positions, 1 if backbone.cls_id is None else 2
    rule = pooling_rule(config.pooling)
    if backbone.cls_id is None and rule.needs_cls:
        raise ConfigError(
            f"pooling {config.pooling} must go with a model that has [CLS] or BOS, got one without; "
            "choose last, lmk or mean"
        )
    if config.attention == "landmark":
        require_transformer(backbone)
    if config.attention != "full" and config.longest_chunk_tokens + num_special > max_positions:
        raise ConfigError(
            "landmark_interval and whole_text_tokens must leave special tokens room in the model's "
            f"{max_positions} positions, "
            f"got {config.longest_chunk_tokens}; choose at most {max_positions - num_special}"
        )
    if config.attention == "full" and config.window_tokens > max_positions:
        raise ConfigError(
            f"window_tokens must be at most the model's {max_positions} positions, got "
            f"{config.window_tokens}; "
            "choose a smaller window"
        )
    room = min(config.window_tokens, max_positions) - config.longest_chunk_tokens - num_special
    for name, prefix in zip(("document_prefix", "query_prefix"), prefixes_of(config, backbone), strict=True):
        if len(prefix.ids) > room:
            raise ConfigError(
                f"{name} must leave a chunk of {config.longest_chunk_tokens} tokens room in its row, for "
                f"which it may have {room}, "
                f"got {len(prefix.ids)}; shorten it, or choose a smaller landmark_interval"
            )
    longest_row = config.window_tokens
    if config.attention == "chunk":
        longest_row = (
            config.longest_chunk_tokens
            + num_special
            + max(len(prefix.ids) for prefix in prefixes_of(config, backbone))
        )
    if config.temperature_by_length and config.temperature_by_length[-1][0] > longest_row:
        raise ConfigError(
            f"temperature_by_length must name lengths that rows reach, at most {longest_row} tokens with "
            f"attention {config.attention}, "
            f"got {config.temperature_by_length[-1][0]}; leave the longer ones "
            f"out{_LONGER_ROWS.get(config.attention, '')}"
        )
    if rule.needs_latent_attention:
        require_latent_attention(backbone)
    return require_dims(config.dims, backbone.embedding_dim)


def require_context_fit(config: IngestConfig, backbone: Backbone) -> None:
    """Raise :class:`ConfigError` for a context of more documents than the model reads."""
    most = backbone.max_context
    if config.encoder.use_context and most is not None and config.context.context_documents > most:
        raise ConfigError(
            f"the number of context documents must be at most the model's {most}, got "
            f"{config.context.context_documents}; "
            f"choose {most}, or go on without context"
        )


def prefixes_of(config: EncoderConfig, backbone: Backbone) -> tuple[Prefix, Prefix]:
    """Return the prefixes of documents and of queries, tokenised."""
    return Prefix.of(config.document_prefix, backbone.tokenizer), Prefix.of(
        config.query_prefix, backbone.tokenizer
    )


def whitening_of(config: EncoderConfig, context: ContextSet | None, vector_dim: int) -> Whitening | None:
    """Return the map that the context's sample gives, None without ``whitening``.

    Raise :class:`ConfigError` for a context that has no sample of this width.
    """
    if not config.whitening:
        return None
    if context is None or context.vectors_CV is None:
        raise ConfigError(
            "whitening must come with a context that holds vectors of the encoder, got none; draw one with "
            "these settings, or set whitening to 0"
        )
    if context.vectors_CV.shape[1] != vector_dim:
        raise ConfigError(
            f"whitening must have a context of vectors of {vector_dim} numbers, got "
            f"{context.vectors_CV.shape[1]}; draw it again with these settings"
        )
    return Whitening.of(context.vectors_CV, config.whitening)


def usable_context(
    config: EncoderConfig, context: ContextSet | None, backbone: Backbone
) -> Float32[np.ndarray, "C D"] | None:
    """Return the context's embeddings as the model reads them, None without ``use_context``.

    Raise :class:`ConfigError` for a context that the model cannot read.
    """
    if not config.use_context:
        return None
    if context is None:
        raise ConfigError(
            "use_context must come with a context, got none; draw one first, or set use_context to false"
        )
    # A copy: a mapped file is read-only, which torch refuses.
    embeddings_CD = np.array(context.embeddings_CD, np.float32, order="C")
    if (
        embeddings_CD.ndim != 2
        or embeddings_CD.shape[0] == 0
        or embeddings_CD.shape[1] != backbone.context_dim
    ):
        raise ConfigError(
            f"the context must be one or more rows of {backbone.context_dim} numbers, got shape "
            f"{embeddings_CD.shape}; "
            "it was made by another model"
        )
    if backbone.max_context is not None and len(embeddings_CD) > backbone.max_context:
        raise ConfigError(
            f"the context must have at most the {backbone.max_context} vectors the model reads, got "
            f"{len(embeddings_CD)}; "
            "draw one of fewer documents"
        )
    if not np.isfinite(embeddings_CD).all():
        raise ModelError(
            "the context's embeddings must be finite, got some that are not; draw the context again"
        )
    return embeddings_CD
