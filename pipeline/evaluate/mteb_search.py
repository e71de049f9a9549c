"""Any system of the table as a model of MTEB, for ``mteb.evaluate(MtebModel(system), tasks)``.

Retrieval tasks (MTEB's SearchProtocol) are ranked as the system ranks: exactly, its context drawn from the
task's own corpus, BM25 fused where it fuses it. All other tasks (EncoderProtocol) get its document vectors;
they have no corpus to draw a context from, so a system with context refuses them.

As MTEB has it, a document is its title and text in one, a query its text followed by its instruction. The
model's revision names its weights and settings, so that MTEB never serves cached scores of others. MTEB is
not imported here but where it asks for its own type: everything else it hands over is read by columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float32

from pipeline.config import ContextConfig
from pipeline.encode.documents import DocumentEncoder
from pipeline.errors import ConfigError
from pipeline.evaluate.encodings import EncodedSet, build_encoder, encode_documents, encode_queries
from pipeline.evaluate.lexical import read_lexicon, search_bm25
from pipeline.evaluate.measures import RankedDocuments
from pipeline.evaluate.ranking import NUM_CANDIDATES, SetRanker
from pipeline.evaluate.retrieval_set import Judgements, RetrievalSet
from pipeline.evaluate.systems import System
from pipeline.manifest import fingerprint
from pipeline.model.backbone_loader import load_backbone
from pipeline.types import silent_progress


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Indexed:
    corpus: RetrievalSet
    encoder: DocumentEncoder
    encoded: EncodedSet


class MtebModel:
    """Implements MTEB's SearchProtocol and EncoderProtocol for one system."""

    def __init__(self, system: System, context: ContextConfig | None = None) -> None:
        self.system = system
        self._context = context or ContextConfig()
        self._backbone = load_backbone(system.encoding.encoder)
        self._plain: DocumentEncoder | None = None
        self._indexed: _Indexed | None = None

    @property
    def mteb_model_meta(self) -> Any:
        """Return MTEB's record of the model."""
        try:
            from mteb.models.model_meta import ModelMeta
        except ModuleNotFoundError as error:
            raise ConfigError(
                "MTEB must be installed, got none; install it with `pip install 'cairn-retrieval[mteb]'`"
            ) from error
        encoding = self.system.encoding
        revision = fingerprint(
            weights=self._backbone.weights_fingerprint,
            system={
                **asdict(self.system),
                "encoding": {**asdict(encoding), "encoder": {**asdict(encoding.encoder), "model": None}},
            },
            context=asdict(self._context),
        )
        return ModelMeta.create_empty(
            overwrites={
                "name": f"cairn/{self.system.name.replace('/', '-')}",
                "revision": revision[:16],
                "embed_dim": self._backbone.embedding_dim,
                "framework": ["PyTorch"],
            }
        )

    def index(self, corpus: Iterable[Mapping[str, Any]], **_given: Any) -> None:
        """Encode a corpus with ``id``, ``text`` and, where there is one, ``title``."""
        rows = list(corpus)
        none = np.zeros(0, np.int64)
        held = RetrievalSet(
            name="mteb",
            doc_ids=tuple(str(row["id"]) for row in rows),
            titles=tuple(row.get("title") or "" for row in rows),
            texts=tuple(f"{row.get('title') or ''} {row['text']}".strip() for row in rows),
            query_ids=(),
            queries=(),
            judgements=Judgements(query_J=none, document_J=none, gain_J=none, start_J=none, end_J=none),
        )
        encoder, _ = build_encoder(held, self.system.encoding, self._context, self._backbone)
        encoded = encode_documents(encoder, held, self.system.encoding, silent_progress)
        self._indexed = _Indexed(corpus=held, encoder=encoder, encoded=encoded)

    def search(
        self,
        queries: Iterable[Mapping[str, Any]],
        *,
        top_k: int,
        top_ranked: Mapping[str, Sequence[str]] | None = None,
        **_: Any,
    ) -> dict[str, dict[str, float]]:
        """Return query id to document id to score of the best ``top_k`` documents, or of ``top_ranked``."""
        if self._indexed is None:
            raise ConfigError("a corpus must be indexed before it is searched, got none; call index() first")
        corpus = self._indexed.corpus
        rows = list(queries)
        texts = [f"{row['text']} {row.get('instruction') or ''}".strip() for row in rows]
        needs_bm25 = self.system.needs_document_bm25 or self.system.needs_lexicon
        bm25 = (
            search_bm25(corpus.texts, texts, max(top_k, NUM_CANDIDATES), silent_progress)
            if needs_bm25
            else None
        )  # titles are in the texts
        lexicon = (
            read_lexicon(corpus.texts, self._indexed.encoded, texts, bm25)
            if bm25 and self.system.needs_lexicon
            else None
        )
        ranker = SetRanker(
            corpus.doc_ids,
            encode_queries(self._indexed.encoder, self._indexed.encoded, texts),
            bm25,
            None,
            lexicon,
        )
        depth = top_k if top_ranked is None else len(corpus.doc_ids)
        answers = ranker.rank(self.system, np.zeros(len(rows), np.bool_), depth)
        ranked = {
            str(row["id"]): _scores(corpus, answer.documents)
            for row, answer in zip(rows, answers, strict=True)
        }
        return (
            ranked
            if top_ranked is None
            else {query_id: _only(own, top_ranked[query_id]) for query_id, own in ranked.items()}
        )

    def encode(
        self, inputs: Iterable[Mapping[str, Any]], *, prompt_type: Any = None, **_: Any
    ) -> Float32[np.ndarray, "N V"]:
        """Embed the texts of all batches; those of queries after the queries' prefix."""
        if self.system.encoding.context != "none":
            raise ConfigError(
                "a task without a corpus must have a system without context, got one with; choose "
                "context none"
            )
        if self._plain is None:
            self._plain = DocumentEncoder(self.system.encoding.encoder, None, self._backbone)
        texts = [text for batch in inputs for text in batch["text"]]
        # A plain string or MTEB's enumeration, whose values are strings.
        is_query = getattr(prompt_type, "value", prompt_type) == "query"
        return (
            self._plain.encode_queries(texts) if is_query else self._plain.encode(texts).document_vectors_NV
        )

    def similarity(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """Return the cosine of every pair of vectors, which have length one."""
        return torch.as_tensor(embeddings1) @ torch.as_tensor(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """Return the cosine of each row with the row beside it."""
        return (torch.as_tensor(embeddings1) * torch.as_tensor(embeddings2)).sum(dim=-1)


def _scores(corpus: RetrievalSet, ranked: RankedDocuments) -> dict[str, float]:
    return {
        corpus.doc_ids[p]: float(s)
        for p, s in zip(ranked.positions.tolist(), ranked.scores.tolist(), strict=True)
    }


def _only(scores: Mapping[str, float], wanted: Sequence[str]) -> dict[str, float]:
    """Keep the wanted documents; one that was no candidate stands below all others."""
    lowest = min(scores.values(), default=0.0) - 1.0
    return {doc_id: scores.get(doc_id, lowest) for doc_id in wanted}
