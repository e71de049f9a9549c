"""What turns texts into vectors, whatever stands behind it: the one place that asks for the kind of a model.

    https://HOST/v1/embeddings#NAME ─▶ EndpointEncoder    a vector a text, from a server
    a name or a folder ──────────────▶ DocumentEncoder    states of tokens, from a backbone in this process
    vectors that documents bring ────▶ GivenEncoder       either of these for queries, or nothing

All have ``config``, ``tokenizer``, ``vector_dim``, the ``fingerprint`` of their space, ``outage`` (why no
query can be encoded now, else None), ``encode``, ``encode_queries``, ``encode_query_tokens`` and ``close``.
"""

from __future__ import annotations

from dataclasses import replace

from cairn.pipeline.config import NO_MODEL, EncoderConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.encode.encoder_fit import require_fit
from cairn.pipeline.encode.endpoint import EndpointEncoder, require_endpoint_fit
from cairn.pipeline.encode.endpoint_requests import Patience
from cairn.pipeline.encode.given import GivenEncoder, require_given_fit
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.folders.names import is_endpoint
from cairn.pipeline.token_vectors.codebook import TokenCoder

Encoder = DocumentEncoder | EndpointEncoder | GivenEncoder


def load_cutter(config: EncoderConfig) -> Backbone:
    """Load the backbone whose tokenizer cuts texts: the model itself, or the packaged one.

    The latter for an endpoint, and where documents bring their vectors.
    """
    is_elsewhere = is_endpoint(config.model) or config.given_dims is not None
    return load_backbone(EncoderConfig() if is_elsewhere else config)


def require_encoder_fit(config: EncoderConfig, backbone: Backbone) -> None:
    """Raise :class:`ConfigError` for settings that the model, an endpoint or given vectors cannot have."""
    if config.given_dims is not None:
        require_given_fit(config)
        if config.given_dims:
            open_encoder(config).close()
    elif is_endpoint(config.model):
        require_endpoint_fit(config)
    else:
        require_fit(config, backbone)


def open_encoder(
    config: EncoderConfig,
    context: ContextSet | None = None,
    backbone: Backbone | None = None,
    token_codebook: TokenCoder | None = None,
    patience: Patience | None = None,
) -> Encoder:
    """Return the encoder that settings name; ``backbone`` is its model where that is in memory already.

    ``patience`` is that for servers that documents are sent to.
    """
    if config.given_dims is not None:
        of_queries = replace(config, given_dims=None, token_bytes=0) if config.model != NO_MODEL else None
        own = None if of_queries is None else _open_model(of_queries, context, None, None, patience)
        return GivenEncoder(config, own, token_codebook)
    return _open_model(config, context, backbone, token_codebook, patience)


def _open_model(
    config: EncoderConfig,
    context: ContextSet | None,
    backbone: Backbone | None,
    token_codebook: TokenCoder | None,
    patience: Patience | None,
) -> DocumentEncoder | EndpointEncoder:
    if is_endpoint(config.model):
        return EndpointEncoder(config, context, patience, token_codebook)
    return DocumentEncoder(config, context, backbone, token_codebook, patience)
