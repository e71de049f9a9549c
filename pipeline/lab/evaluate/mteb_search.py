"""Any system of the table as a model of MTEB, for ``mteb.evaluate(MtebModel(system), tasks)``.

Retrieval and reranking tasks (MTEB's SearchProtocol) are ranked as the system ranks, its context drawn from
the task's own corpus, BM25 fused where it fuses it. Cairn's rows answer as a search does: with at most 200
documents, and from a given list as with a filter. All other tasks (EncoderProtocol) get its
document vectors. They have no corpus, so a system with context draws it from the task's texts: those that a
split is first asked for, so that all texts of the split are embedded behind one context.

With ``has_instructions`` a task's own instruction stands before its texts, as NV-Embed has it: before queries
where the task tells them from documents, else before all texts. It is read, and not pooled.

As MTEB has it, a document is its title and text in one, a query its text followed by its instruction. The
model's revision names its weights and settings, so that MTEB never serves cached scores of others. MTEB is
not imported here but where it asks for its own type: everything else it hands over is read by columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import torch
from cairn.pipeline.config import ContextConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.encode.prefixes import instruction_prefix
from cairn.pipeline.errors import ConfigError, install_command
from cairn.pipeline.lab.evaluate.baselines import NUM_CANDIDATES, search_bm25
from cairn.pipeline.lab.evaluate.bench import make_ranker
from cairn.pipeline.lab.evaluate.encodings import (
    EncodedSet,
    build_encoder,
    context_for,
    encode_documents,
    encode_queries,
)
from cairn.pipeline.lab.evaluate.measures import RankedDocuments
from cairn.pipeline.lab.evaluate.retrieval_set import Judgements, RetrievalSet
from cairn.pipeline.lab.evaluate.searched_set import SearchedSet
from cairn.pipeline.lab.evaluate.systems import System
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.types import silent_progress
from jaxtyping import Float32


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Split:
    """A split of a task without a corpus: what its context is drawn from, and encoders by instruction."""

    place: tuple[str, str, str]
    corpus: RetrievalSet
    encoders: dict[str, DocumentEncoder] = field(default_factory=dict[str, DocumentEncoder])


class MtebModel:
    """Implements MTEB's SearchProtocol and EncoderProtocol for one system."""

    def __init__(
        self, system: System, context: ContextConfig | None = None, *, has_instructions: bool = False
    ) -> None:
        self.system = system
        self._has_instructions = has_instructions
        self._context = context or ContextConfig()
        self._backbone = load_backbone(system.encoding.encoder)
        self._split: _Split | None = None
        self._indexed: tuple[RetrievalSet, DocumentEncoder, EncodedSet] | None = None

    @property
    def mteb_model_meta(self) -> Any:
        """Return MTEB's record of the model."""
        try:
            from mteb.models.model_meta import ModelMeta
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"MTEB must be installed, got none; install it with {install_command('mteb')}"
            ) from error
        encoding = self.system.encoding
        revision = fingerprint(
            weights=self._backbone.weights_fingerprint,
            system={
                **asdict(self.system),
                "encoding": {**asdict(encoding), "encoder": {**asdict(encoding.encoder), "model": None}},
            },
            context=asdict(self._context),
            # A model without them keeps the revision that its scores are cached under.
            **({"has_instructions": True} if self._has_instructions else {}),
        )
        return ModelMeta.create_empty(
            overwrites={
                "name": f"cairn/{self.system.name.replace('/', '-')}",
                "revision": revision[:16],
                "embed_dim": self._backbone.embedding_dim,
                "framework": ["PyTorch"],
            }
        )

    def index(self, corpus: Iterable[Mapping[str, Any]], *, task_metadata: Any = None, **_given: Any) -> None:
        """Encode a corpus with ``id``, ``text`` and, where there is one, ``title``."""
        rows = list(corpus)
        held = _corpus(
            [str(row["id"]) for row in rows],
            [row.get("title") or "" for row in rows],
            [f"{row.get('title') or ''} {row['text']}".strip() for row in rows],
        )
        encoding = self.system.encoding
        if instruction := self._instruction(task_metadata, "query"):
            encoding = replace(encoding, encoder=replace(encoding.encoder, query_prefix=instruction))
        encoder, _ = build_encoder(held, encoding, self._context, self._backbone)
        encoded = encode_documents(encoder, held, self.system.encoding, silent_progress)
        self._indexed = held, encoder, encoded

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
        rows = list(queries)
        texts = tuple(f"{row['text']} {row.get('instruction') or ''}".strip() for row in rows)
        query_ids = tuple(str(row["id"]) for row in rows)
        corpus, encoder, documents = self._indexed
        held = replace(corpus, query_ids=query_ids, queries=texts)
        encoded = encode_queries(encoder, documents, texts)
        bm25 = None
        if self.system.needs_document_bm25:
            bm25 = search_bm25(held.texts, texts, max(top_k, NUM_CANDIDATES), silent_progress)
        ranker = make_ranker(held, [self.system], encoded, encoder.token_projection, bm25)
        if top_ranked is not None and isinstance(ranker, SearchedSet):
            place = {doc_id: position for position, doc_id in enumerate(held.doc_ids)}
            wanted = [np.array(sorted(place[doc_id] for doc_id in top_ranked[each])) for each in query_ids]
            found = [ranker.rank_among(self.system, query, own) for query, own in enumerate(wanted)]
        else:
            depth = top_k if top_ranked is None else len(held.doc_ids)
            answers = ranker.rank(self.system, np.zeros(len(rows), np.bool_), depth)
            found = [answer.documents for answer in answers]
        ranked = {query_id: _scores(held, own) for query_id, own in zip(query_ids, found, strict=True)}
        if top_ranked is None:
            return ranked
        return {query_id: _only(own, top_ranked[query_id]) for query_id, own in ranked.items()}

    def encode(
        self,
        inputs: Iterable[Mapping[str, Any]],
        *,
        task_metadata: Any = None,
        hf_split: str = "",
        hf_subset: str = "",
        prompt_type: Any = None,
        **_: Any,
    ) -> Float32[np.ndarray, "N V"]:
        """Embed the texts of all batches; those of queries after the queries' prefix or instruction."""
        texts = [text for batch in inputs for text in batch["text"]]
        # A plain string or MTEB's enumeration, whose values are strings.
        kind = getattr(prompt_type, "value", prompt_type)
        instruction = self._instruction(task_metadata, kind)
        place = (getattr(task_metadata, "name", ""), hf_split, hf_subset)
        if self._split is None or self._split.place != place or not place[0]:
            numbers = list(map(str, range(len(texts))))
            self._split = _Split(place=place, corpus=_corpus(numbers, [""] * len(texts), texts))
        encoder = self._split.encoders.get(instruction)
        if encoder is None:
            encoder = self._split.encoders[instruction] = self._encoder(self._split.corpus, instruction)
        if kind == "query" or instruction:
            return encoder.encode_queries(texts)
        return encoder.encode(texts).document_vectors_NV

    def _instruction(self, task_metadata: Any, kind: Any) -> str:
        """Return what stands before texts of a kind, empty for what the system's settings have.

        Documents of a task that tells them from queries have none.
        """
        prompt: Any = getattr(task_metadata, "prompt", None) if self._has_instructions else None
        if isinstance(prompt, Mapping):
            prompt = prompt.get(kind)
        return instruction_prefix(prompt) if prompt and kind != "document" else ""

    def _encoder(self, corpus: RetrievalSet, instruction: str) -> DocumentEncoder:
        """Return an encoder behind the corpus's context, without token vectors."""
        encoding = self.system.encoding
        context = context_for(corpus, encoding, self._context, self._backbone)
        config = replace(encoding.encoder, query_prefix=instruction or encoding.encoder.query_prefix)
        return DocumentEncoder(config, context, self._backbone)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """Return the cosine of every pair of vectors, which have length one."""
        return torch.as_tensor(embeddings1) @ torch.as_tensor(embeddings2).T

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> torch.Tensor:
        """Return the cosine of each row with the row beside it."""
        return (torch.as_tensor(embeddings1) * torch.as_tensor(embeddings2)).sum(dim=-1)


def _corpus(ids: Sequence[str], titles: Sequence[str], texts: Sequence[str]) -> RetrievalSet:
    return RetrievalSet(
        name="mteb",
        doc_ids=tuple(ids),
        titles=tuple(titles),
        texts=tuple(texts),
        query_ids=(),
        queries=(),
        judgements=Judgements.none(),
    )


def _scores(corpus: RetrievalSet, ranked: RankedDocuments) -> dict[str, float]:
    return {
        corpus.doc_ids[p]: float(s)
        for p, s in zip(ranked.positions.tolist(), ranked.scores.tolist(), strict=True)
    }


def _only(scores: Mapping[str, float], wanted: Sequence[str]) -> dict[str, float]:
    """Keep the wanted documents; one that was no candidate stands below all others."""
    lowest = min(scores.values(), default=0.0) - 1.0
    return {doc_id: scores.get(doc_id, lowest) for doc_id in wanted}
