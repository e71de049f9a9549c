"""The context of a collection: J documents, embedded once by the first stage, in an order that is kept.

Source: Morris & Rush 2024 (CDE), §4.2, eq. 5 and 6: M1(d¹) … M1(dᴶ) are computed once and cached; documents
and queries read the same. The vectors are stored as the first stage gave them, not normalised: CDE injects
them so. Their order is kept because a backbone with rotary positions over them reads it.

Runs no model: the first stage arrives as a function.

    C context documents    D first-stage dim    K clusters    N documents of the sample
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from cairn.pipeline.cluster.arrow_file import read_arrow_file, sha256_of, write_arrow_file
from cairn.pipeline.config import ContextConfig
from cairn.pipeline.context.sampling import draw_context
from cairn.pipeline.errors import DamageError, ModelError, SourceError
from cairn.pipeline.manifest import fingerprint
from jaxtyping import Float32, Int32

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
        rows = self.embeddings_CD
        parts = (self.content_sha256s, self.cluster_ids_C, rows)
        if any(len(part) != len(self.doc_ids) for part in parts):
            raise ModelError(
                "a context must have a hash, a cluster and an embedding for each document, got others"
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
            embeddings=sha256_of(self.embeddings_CD),
            embedding_dim=self.embeddings_CD.shape[1],
            first_stage=self.first_stage_fingerprint,
            **({} if self.probes_PV is None else {"probes": sha256_of(self.probes_PV)}),
        )

    def write(self, path: Path) -> None:
        """Write durably; equal contexts give equal bytes."""
        arrays = {"cluster_ids": self.cluster_ids_C, "embeddings": self.embeddings_CD}
        if self.probes_PV is not None:
            arrays["probes"] = self.probes_PV
        facts = {
            "doc_ids": list(self.doc_ids),
            "content_sha256s": list(self.content_sha256s),
            "first_stage": self.first_stage_fingerprint,
        }
        write_arrow_file(path, arrays, kind=_KIND, facts=facts)

    @classmethod
    def read(cls, path: Path) -> ContextSet:
        """Read a context back; a missing, damaged or foreign file raises :class:`DamageError`."""
        arrays, facts = read_arrow_file(path, kind=_KIND)
        try:
            return cls(
                doc_ids=tuple(facts["doc_ids"]),
                content_sha256s=tuple(facts["content_sha256s"]),
                cluster_ids_C=arrays["cluster_ids"],
                embeddings_CD=arrays["embeddings"],
                first_stage_fingerprint=facts["first_stage"],
                probes_PV=arrays.get("probes"),
            )
        except (KeyError, TypeError, ModelError) as error:
            raise DamageError(f"{path.name} must hold a context, got other arrays") from error


def build_context(
    sample: pa.Table,
    assignments_N: Int32[np.ndarray, " N"],
    config: ContextConfig,
    embed: Callable[[list[str]], Float32[np.ndarray, "C D"]],
    first_stage_fingerprint: str,
) -> ContextSet:
    """Draw the context from a sample and embed it in one call.

    The sample has ``doc_id``, ``text`` and ``content_sha256``. ``embed`` cuts texts to
    ``config.max_document_tokens`` itself: tokens are the first stage's.
    """
    if not sample.num_rows:
        raise SourceError("a context must be drawn from at least one document, got none")
    doc_ids = sample.column("doc_id").to_pylist()
    drawn_C = draw_context(doc_ids, assignments_N, config.context_documents, config.seed)
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
