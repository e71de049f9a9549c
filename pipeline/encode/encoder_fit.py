"""Whether settings, prefixes and a context fit a model: refused before anything is encoded."""

from __future__ import annotations

import numpy as np
from cairn.pipeline.config import LINE_TOKENS, EncoderConfig, IngestConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.encode.describe import require_describer
from cairn.pipeline.encode.tokenization import Prefix
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.model.document_encoder import require_dims
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.folders.own_tensors import LANDMARK_MIXER, NULL_CONTEXT
from cairn.pipeline.model.latent_attention import require_latent_attention
from cairn.pipeline.poolings import pooling_rule
from jaxtyping import Float32


def require_fit(config: EncoderConfig, backbone: Backbone) -> int:
    """Return the width of the vectors; raise for settings the model has no room for or cannot have."""
    _require_followed(config, backbone)
    require_describer(config)
    max_positions, num_special = backbone.max_positions, 1 if backbone.cls_id is None else 2
    rule = pooling_rule(config.pooling)
    if backbone.cls_id is None and rule.needs_cls:
        raise ConfigError(
            f"pooling {config.pooling} must go with a model that has [CLS] or BOS, got one without; "
            "choose last, lmk or mean"
        )
    if config.attention != "full" and config.longest_chunk_tokens + num_special > max_positions:
        raise ConfigError(
            "landmark_interval and whole_text_tokens must leave special tokens room in the model's "
            f"{max_positions} positions, "
            f"got {config.longest_chunk_tokens}; choose at most {max_positions - num_special}"
        )
    if config.attention == "full" and config.window_tokens > max_positions:
        raise ConfigError(
            f"window_tokens must be at most the model's {max_positions} positions, got "
            f"{config.window_tokens}; choose a smaller window"
        )
    room = min(config.window_tokens, max_positions) - config.longest_chunk_tokens - num_special
    prefixes = prefixes_of(config, backbone)
    for name, prefix in zip(("document_prefix", "query_prefix"), prefixes, strict=True):
        if len(prefix.ids) > room:
            raise ConfigError(
                f"{name} must leave a chunk of {config.longest_chunk_tokens} tokens room in its row, for "
                f"which it may have {room}, "
                f"got {len(prefix.ids)}; shorten it, or choose a smaller landmark_interval"
            )
    room -= max(len(prefix.ids) for prefix in prefixes)
    if config.head_tokens and config.head_tokens + 1 > room:
        what = f"title_tokens and the {LINE_TOKENS} of a line" if config.describe else "title_tokens"
        raise ConfigError(
            f"{what} must leave a chunk of {config.longest_chunk_tokens} tokens room in its row, for "
            f"which they may be {max(0, room - 1)}, got {config.head_tokens}; choose fewer, or a smaller "
            "landmark_interval"
        )
    has_others = backbone.own_tensors.keys() & {NULL_CONTEXT} or any(
        name.startswith(LANDMARK_MIXER) for name in backbone.own_tensors
    )
    if config.document_context and (config.use_context or backbone.projection is not None or has_others):
        raise ConfigError(
            "document_context must go with a transformer alone that reads no context of the corpus, got "
            f"{config.document_context} with another; leave it out"
        )
    if rule.needs_latent_attention:
        require_latent_attention(backbone)
    return require_dims(config.dims, backbone.embedding_dim)


def _require_followed(config: EncoderConfig, backbone: Backbone) -> None:
    """Raise :class:`ConfigError` for a setting that the model cannot follow."""
    default = EncoderConfig()
    for name in backbone.lacks:
        if getattr(config, name) != getattr(default, name):
            raise ConfigError(
                f"{name} must be left out with a model of type {backbone.config.get('model_type')}, got "
                f"{getattr(config, name)}; choose a model of one of Cairn's own families"
            )


def require_context_fit(config: IngestConfig, backbone: Backbone) -> None:
    """Raise :class:`ConfigError` for a context of more documents than the model reads."""
    most = backbone.max_context
    if config.encoder.use_context and most is not None and config.context.context_documents > most:
        raise ConfigError(
            f"the number of context documents must be at most the model's {most}, got "
            f"{config.context.context_documents}; choose {most}, or go on without context"
        )


def prefixes_of(config: EncoderConfig, backbone: Backbone) -> tuple[Prefix, Prefix]:
    """Return the prefixes of documents and of queries, tokenised."""
    tokenizer = backbone.tokenizer
    return Prefix.of(config.document_prefix, tokenizer), Prefix.of(config.query_prefix, tokenizer)


def usable_context(
    config: EncoderConfig, context: ContextSet | None, backbone: Backbone
) -> Float32[np.ndarray, "C D"] | None:
    """Return the context's embeddings as the model reads them; without ``use_context`` its null token.

    None where it has none. Raise :class:`ConfigError` for a context that the model cannot read.
    """
    if not config.use_context:
        return null_context(backbone)
    if context is None:
        raise ConfigError(
            "use_context must come with a context, got none; draw one first, or set use_context to false"
        )
    # A copy: a mapped file is read-only, which torch refuses.
    embeddings_CD = np.array(context.embeddings_CD, np.float32, order="C")
    if not len(embeddings_CD) or embeddings_CD.shape[1] != backbone.context_dim:
        raise ConfigError(
            f"the context must be one or more rows of {backbone.context_dim} numbers, got shape "
            f"{embeddings_CD.shape}; it was made by another model, or for one that reads no context"
        )
    if backbone.max_context is not None and len(embeddings_CD) > backbone.max_context:
        raise ConfigError(
            f"the context must have at most the {backbone.max_context} vectors the model reads, got "
            f"{len(embeddings_CD)}; draw one of fewer documents"
        )
    return embeddings_CD


def null_context(backbone: Backbone) -> Float32[np.ndarray, "1 D"] | None:
    """Return what stands before a text without a context (CDE §4.2), None for a model not trained for it.

    A null token that does not fit raises :class:`ModelError`.
    """
    null_token = backbone.own_tensors.get(NULL_CONTEXT)
    if null_token is None:
        return None
    if null_token.shape != (backbone.context_dim,) or not bool(null_token.isfinite().all()):
        raise ModelError(
            f"{NULL_CONTEXT} must be {backbone.context_dim} finite numbers, got others of shape "
            f"{tuple(null_token.shape)}; train the model again"
        )
    return null_token.float().cpu().numpy()[None]
