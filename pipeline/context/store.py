"""The context of a collection: J documents, embedded once by the first stage, in an order that is kept.

Source: Morris & Rush 2024 (CDE), §4.2, eq. 5 and 6: M1(d¹) … M1(dᴶ) are computed once and cached; documents
and queries read the same. The vectors are stored as the first stage gave them, not normalised: CDE injects
them so. Their order is kept because a backbone with rotary positions over them reads it.

Runs no model: the first stage arrives as a function.

    C context documents    D first-stage dim    K clusters    N documents of the sample
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from cairn.pipeline.cluster.arrow_file import read_arrow_file, write_arrow_file
from cairn.pipeline.config import ContextConfig
from cairn.pipeline.context.sampling import draw_context
from cairn.pipeline.errors import DamageError, ModelError, SourceError
from cairn.pipeline.manifest import fingerprint
from jaxtyping import Float32, Int32, Int64

_KIND = "cairn.context"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ContextSet:
    """Context documents in the order in which the second stage reads them.

    By cluster, then by seeded hash of the id.
    """

    doc_ids: tuple[str, ...]
    content_sha256s: tuple[str, ...]
    cluster_ids_C: Int32[np.ndarray, " C"]
    embeddings_CD: Float32[np.ndarray, "C D"]
    first_stage_fingerprint: str
    probes_PV: Float32[np.ndarray, "P V"] | None = None
    """How an endpoint's model answered fixed texts: see :mod:`cairn.pipeline.encode.endpoint`."""

    def __post_init__(self) -> None:
        num_documents = len(self.doc_ids)
        if not num_documents == len(self.content_sha256s) == len(self.cluster_ids_C):
            raise ModelError("a context must have a hash and a cluster for each document, got others")
        rows = self.embeddings_CD
        if len(rows) != num_documents:
            raise ModelError(
                f"a context document must have one embedding, got {len(rows)} for {num_documents}"
            )
        if rows.ndim != 2 or rows.dtype != np.float32 or not np.isfinite(rows).all():
            raise ModelError(
                "a context's embeddings must be finite float32 rows, got others, such as of a model whose "
                "states are NaN; fetch the model again, or choose --precision fp32"
            )

    @property
    def fingerprint(self) -> str:
        """Identify documents, order, vectors' bytes and first stage: whatever moves a contextual vector."""
        return fingerprint(
            doc_ids=self.doc_ids,
            content_sha256s=self.content_sha256s,
            cluster_ids=self.cluster_ids_C.tolist(),
            embeddings=_digest(self.embeddings_CD),
            embedding_dim=self.embeddings_CD.shape[1],
            first_stage=self.first_stage_fingerprint,
            **({} if self.probes_PV is None else {"probes": _digest(self.probes_PV)}),
        )

    def write(self, path: Path) -> None:
        """Write durably; equal contexts give equal bytes."""
        width = self.embeddings_CD.shape[1]
        flat = np.ascontiguousarray(self.embeddings_CD).ravel()
        table = pa.table(
            [
                pa.array(self.doc_ids, pa.string()),
                pa.array(self.content_sha256s, pa.string()),
                pa.array(self.cluster_ids_C, pa.int32()),
                pa.FixedSizeListArray.from_arrays(pa.array(flat), width),
            ],
            schema=_schema(width),
        )
        header = {"fingerprint": self.fingerprint, "first_stage_fingerprint": self.first_stage_fingerprint}
        if self.probes_PV is not None:
            header["probes"] = json.dumps(self.probes_PV.tolist())
        write_arrow_file(path, table, kind=_KIND, header=header)

    @classmethod
    def read(cls, path: Path) -> ContextSet:
        """Read a context back, bit for bit.

        A missing, damaged or foreign file raises :class:`IntegrityError`.
        """
        table, header = read_arrow_file(path, kind=_KIND)
        try:
            embeddings = table.column("embedding").combine_chunks()
            width = embeddings.type.list_size
            if not table.schema.equals(_schema(width)):
                raise DamageError(f"{path.name} must have the columns of a context, got {table.column_names}")
            context = cls(
                doc_ids=tuple(table.column("doc_id").to_pylist()),
                content_sha256s=tuple(table.column("content_sha256").to_pylist()),
                cluster_ids_C=table.column("cluster_id").to_numpy(),
                embeddings_CD=embeddings.flatten().to_numpy().reshape(-1, width),
                first_stage_fingerprint=header["first_stage_fingerprint"],
                probes_PV=np.array(json.loads(header["probes"]), np.float32) if "probes" in header else None,
            )
            is_intact = context.fingerprint == header["fingerprint"]
        except (KeyError, AttributeError, TypeError, ValueError, ModelError, pa.ArrowException) as error:
            raise DamageError(f"{path.name} must hold a context, got other columns") from error
        if not is_intact:
            raise DamageError(f"{path.name} must match its own fingerprint, got other content")
        return context


def build_context(
    sample: pa.Table,
    assignments_N: Int32[np.ndarray, " N"],
    config: ContextConfig,
    embed: Callable[[list[str]], Float32[np.ndarray, "C D"]],
    first_stage_fingerprint: str,
    cluster_sizes_K: Int64[np.ndarray, " K"] | None = None,
) -> ContextSet:
    """Draw the context from a sample and embed it in one call.

    The sample has ``doc_id``, ``text`` and ``content_sha256``. ``embed`` cuts texts to
    ``config.max_document_tokens`` itself: tokens are the first stage's.
    """
    if not sample.num_rows:
        raise SourceError("a context must be drawn from at least one document, got none")
    drawn_C = draw_context(
        sample.column("doc_id").to_pylist(),
        assignments_N,
        config.context_documents,
        config.seed,
        cluster_sizes_K,
    )
    documents = sample.select(["doc_id", "text", "content_sha256"]).take(pa.array(drawn_C))
    return ContextSet(
        doc_ids=tuple(documents.column("doc_id").to_pylist()),
        content_sha256s=tuple(documents.column("content_sha256").to_pylist()),
        cluster_ids_C=assignments_N[drawn_C],
        embeddings_CD=embed(documents.column("text").to_pylist()),
        first_stage_fingerprint=first_stage_fingerprint,
    )


def unembedded(texts: Sequence[str]) -> Float32[np.ndarray, "C 1"]:
    """Return a zero a document: a context that no encoder reads stands for the corpus, unembedded."""
    return np.zeros((len(texts), 1), np.float32)


def _digest(rows: Float32[np.ndarray, "C D"]) -> str:
    return hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest()


def _schema(width: int) -> pa.Schema:
    types = {
        "doc_id": pa.string(),
        "content_sha256": pa.string(),
        "cluster_id": pa.int32(),
        "embedding": pa.list_(pa.float32(), width),
    }
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in types.items()])
