"""The context of a collection: J documents, embedded once by the first stage, in an order that is kept.

Source: Morris & Rush 2024 (CDE), §4.2, eq. 5 and 6: M1(d¹) … M1(dᴶ) are computed once and cached; documents
and queries read the same. The vectors are stored as the first stage gave them, not normalised: CDE injects
them so. Their order is kept because a backbone with rotary positions over them reads it.

Runs no model: the first stage arrives as a function.

    C context documents    D first-stage dim    K clusters    N documents of the sample
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Int32, Int64

from pipeline.cluster.arrow_file import read_arrow_file, write_arrow_file
from pipeline.config import ContextConfig
from pipeline.context.sampling import draw_context
from pipeline.errors import DamageError, ModelError, SourceError
from pipeline.manifest import fingerprint

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

    def __post_init__(self) -> None:
        num_documents = len(self.doc_ids)
        if (
            not num_documents
            == len(self.content_sha256s)
            == len(self.cluster_ids_C)
            == len(self.embeddings_CD)
        ):
            raise ModelError(
                "the first stage must give one embedding a context document, got "
                f"{len(self.embeddings_CD)} for {num_documents}"
            )
        if (
            self.embeddings_CD.ndim != 2
            or self.embeddings_CD.dtype != np.float32
            or not np.isfinite(self.embeddings_CD).all()
        ):
            raise ModelError(
                "context embeddings must be finite float32 rows, got others; check the weights of the "
                "model that made them"
            )

    @property
    def fingerprint(self) -> str:
        """Identify documents, order, vectors' bytes and first stage: whatever moves a contextual vector."""
        return fingerprint(
            doc_ids=self.doc_ids,
            content_sha256s=self.content_sha256s,
            cluster_ids=self.cluster_ids_C.tolist(),
            embeddings=hashlib.sha256(np.ascontiguousarray(self.embeddings_CD).tobytes()).hexdigest(),
            embedding_dim=self.embeddings_CD.shape[1],
            first_stage=self.first_stage_fingerprint,
        )

    def write(self, path: Path) -> None:
        """Write durably; equal contexts give equal bytes."""
        values = pa.array(np.ascontiguousarray(self.embeddings_CD).ravel())
        table = pa.table(
            [
                pa.array(self.doc_ids, pa.string()),
                pa.array(self.content_sha256s, pa.string()),
                pa.array(self.cluster_ids_C, pa.int32()),
                pa.FixedSizeListArray.from_arrays(values, self.embeddings_CD.shape[1]),
            ],
            schema=_schema(self.embeddings_CD.shape[1]),
        )
        header = {"fingerprint": self.fingerprint, "first_stage_fingerprint": self.first_stage_fingerprint}
        write_arrow_file(path, table, kind=_KIND, header=header)

    @classmethod
    def read(cls, path: Path) -> ContextSet:
        """Read a context back, bit for bit.

        A missing, damaged or foreign file raises :class:`IntegrityError`.
        """
        table, header = read_arrow_file(path, kind=_KIND)
        try:
            embeddings = table.column("embedding").combine_chunks()
            if not table.schema.equals(_schema(embeddings.type.list_size)):
                raise DamageError(f"{path.name} must have the columns of a context, got {table.schema.names}")
            context = cls(
                doc_ids=tuple(table.column("doc_id").to_pylist()),
                content_sha256s=tuple(table.column("content_sha256").to_pylist()),
                cluster_ids_C=table.column("cluster_id").to_numpy(),
                embeddings_CD=embeddings.flatten()
                .to_numpy()
                .reshape(len(embeddings), embeddings.type.list_size),
                first_stage_fingerprint=header["first_stage_fingerprint"],
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


def _schema(embedding_dim: int) -> pa.Schema:
    return pa.schema(
        [
            pa.field("doc_id", pa.string(), nullable=False),
            pa.field("content_sha256", pa.string(), nullable=False),
            pa.field("cluster_id", pa.int32(), nullable=False),
            pa.field("embedding", pa.list_(pa.float32(), embedding_dim), nullable=False),
        ]
    )
