"""What an engine answers: records that travel between the line, its engine and the engine's workers.

They need no model, so the line reads them without loading torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from cairn.pipeline.token_vectors.projection import TokenProjection
from jaxtyping import Float32


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """What a worker says when its model is loaded; all workers of a run must say the same."""

    package_version: str
    first_stage_fingerprint: str
    token_projection: TokenProjection | None = field(default=None, compare=False)
    host: str = field(compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """The space a worker's vectors lie in; all workers of a run must say the same."""

    encoder_fingerprint: str
    vector_dim: int
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
    """One staged shard, encoded: its two Parquet files, as bytes or in the folder shared with the driver.

    Where they are in an object store, ``chunks`` is None and ``documents`` the file that says so.
    """

    documents: pa.Buffer | Path
    chunks: pa.Buffer | Path | None
    num_documents: int
    num_characters: int
    num_tokens: int
