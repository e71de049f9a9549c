"""What encodes staged shards: by itself an engine in this process; a Ray cluster runs many as actors.

    load ─▶ embed_sample, draw_context    once for a collection, by one worker
    load ─▶ begin ─▶ encode_staged, …     by every worker

A worker loads torch and the model at its first call, is given Parquet bytes and returns Parquet bytes. So it
needs no disk in common with the driver. Where it sees the driver's folder, it is given the name of a file,
leaves its own files there and says what their names begin with: no row passes the driver. The driver alone
gives them the names that count, so a worker that was believed dead cannot damage anything when it wakes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from cairn.pipeline import durable
from cairn.pipeline.cluster.assignment import ClusterAssigner
from cairn.pipeline.cluster.queries import query_side
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.context.store import ContextSet, build_context, unembedded
from cairn.pipeline.encode.endpoint_requests import ANSWER_SECONDS, CLOSE_SECONDS
from cairn.pipeline.encode.paid import PAID_NAME
from cairn.pipeline.encode.shards import as_parquet, shard_tables
from cairn.pipeline.errors import CairnError
from cairn.pipeline.index.partitions import RunTasks
from cairn.pipeline.line.engine import Begun, CorpusView, EmbeddedSample, EncodedShard, Loaded
from cairn.pipeline.model.folders.names import is_endpoint
from cairn.pipeline.token_vectors.codebook import TokenCoder
from cairn.pipeline.types import GIVEN_VECTORS, TextEmbedder
from cairn.pipeline.version import installed_version
from jaxtyping import Float32, Int32

if TYPE_CHECKING:  # torch comes in with the first call
    from cairn.pipeline.encode.encoder import Encoder
    from cairn.pipeline.encode.endpoint_requests import Patience
    from cairn.pipeline.encode.sparse import SparseEncoder
    from cairn.pipeline.model.context_encoder import ContextEncoder
    from cairn.pipeline.model.engine.backbone import Backbone

SHARDS_AT_ONCE: Final = 3
"""By an endpoint: one is cut and one stored while another is asked for."""
HANDED_OVER: Final = "handed-over"
"""The folder beside the staged shards in which workers that see it leave what they encode."""

LeftShard = tuple[str, int, int, int]
"""A shard that a worker left: how its files' names begin, and its documents, characters and tokens."""


def shard_left(staged: Path, left: LeftShard) -> EncodedShard:
    """Return a shard that a worker left beside the folder of the staged ones."""
    name, documents, characters, tokens = left
    paths = {table: staged.with_name(HANDED_OVER) / f"{name}-{table}" for table in ("documents", "chunks")}
    return EncodedShard(**paths, num_documents=documents, num_characters=characters, num_tokens=tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """Both stages of the encoder in memory, found to fit the settings."""

    backbone: Backbone
    first_stage: ContextEncoder


def load_stages(config: IngestConfig, backbone: Backbone | None = None) -> Stages:
    """Load the model, or take the ``backbone`` that is in memory already.

    Raises :class:`ConfigError` for dimensions, layers or lengths that do not fit it.
    """
    from cairn.pipeline.encode.encoder import load_cutter, require_encoder_fit
    from cairn.pipeline.encode.encoder_fit import require_context_fit
    from cairn.pipeline.model.context_encoder import ContextEncoder

    backbone = backbone or load_cutter(config.encoder)
    require_encoder_fit(config.encoder, backbone)
    require_context_fit(config, backbone)
    return Stages(
        backbone=backbone,
        first_stage=ContextEncoder.of(backbone, config.encoder, config.context),
    )


class EncoderWorker:
    """The model of one ingest and what it is asked: an :class:`cairn.pipeline.line.engine.Engine`.

    ``num_threads`` = None leaves threads as the process has them. ``patience`` is for servers that documents
    are sent to, by default an ingest's.
    """

    def __init__(
        self, config: IngestConfig, num_threads: int | None = None, patience: Patience | None = None
    ) -> None:
        self._patience = patience
        self._config = config
        self._num_threads = num_threads
        self._stages: Stages | None = None
        self._encoder: Encoder | None = None
        self._sparse: SparseEncoder | None = None
        self._view: CorpusView | None = None
        self._assigner: ClusterAssigner | None = None
        self._staged: Path | None = None

    def load(self) -> Loaded:
        """See :class:`cairn.pipeline.line.engine.Engine`."""
        stages = self._loaded()
        return Loaded(
            package_version=installed_version(),
            first_stage_fingerprint=stages.first_stage.fingerprint,
            sparse_fingerprint=None if self._sparse is None else self._sparse.fingerprint,
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
        """Draw the context from a clustered sample, and embed it for an encoder that reads one."""
        from cairn.pipeline.encode.endpoint import with_probes

        first_stage, config = self._loaded().first_stage, self._config
        embed = first_stage.embed if config.encoder.use_context else unembedded
        context = build_context(sample, assignments_N, config.context, embed, first_stage.fingerprint)
        if is_endpoint(config.encoder.model):
            return with_probes(context, config.encoder, self._patience)
        return context

    def fit_codebook(self, sample: pa.Table, context: ContextSet) -> TokenCoder | None:
        """See :class:`cairn.pipeline.line.engine.Engine`."""
        from cairn.pipeline.encode.documents import fitted_codebook

        return fitted_codebook(sample, self._config.encoder, context, self._loaded().backbone)

    def begin(self, view: CorpusView) -> Begun:
        """Take the clusters and the context that documents are encoded with."""
        from cairn.pipeline.encode.encoder import open_encoder
        from cairn.pipeline.encode.endpoint import EndpointEncoder

        config = self._config.encoder
        encoder = open_encoder(
            config if view.given_dims is None else replace(config, given_dims=view.given_dims),
            view.context,
            self._loaded().backbone,
            view.token_codebook,
            self._patience,
        )
        if isinstance(encoder, EndpointEncoder):
            encoder.check()
        self._encoder = encoder
        self._view, self._assigner = view, None
        return Begun(
            encoder_fingerprint=self._encoder.fingerprint,
            vector_dim=self._encoder.vector_dim,
            sparse_fingerprint=None if self._sparse is None else self._sparse.fingerprint,
            host=socket.gethostname(),
        )

    def share(self, staged: Path, mark: str) -> None:
        """Read shards from ``staged`` and leave them beside it, if the file that the driver left is there.

        On the driver's machine, what servers are paid for is kept beside it, and shared with other workers:
        SQLite's log needs one machine.
        """
        path = staged.with_name(HANDED_OVER) / mark
        host = path.read_text() if path.is_file() else None
        self._staged = None if host is None else staged
        if host == socket.gethostname() and self._asks_servers():
            assert self._encoder is not None, "begin comes first"
            self._encoder.keep_paid(staged.with_name(PAID_NAME))

    def _asks_servers(self) -> bool:
        own = self._config.encoder
        return bool(own.describe) or (is_endpoint(own.model) and own.given_dims is None)

    def encode(
        self, shards: Sequence[Path], on_tokens: Callable[[int], None]
    ) -> Iterator[tuple[int, EncodedShard]]:
        """See :class:`Engine`; shards come in order, ``on_tokens`` is called for every batch."""
        encode = partial(self.encode_shard, on_tokens=on_tokens)
        if shards and self._asks_servers():
            return self._encode_ahead(shards, on_tokens)
        return enumerate(map(encode, (shard.read_bytes() for shard in shards)))

    def _encode_ahead(
        self, shards: Sequence[Path], on_tokens: Callable[[int], None]
    ) -> Iterator[tuple[int, EncodedShard]]:
        """Encode shards by a server: some at a time by an endpoint, so that it never waits for this process.

        What it answers is kept in the folder that holds the staged shards' own, ``pending/``.
        """
        assert self._encoder is not None, "begin comes first"
        encoder, lock, is_over = self._encoder, threading.Lock(), threading.Event()
        at_once = SHARDS_AT_ONCE if is_endpoint(self._config.encoder.model) else 1

        def report(tokens: int) -> None:
            if is_over.is_set():
                raise InterruptedError("nobody waits for this shard any more")
            with lock:
                on_tokens(tokens)

        def encode(shard: Path) -> EncodedShard:
            return self.encode_shard(shard.read_bytes(), report)

        encoder.keep_paid(shards[0].parents[1] / PAID_NAME)
        threads = ThreadPoolExecutor(at_once, thread_name_prefix="cairn-shard")
        waiting: deque[Future[EncodedShard]] = deque()
        try:
            left = iter(shards)
            waiting.extend(threads.submit(encode, shard) for shard in islice(left, at_once))
            for number in range(len(shards)):
                done = waiting.popleft().result()
                waiting.extend(threads.submit(encode, shard) for shard in islice(left, 1))
                yield number, done
        except BaseException as error:
            is_over.set()
            # An answer that is on its way is paid for; who interrupts the run waits a moment for it.
            encoder.close(ANSWER_SECONDS if isinstance(error, CairnError) else CLOSE_SECONDS)
            raise
        finally:
            threads.shutdown(wait=True, cancel_futures=True)
            encoder.keep_paid(None)

    @property
    def run_tasks(self) -> RunTasks | None:
        """See :class:`cairn.pipeline.line.engine.Engine`."""
        return None

    def close(self) -> None:
        """See :class:`cairn.pipeline.line.engine.Engine`."""
        if self._encoder is not None:
            self._encoder.close()
        self._stages = self._encoder = self._view = self._assigner = self._sparse = None

    def encode_shard(self, staged: bytes, on_tokens: Callable[[int], None] | None = None) -> EncodedShard:
        """Encode the bytes of a staged shard; ``on_tokens`` receives the number of tokens of each batch."""
        from cairn.pipeline.encode.given import GivenEncoder

        assert self._encoder is not None, "begin comes first"
        rows = pq.read_table(pa.BufferReader(staged)).select(
            ["doc_id", "title", "text", "query", GIVEN_VECTORS]
        )
        doc_ids, titles, texts, queries, given = (column.to_pylist() for column in rows.itercolumns())
        if isinstance(self._encoder, GivenEncoder):
            encoded = self._encoder.encode(texts, on_tokens, titles=titles, given=given)
        else:
            encoded = self._encoder.encode(texts, on_tokens, titles=titles)
        assignments_N = self._assign(doc_ids, titles, texts, queries)
        sparse = None if self._sparse is None else self._sparse.encode_chunks(texts, encoded)
        documents, chunks = shard_tables(doc_ids, encoded, assignments_N, sparse)
        return EncodedShard(
            documents=as_parquet(documents),
            chunks=as_parquet(chunks),
            num_documents=len(texts),
            num_characters=sum(map(len, texts)),
            num_tokens=int(encoded.num_tokens.sum()),
        )

    def encode_staged(self, staged: bytes | str) -> EncodedShard | LeftShard | None:
        """Encode a staged shard of a driver, given as bytes or by name; None where its file is not seen.

        The answer holds the tables where the folder does not take them.
        """
        if self._staged is None:
            return self.encode_shard(staged) if isinstance(staged, bytes) else None
        if isinstance(staged, str):
            if not (self._staged / staged).is_file():
                return None
            staged = (self._staged / staged).read_bytes()
        shard, name = self.encode_shard(staged), secrets.token_hex(8)
        left = name, shard.num_documents, shard.num_characters, shard.num_tokens
        found = shard_left(self._staged, left)
        with contextlib.suppress(OSError):
            for path, content in ((found.documents, shard.documents), (found.chunks, shard.chunks)):
                assert isinstance(path, Path)
                assert not isinstance(content, Path)
                durable.write_bytes(path, content)
            return left
        return shard

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
            clusters = self._view.clusters
            self._assigner = self._assigner or ClusterAssigner(
                clusters, self._embedder(clusters.surrogate_state)
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
            self._load_sparse()
        return self._stages

    def _load_sparse(self) -> None:
        if self._config.encoder.sparse_model is not None:
            from cairn.pipeline.encode.sparse import SparseEncoder

            self._sparse = SparseEncoder(self._config.encoder.sparse_model, self._config.encoder.precision)

    def _new_embedder(self, texts: Sequence[str]) -> tuple[TextEmbedder, dict[str, np.ndarray]]:
        from cairn.pipeline.model.static_embeddings import fit_static

        if self._config.cluster.surrogate == "encoder":
            return self._embedder({}), {}
        backbone = self._loaded().backbone
        state = fit_static(backbone.token_embeddings, backbone.tokenizer, texts)
        return self._embedder(state), state

    def _embedder(self, state: Mapping[str, np.ndarray]) -> TextEmbedder:
        from cairn.pipeline.model.static_embeddings import StaticEmbedder

        stages = self._loaded()
        if self._config.cluster.surrogate == "encoder":
            return _NormalisedFirstStage(stages.first_stage)
        return StaticEmbedder(stages.backbone.token_embeddings, stages.backbone.tokenizer, state)


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
