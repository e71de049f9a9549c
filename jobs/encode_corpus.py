"""The model-bound half of the line: clusters and context of a first ingest, then every staged shard through the encoder.

Clusters and context belong to a collection, not to a run: the first ingest draws them, later ones carry them over unchanged, so that new
documents and old ones stand
in the same corpus. What a killed run finished is found in ``pending/`` and taken over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Float32, Int32

from pipeline import durable
from pipeline.cluster.assignment import ClusterAssigner, assign
from pipeline.cluster.asymmetric_kmeans import train_clusters
from pipeline.cluster.queries import query_side
from pipeline.cluster.sampling import sample_rows
from pipeline.cluster.store import Clusters
from pipeline.config import IngestConfig
from pipeline.context.store import ContextSet, build_context
from pipeline.encode.documents import DocumentEncoder, encode_shard, require_context_fit, require_fit
from pipeline.encode.shards import finished_shards, write_encoded_shard
from pipeline.errors import FingerprintMismatchError
from pipeline.index.layout import CLUSTERS_ARROW, CONTEXT_ARROW, CollectionLayout
from pipeline.manifest import Manifest
from pipeline.model.backbone import Backbone, load_backbone
from pipeline.model.context_encoder import ContextEncoder
from pipeline.model.names import describe_model
from pipeline.model.static_embeddings import StaticEmbedder, StaticFit
from pipeline.types import ProgressListener, TextEmbedder

SAMPLE_TEXT_CHARACTERS = 2_048
"""Opening of a document that surrogate and first stage may read: some 500 tokens, twice what either uses."""

TYPICAL_TOKENS_A_CHARACTER = 0.25
"""English prose in WordPiece; stands in until the first shard has been counted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """Both stages of the encoder in memory, found to fit the settings."""

    backbone: Backbone
    first_stage: ContextEncoder


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusView:
    """What all documents of a collection share: its clusters, its context and where both are stored."""

    clusters: Clusters
    context: ContextSet
    folder: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedCorpus:
    """What the encoder left in ``pending/encoded``: what this run added, from ``first_shard`` on, in ``seconds``."""

    encoder_fingerprint: str
    vector_dim: int
    view: CorpusView
    first_shard: int
    documents: int
    tokens: int
    seconds: float


def load_stages(config: IngestConfig) -> Stages:
    """Load the model; raise :class:`ConfigError` for dimensions, layers, lengths or prefixes that it has no room for."""
    backbone = load_backbone(config.encoder)
    require_fit(config.encoder, backbone)
    require_context_fit(config, backbone)
    return Stages(backbone=backbone, first_stage=ContextEncoder.of(backbone, config.encoder, config.context))


def encode_corpus(
    layout: CollectionLayout,
    published: Manifest | None,
    staged: Sequence[Path],
    staged_characters: int,
    config: IngestConfig,
    progress: ProgressListener,
    stages: Stages | None = None,
) -> EncodedCorpus:
    """Run the stages that need a model over the staged shards; returns when every one is in ``pending/encoded``.

    ``stages`` = None loads them. Raises :class:`FingerprintMismatchError` before any shard for another model than the collection's.
    """
    stages = stages or load_stages(config)
    view, embedder, known = _corpus_view(layout, published, staged, config, stages, progress)
    encoder = DocumentEncoder(config.encoder, view.context, stages.backbone)
    if published:
        _require_same_encoder(published, encoder)
    assign_rows = _assigning(ClusterAssigner(view.clusters, embedder), known)
    first = max(finished_shards(layout.encoded_folder), default=-1) + 1
    meter = _TokenMeter(staged_characters, progress)
    documents = 0
    for number, shard in enumerate(staged, start=first):
        rows = pq.read_table(shard)
        encoded_documents, encoded_chunks = encode_shard(rows, encoder, assign_rows, meter.add)
        write_encoded_shard(layout.encoded_folder, number, encoded_documents, encoded_chunks)
        documents += rows.num_rows
        meter.close_shard(sum(map(len, rows.column("text").to_pylist())))
    return EncodedCorpus(
        encoder_fingerprint=encoder.fingerprint,
        vector_dim=encoder.vector_dim,
        view=view,
        first_shard=first,
        documents=documents,
        tokens=meter.tokens,
        seconds=meter.seconds,
    )


def require_same_model(layout: CollectionLayout, published: Manifest, config: IngestConfig) -> Stages:
    """Load the model and return it; raise :class:`FingerprintMismatchError` where it is not the one the collection was built with."""
    stages = load_stages(config)
    with layout.naming_damage():
        context = ContextSet.read(layout.generation_folder(published.generation) / CONTEXT_ARROW) if config.encoder.use_context else None
    _require_same_encoder(published, DocumentEncoder(config.encoder, context, stages.backbone))
    return stages


def _require_same_encoder(published: Manifest, encoder: DocumentEncoder) -> None:
    if published.fingerprints["encoder"] != encoder.fingerprint:
        built_with, got = (describe_model(model) for model in (published.settings["encoder"]["model"], encoder.config.model))
        raise FingerprintMismatchError(
            f"collection {published.collection!r} must keep the model it was built with ({built_with}), "
            f"got other weights, tokenizer or context from {got}; restore them, or use a new collection"
        )


class _TokenMeter:
    """Counts tokens as they leave the encoder; how many there will be is estimated from the characters, better with every shard."""

    def __init__(self, total_characters: int, progress: ProgressListener) -> None:
        self.tokens = 0
        self._characters = 0
        self._total_characters = total_characters
        self._tokens_a_character = TYPICAL_TOKENS_A_CHARACTER
        self._progress = progress
        self._started_seconds = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started_seconds

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        expected = round(self._total_characters * self._tokens_a_character)
        self._progress("encode", self.tokens, max(expected, self.tokens), "tokens")

    def close_shard(self, characters: int) -> None:
        self._characters += characters
        self._tokens_a_character = self.tokens / max(1, self._characters)
        self.add(0)


def _corpus_view(
    layout: CollectionLayout,
    published: Manifest | None,
    staged: Sequence[Path],
    config: IngestConfig,
    stages: Stages,
    progress: ProgressListener,
) -> tuple[CorpusView, TextEmbedder, dict[str, int]]:
    folder = layout.generation_folder(published.generation) if published else layout.pending_folder
    if published or layout.pending_context_path.exists():
        with layout.naming_damage():
            clusters, context = Clusters.read(folder / CLUSTERS_ARROW), ContextSet.read(folder / CONTEXT_ARROW)
        view = CorpusView(clusters=clusters, context=context, folder=folder)
        if not published:
            _require_own_context(layout, view.context, stages.first_stage)
        return view, _stored_embedder(view.clusters, config, stages), {}
    return _draw_corpus_view(layout, staged, config, stages, progress)


def _require_own_context(layout: CollectionLayout, context: ContextSet, first_stage: ContextEncoder) -> None:
    """Raise :class:`FingerprintMismatchError` where a run to be resumed drew its context with another model."""
    if context.first_stage_fingerprint != first_stage.fingerprint:
        raise FingerprintMismatchError(
            f"an ingest of {layout.name!r} that was interrupted must go on with the model it began with, got other weights; "
            f"restore them, or remove {layout.pending_folder} to begin anew"
        )


def _draw_corpus_view(
    layout: CollectionLayout,
    staged: Sequence[Path],
    config: IngestConfig,
    stages: Stages,
    progress: ProgressListener,
) -> tuple[CorpusView, TextEmbedder, dict[str, int]]:
    progress("cluster", 0, None, "documents")
    sample = sample_rows(
        map(pq.read_table, staged), config.cluster.max_sample_documents, config.cluster.seed, max_text_characters=SAMPLE_TEXT_CHARACTERS
    )
    texts: list[str] = sample.column("text").to_pylist()
    embedder, state = _new_embedder(texts, config, stages)
    queries = query_side(sample.column("title").to_pylist(), sample.column("query").to_pylist(), texts)
    phi_NV, psi_NV = embedder.embed(texts), embedder.embed(queries)
    clusters = train_clusters(phi_NV, psi_NV, config.cluster, surrogate_fingerprint=embedder.fingerprint, surrogate_state=state)
    assignments_N = assign(clusters, phi_NV, psi_NV)
    progress("cluster", sample.num_rows, sample.num_rows, "documents")
    drawn = min(config.context.num_documents, sample.num_rows)
    progress("context", 0, drawn, "documents")
    context = build_context(sample, assignments_N, config.context, stages.first_stage.embed, stages.first_stage.fingerprint)
    progress("context", drawn, drawn, "documents")
    # The context is written last: where it stands, both are whole.
    clusters.write(layout.pending_clusters_path)
    durable.commit_point("clusters-written")
    context.write(layout.pending_context_path)
    durable.commit_point("context-written")
    known = dict(zip(sample.column("doc_id").to_pylist(), assignments_N.tolist(), strict=True))
    return CorpusView(clusters=clusters, context=context, folder=layout.pending_folder), embedder, known


def _assigning(assigner: ClusterAssigner, known: Mapping[str, int]) -> Callable[[pa.Table], Int32[np.ndarray, " N"]]:
    """Assign rows to clusters; documents of the sample have been assigned when it was clustered."""

    def assign_rows(rows: pa.Table) -> Int32[np.ndarray, " N"]:
        assignments_N = np.array([known.get(doc_id, -1) for doc_id in rows.column("doc_id").to_pylist()], dtype=np.int32)
        unknown = np.flatnonzero(assignments_N < 0)
        if len(unknown):
            assignments_N[unknown] = assigner.assign_rows(rows.take(pa.array(unknown)))
        return assignments_N

    return assign_rows


def _new_embedder(texts: Sequence[str], config: IngestConfig, stages: Stages) -> tuple[TextEmbedder, dict[str, np.ndarray]]:
    if config.cluster.surrogate == "encoder":
        return _NormalisedFirstStage(stages.first_stage), {}
    embedder, fit = StaticEmbedder.fitted_to(stages.backbone.token_embeddings, stages.backbone.tokenizer, texts)
    return embedder, fit.to_arrays()


def _stored_embedder(clusters: Clusters, config: IngestConfig, stages: Stages) -> TextEmbedder:
    if config.cluster.surrogate == "encoder":
        return _NormalisedFirstStage(stages.first_stage)
    return StaticEmbedder(stages.backbone.token_embeddings, stages.backbone.tokenizer, StaticFit.from_arrays(clusters.surrogate_state))


class _NormalisedFirstStage:
    """The first stage as a surrogate: φ and ψ of unit length, at the price of one more forward pass a document."""

    def __init__(self, first_stage: ContextEncoder) -> None:
        self._first_stage = first_stage

    @property
    def fingerprint(self) -> str:
        return self._first_stage.fingerprint

    @property
    def vector_dim(self) -> int:
        return self._first_stage.embedding_dim

    def embed(self, texts: Sequence[str]) -> Float32[np.ndarray, "N V"]:
        vectors_NV = self._first_stage.embed(list(texts))
        lengths_N1 = np.linalg.norm(vectors_NV, axis=1, keepdims=True)
        return np.divide(vectors_NV, lengths_N1, out=np.zeros_like(vectors_NV), where=lengths_N1 > 0)
