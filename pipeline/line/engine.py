"""What the line asks of a model, :class:`Engine`, and the records that travel between them.

``encoder_worker`` answers in this process, ``cairn.jobs.ray_cluster`` by many such workers on a Ray cluster.
An engine loads and connects only when it is first called: a run without changes calls none, and loads neither
torch nor Ray. Nor do the records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import pyarrow as pa
from cairn.pipeline.cluster.store import Clusters
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.index.partitions import RunTasks
from cairn.pipeline.token_vectors.codebook import TokenCoder
from jaxtyping import Float32, Int32


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusView:
    """Clusters and context; ``known_clusters`` has the clusters of the sampled documents, by document id.

    ``token_codebook`` is None where the collection has no token vectors. ``given_dims`` is the width of the
    vectors that documents bring, which an engine may have been opened without.
    """

    clusters: Clusters
    context: ContextSet
    token_codebook: TokenCoder | None = None
    given_dims: int | None = None
    known_clusters: Mapping[str, int] = field(default_factory=dict[str, int])


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What a worker says when its model is loaded; all workers of a run must say the same."""

    package_version: str
    first_stage_fingerprint: str
    sparse_fingerprint: str | None = None
    host: str = field(compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """The space a worker's vectors lie in, and its sparse encoder's; all workers must say the same."""

    encoder_fingerprint: str
    vector_dim: int
    sparse_fingerprint: str | None = None
    host: str = field(compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedSample:
    """Both sides of a sample's documents as vectors, with the surrogate's state, which is stored."""

    phi_NV: Float32[np.ndarray, "N V"]
    psi_NV: Float32[np.ndarray, "N V"]
    surrogate_fingerprint: str
    surrogate_state: Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodedShard:
    """One staged shard, encoded: its two Parquet files, as bytes or in the folder shared with the driver."""

    documents: pa.Buffer | Path
    chunks: pa.Buffer | Path
    num_documents: int
    num_characters: int
    num_tokens: int


class Engine(Protocol):
    """What the line asks of a model."""

    def load(self) -> Loaded:
        """Load the model and check that the settings fit it; a second call costs nothing."""
        ...

    def embed_sample(self, sample: pa.Table) -> EmbeddedSample:
        """Embed both sides of a sample's documents with the surrogate."""
        ...

    def draw_context(self, sample: pa.Table, assignments_N: Int32[np.ndarray, " N"]) -> ContextSet:
        """Draw the context from a clustered sample and embed it."""
        ...

    def fit_codebook(self, sample: pa.Table, context: ContextSet) -> TokenCoder | None:
        """Fit the codebook of token vectors to a sample; None where the settings ask for none."""
        ...

    def begin(self, view: CorpusView) -> Begun:
        """Take the clusters and the context that documents are encoded with."""
        ...

    def encode(
        self, shards: Sequence[Path], on_tokens: Callable[[int], None]
    ) -> Iterator[tuple[int, EncodedShard]]:
        """Encode staged shards and yield each with its position, in the order in which they finish."""
        ...

    @property
    def run_tasks(self) -> RunTasks | None:
        """What publishes partitions in other processes, None where this one does all of it."""
        ...

    def close(self) -> None:
        """Release what was loaded and stop what was started; a later call starts it again."""
