"""The contexts an encoder is evaluated with: the corpus's own, as an ingest draws it, and a random one.

A random context is as many documents of random words of the vocabulary, embedded like any other (Morris &
Rush 2024 compare with random strings): what is gained beyond it comes from the corpus and not from having
read something.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from copy import copy
from typing import Final

import numpy as np
import pyarrow as pa
from cairn.pipeline.cluster.assignment import assign
from cairn.pipeline.cluster.asymmetric_kmeans import train_clusters
from cairn.pipeline.cluster.queries import query_side
from cairn.pipeline.config import ClusterConfig, ContextConfig, EncoderConfig
from cairn.pipeline.context.store import ContextSet, build_context
from cairn.pipeline.encode.documents import with_vectors
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet
from cairn.pipeline.model.context_encoder import ContextEncoder
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.engine.transformer import Transformer
from cairn.pipeline.model.static_embeddings import StaticEmbedder
from typing_extensions import TypeIs

RANDOM_TOKENS: Final = 64
"""Length of a random document: that of a chunk."""


def corpus_context(
    judged: RetrievalSet, config: ContextConfig, backbone: Backbone, encoder: EncoderConfig
) -> ContextSet:
    """Cluster the documents and draw the context from them; queries of the set play no part."""
    texts = judged.texts
    embedder, state = StaticEmbedder.fitted_to(backbone.token_embeddings, backbone.tokenizer, texts)
    phi_NV = embedder.embed(texts)
    psi_NV = embedder.embed(query_side(judged.titles, [None] * len(texts), texts))
    clusters = train_clusters(
        phi_NV,
        psi_NV,
        ClusterConfig(),
        surrogate_fingerprint=embedder.fingerprint,
        surrogate_state=state.to_arrays(),
    )
    return _build(
        judged.doc_ids, judged.titles, texts, assign(clusters, phi_NV, psi_NV), config, backbone, encoder
    )


def tied_context(
    judged: RetrievalSet, config: ContextConfig, backbone: Backbone, encoder: EncoderConfig
) -> ContextSet:
    """Make the corpus's context with the second stage in the place of a first stage of its own."""
    assert has_own_first_stage(backbone), "a model without one is tied already"
    tied = copy(backbone)
    tied.own_first_stage = None
    return corpus_context(judged, config, tied, encoder)


def has_own_first_stage(backbone: Backbone) -> TypeIs[Transformer]:
    """Say whether a transformer embeds its context with layers of its own, beside CDE's two backbones."""
    return isinstance(backbone, Transformer) and backbone.own_first_stage is not None


def random_context(
    judged: RetrievalSet, config: ContextConfig, backbone: Backbone, encoder: EncoderConfig
) -> ContextSet:
    """Make as many documents of random words as the corpus's context has."""
    generator = np.random.default_rng(config.seed)
    num_documents = min(config.context_documents, len(judged.doc_ids))
    ids = generator.integers(0, backbone.tokenizer.get_vocab_size(), (num_documents, RANDOM_TOKENS)).tolist()
    texts = [backbone.tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    return _build(
        [f"random-{number}" for number in range(num_documents)],
        [""] * num_documents,
        texts,
        np.zeros(num_documents, np.int32),
        config,
        backbone,
        encoder,
    )


def _build(
    doc_ids: Sequence[str],
    titles: Sequence[str],
    texts: Sequence[str],
    assignments_N: np.ndarray,
    config: ContextConfig,
    backbone: Backbone,
    encoder: EncoderConfig,
) -> ContextSet:
    first_stage = ContextEncoder.of(backbone, encoder, config)
    sample = pa.table(
        {
            "doc_id": pa.array(doc_ids, pa.string()),
            "title": pa.array(titles, pa.large_string()),
            "text": pa.array(texts, pa.large_string()),
            "content_sha256": [hashlib.sha256(text.encode()).hexdigest() for text in texts],
        }
    )
    context = build_context(sample, assignments_N, config, first_stage.embed, first_stage.fingerprint)
    return with_vectors(context, sample, encoder, backbone)
