"""The context of a collection: J documents, embedded once by the first stage, in an order that is kept.

Source: Morris & Rush 2024 (CDE), §4.2, eq. 5 and 6: M1(d¹) … M1(dᴶ) are computed once and cached; documents
and queries read the same. The vectors are stored as the first stage gave them, not normalised: CDE injects
them so. Their order is kept because a backbone with rotary positions over them reads it. Where vectors are
whitened, each document also has its second-stage vector: these are the sample that the axes come from.

Runs no model: the first stage arrives as a function.

    C context documents    D first-stage dim    V second-stage dim    K clusters    N documents of the sample
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
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
    vectors_CV: Float32[np.ndarray, "C V"] | None = None

    def __post_init__(self) -> None:
        num_documents = len(self.doc_ids)
        if not num_documents == len(self.content_sha256s) == len(self.cluster_ids_C):
            raise ModelError("a context must have a hash and a cluster for each document, got others")
        for what, rows in (("embedding", self.embeddings_CD), ("vector", self.vectors_CV)):
            if rows is None:
                continue
            if len(rows) != num_documents:
                raise ModelError(
                    f"a context document must have one {what}, got {len(rows)} for {num_documents}"
                )
            if rows.ndim != 2 or rows.dtype != np.float32 or not np.isfinite(rows).all():
                raise ModelError(
                    f"a context's {what}s must be finite float32 rows, got others; check the weights of the "
                    "model that made them"
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
            **({} if self.vectors_CV is None else {"vectors": _digest(self.vectors_CV)}),
        )

    def write(self, path: Path) -> None:
        """Write durably; equal contexts give equal bytes."""
        columns = {
            "doc_id": pa.array(self.doc_ids, pa.string()),
            "content_sha256": pa.array(self.content_sha256s, pa.string()),
            "cluster_id": pa.array(self.cluster_ids_C, pa.int32()),
            "embedding": _column(self.embeddings_CD),
        }
        if self.vectors_CV is not None:
            columns["vector"] = _column(self.vectors_CV)
        table = pa.table(list(columns.values()), schema=_schema(columns))
        header = {"fingerprint": self.fingerprint, "first_stage_fingerprint": self.first_stage_fingerprint}
        write_arrow_file(path, table, kind=_KIND, header=header)

    @classmethod
    def read(cls, path: Path) -> ContextSet:
        """Read a context back, bit for bit.

        A missing, damaged or foreign file raises :class:`IntegrityError`.
        """
        table, header = read_arrow_file(path, kind=_KIND)
        try:
            columns = {name: table.column(name).combine_chunks() for name in table.column_names}
            if not table.schema.equals(_schema(columns)):
                raise DamageError(f"{path.name} must have the columns of a context, got {table.column_names}")
            context = cls(
                doc_ids=tuple(table.column("doc_id").to_pylist()),
                content_sha256s=tuple(table.column("content_sha256").to_pylist()),
                cluster_ids_C=table.column("cluster_id").to_numpy(),
                embeddings_CD=_rows(columns["embedding"]),
                first_stage_fingerprint=header["first_stage_fingerprint"],
                vectors_CV=_rows(columns["vector"]) if "vector" in columns else None,
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


def _digest(rows: Float32[np.ndarray, "C D"]) -> str:
    return hashlib.sha256(np.ascontiguousarray(rows).tobytes()).hexdigest()


def _column(rows: Float32[np.ndarray, "C D"]) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(rows).ravel()), rows.shape[1])


def _rows(column: pa.FixedSizeListArray) -> Float32[np.ndarray, "C D"]:
    return column.flatten().to_numpy().reshape(len(column), column.type.list_size)


def _schema(columns: Mapping[str, pa.Array]) -> pa.Schema:
    """Return the schema of a context with these columns; widths are those of the vectors."""
    types = {"doc_id": pa.string(), "content_sha256": pa.string(), "cluster_id": pa.int32()}
    for name in ("embedding", *(["vector"] if "vector" in columns else [])):
        types[name] = pa.list_(pa.float32(), columns[name].type.list_size)
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in types.items()])
