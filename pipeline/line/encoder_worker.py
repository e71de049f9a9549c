"""What encodes staged shards: by itself an engine in this process; a Ray cluster runs many as actors.

    load ─▶ embed_sample, draw_context    once for a collection, by one worker
    load ─▶ begin ─▶ encode_shard, …      by every worker

A worker loads torch and the model at its first call, is given Parquet bytes and returns Parquet bytes. So it
needs no disk in common with the driver. Where it sees the driver's folder, it leaves the files there under
names of its own, and returns those: what crosses the network is a tenth. Where it reaches the collection's
object store, it may be told to leave them there. The driver alone gives them the names that count, so a
worker that was believed dead cannot damage anything when it wakes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from cairn.pipeline import durable
from cairn.pipeline.cluster.assignment import ClusterAssigner
from cairn.pipeline.cluster.queries import query_side
from cairn.pipeline.cluster.store import Clusters
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.context.store import ContextSet, build_context
from cairn.pipeline.encode.shards import as_parquet, as_stored, shard_tables
from cairn.pipeline.errors import CairnError
from cairn.pipeline.index.segments.parts import RunTasks
from cairn.pipeline.index.worker_files import PendingArea
from cairn.pipeline.line.engine import Begun, CorpusView, EmbeddedSample, EncodedShard, Loaded
from cairn.pipeline.token_vectors.projection import TokenProjection
from cairn.pipeline.types import TextEmbedder
from jaxtyping import Float32, Int32

if TYPE_CHECKING:  # torch comes in with the first call
    from cairn.pipeline.encode.documents import DocumentEncoder
    from cairn.pipeline.model.context_encoder import ContextEncoder
    from cairn.pipeline.model.engine.backbone import Backbone

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """Both stages of the encoder in memory, found to fit the settings."""

    backbone: Backbone
    first_stage: ContextEncoder
    token_projection: TokenProjection | None


def load_stages(config: IngestConfig) -> Stages:
    """Load the model; raise :class:`ConfigError` for dimensions, layers or lengths that do not fit it."""
    from cairn.pipeline.encode.encoder_fit import require_context_fit, require_fit
    from cairn.pipeline.model.backbone_loader import load_backbone, token_projection_of
    from cairn.pipeline.model.context_encoder import ContextEncoder

    backbone = load_backbone(config.encoder)
    require_fit(config.encoder, backbone)
    require_context_fit(config, backbone)
    return Stages(
        backbone=backbone,
        first_stage=ContextEncoder.of(backbone, config.encoder, config.context),
        token_projection=token_projection_of(config.encoder, backbone),
    )


class EncoderWorker:
    """The model of one ingest and what it is asked: an :class:`cairn.pipeline.line.engine.Engine`.

    ``num_threads`` = None leaves threads as the process has them.
    """

    def __init__(self, config: IngestConfig, num_threads: int | None = None) -> None:
        self._config = config
        self._num_threads = num_threads
        self._stages: Stages | None = None
        self._encoder: DocumentEncoder | None = None
        self._view: CorpusView | None = None
        self._assigner: ClusterAssigner | None = None
        self._folder: Path | None = None
        self._area: PendingArea | None = None

    def load(self) -> Loaded:
        """See :class:`cairn.pipeline.line.engine.Engine`."""
        stages = self._loaded()
        return Loaded(
            package_version=version("cairn-index"),
            first_stage_fingerprint=stages.first_stage.fingerprint,
            token_projection=stages.token_projection,
            host=socket.gethostname(),
        )

    def embed_sample(self, sample: pa.Table) -> EmbeddedSample:
        """Embed documents and their queries with the surrogate, which is fitted to the sample."""
        texts: list[str] = sample.column("text").to_pylist()
        embedder, state = self._new_embedder(texts)
        queries = query_side(sample.column("title").to_pylist(), sample.column("query").to_pylist(), texts)
        return EmbeddedSample(
            phi_NV=embedder.embed(texts),
            psi_NV=embedder.embed(queries),
            surrogate_fingerprint=embedder.fingerprint,
            surrogate_state=state,
        )

    def draw_context(self, sample: pa.Table, assignments_N: Int32[np.ndarray, " N"]) -> ContextSet:
        """Draw the context from a clustered sample and embed it, for whitening with the second stage, too."""
        from cairn.pipeline.encode.documents import with_vectors

        stages, config = self._loaded(), self._config
        context = build_context(
            sample, assignments_N, config.context, stages.first_stage.embed, stages.first_stage.fingerprint
        )
        return with_vectors(context, sample, config.encoder, stages.backbone)

    def begin(self, view: CorpusView) -> Begun:
        """Take the clusters and the context that documents are encoded with."""
        from cairn.pipeline.encode.documents import DocumentEncoder

        self._encoder = DocumentEncoder(
            self._config.encoder, view.context, self._loaded().backbone, view.token_projection
        )
        self._view, self._assigner = view, None
        return Begun(
            encoder_fingerprint=self._encoder.fingerprint,
            vector_dim=self._encoder.vector_dim,
            host=socket.gethostname(),
        )

    def share(self, folder: Path, mark: str) -> None:
        """Leave encoded shards in ``folder`` from here on, if it holds the file that the driver left."""
        self._folder = folder if (folder / mark).is_file() else None

    def share_store(self, area: PendingArea | None) -> None:
        """Leave encoded shards in an object store from here on, if this process reaches it."""
        self._area = area if area is not None and area.is_reached() else None

    def encode(
        self, shards: Sequence[Path], on_tokens: Callable[[int], None], area: PendingArea | None
    ) -> Iterator[tuple[int, EncodedShard]]:
        """See :class:`Engine`; shards come in order, ``on_tokens`` is called for every batch."""
        if shards:
            self.share_store(area)
        for number, shard in enumerate(shards):
            yield number, self.encode_shard(shard.read_bytes(), on_tokens)

    @property
    def run_tasks(self) -> RunTasks | None:
        """See :class:`cairn.pipeline.line.engine.Engine`."""
        return None

    def close(self) -> None:
        """See :class:`cairn.pipeline.line.engine.Engine`."""
        self._stages = self._encoder = self._view = self._assigner = None

    def encode_shard(self, staged: bytes, on_tokens: Callable[[int], None] | None = None) -> EncodedShard:
        """Encode the bytes of a staged shard; ``on_tokens`` receives the number of tokens of each batch."""
        assert self._encoder is not None, "begin comes first"
        rows = pq.read_table(pa.BufferReader(staged)).select(["doc_id", "title", "text", "query"])
        doc_ids, titles, texts, queries = (column.to_pylist() for column in rows.itercolumns())
        encoded = self._encoder.encode(texts, on_tokens, titles=titles)
        assignments_N = self._assign(doc_ids, titles, texts, queries)
        documents, chunks = shard_tables(doc_ids, encoded, assignments_N)
        stored = self._stored(staged, documents, chunks)
        return EncodedShard(
            documents=stored or self._handed_over(documents),
            chunks=None if stored else self._handed_over(chunks),
            num_documents=len(texts),
            num_characters=sum(map(len, texts)),
            num_tokens=int(encoded.num_tokens.sum()),
        )

    def _stored(self, staged: bytes, documents: pa.Table, chunks: pa.Table) -> pa.Buffer | None:
        """Upload a shard's files; return the file that says so, None where this worker can upload nothing."""
        if self._area is None:
            return None
        files = {
            "rows": staged,
            "documents": as_parquet(documents).to_pybytes(),
            "chunks": as_parquet(chunks).to_pybytes(),
        }
        try:
            records = {name: self._area.write(content) for name, content in files.items()}
        except CairnError as error:
            log.warning("encode.not_stored: shards of this worker pass the driver from here on: %s", error)
            self._area = None
            return None
        durable.commit_point("shard-uploaded")
        return as_stored(documents, records)

    def _handed_over(self, table: pa.Table) -> pa.Buffer | Path:
        """Return a table's Parquet file: in the shared folder, or as bytes where it cannot be written."""
        content = as_parquet(table)
        if self._folder is not None:
            path = self._folder / f"{uuid.uuid4().hex}.parquet"
            with contextlib.suppress(OSError):
                durable.write_bytes(path, content)
                return path
        return content

    def _assign(
        self,
        doc_ids: Sequence[str],
        titles: Sequence[str | None],
        texts: Sequence[str],
        queries: Sequence[str | None],
    ) -> Int32[np.ndarray, " N"]:
        """Assign documents to clusters; those of the sample were assigned when it was clustered."""
        assert self._view is not None
        known = self._view.known_clusters
        assignments_N = np.array([known.get(doc_id, -1) for doc_id in doc_ids], dtype=np.int32)
        unknown: list[int] = np.flatnonzero(assignments_N < 0).tolist()
        if unknown:
            self._assigner = self._assigner or ClusterAssigner(
                self._view.clusters, self._stored_embedder(self._view.clusters)
            )
            assignments_N[unknown] = self._assigner.assign_texts(
                [titles[row] for row in unknown],
                [texts[row] for row in unknown],
                [queries[row] for row in unknown],
            )
        return assignments_N

    def _loaded(self) -> Stages:
        if self._stages is None:
            if self._num_threads is not None:
                _use_threads(self._num_threads)
            self._stages = load_stages(self._config)
        return self._stages

    def _new_embedder(self, texts: Sequence[str]) -> tuple[TextEmbedder, dict[str, np.ndarray]]:
        from cairn.pipeline.model.static_embeddings import StaticEmbedder

        stages = self._loaded()
        if self._config.cluster.surrogate == "encoder":
            return _NormalisedFirstStage(stages.first_stage), {}
        embedder, fit = StaticEmbedder.fitted_to(
            stages.backbone.token_embeddings, stages.backbone.tokenizer, texts
        )
        return embedder, fit.to_arrays()

    def _stored_embedder(self, clusters: Clusters) -> TextEmbedder:
        from cairn.pipeline.model.static_embeddings import StaticEmbedder, StaticFit

        stages = self._loaded()
        if self._config.cluster.surrogate == "encoder":
            return _NormalisedFirstStage(stages.first_stage)
        return StaticEmbedder(
            stages.backbone.token_embeddings,
            stages.backbone.tokenizer,
            StaticFit.from_arrays(clusters.surrogate_state),
        )


class _NormalisedFirstStage:
    """The first stage as a surrogate: unit vectors, for one more forward pass a document and a query."""

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


def _use_threads(num_threads: int) -> None:
    """Limit the threads: several workers share a machine, and each would take all of it."""
    import torch

    torch.set_num_threads(num_threads)
    os.environ["RAYON_NUM_THREADS"] = str(num_threads)  # the tokenizer's; read when it first works
