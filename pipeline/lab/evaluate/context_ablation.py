"""What a context is worth: one model behind contexts of several sizes and lengths, of the corpus and not.

    as served    the corpus's context, as an ingest with these settings has it
    none         no context
    random       as many documents of random words
    tied         the second stage embeds the context, where the model has a first stage of its own
    size         8, 32, 128, 512 documents
    tokens       16, 64, 256 tokens of each

Every row changes one thing, and is compared with the first, query by query.

Source: Morris & Rush 2024 (CDE), figure 5 and §10.5 (number of context vectors), §6 (random documents) and §5
(weights not shared between the stages). Differs: random words in place of documents of another corpus; the
tied row is of the same weights, which were not trained for it. Two models trained either way are compared by
evaluating both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.evaluate.bench import run_bench
from cairn.pipeline.lab.evaluate.contexts import has_own_first_stage
from cairn.pipeline.lab.evaluate.encodings import Encoding
from cairn.pipeline.lab.evaluate.measures import NDCG
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet
from cairn.pipeline.lab.evaluate.significance import Comparison, compare_paired
from cairn.pipeline.lab.evaluate.systems import Ranking, System
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.types import ProgressListener, silent_progress

CONTEXT_SIZES: Final = (8, 32, 128, 512)
CONTEXT_TOKENS: Final = (16, 64, 256)
RANKING: Final[Ranking] = "fused"
"""Vectors alone: BM25 reads no context."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AblationRow:
    """One context: its mean nDCG@10 over Q queries, and the difference from the context that is served."""

    name: str
    context_documents: int
    max_document_tokens: int
    ndcg: float
    comparison: Comparison | None


def ablate_context(
    judged: RetrievalSet,
    encoder: EncoderConfig,
    served: ContextConfig,
    *,
    seed: int,
    progress: ProgressListener = silent_progress,
) -> list[AblationRow]:
    """Score a model on one set behind each context; the first row is the one that is served.

    Sizes above the number of documents are left out. A model that reads no context raises
    :class:`ConfigError`.
    """
    if not encoder.needs_context:
        raise ConfigError(
            "--ablate-context must go with a model that reads a context, got settings that use none; choose "
            "another --model, or --use-context"
        )
    rows: list[AblationRow] = []
    reference = None
    for name, encoding, context in _contexts(encoder, served, len(judged.doc_ids)):
        system = System(name=f"context/{name}", encoding=encoding, ranking=RANKING)
        (result,) = run_bench(judged, [system], context, progress)
        values_Q = result.values[NDCG]
        reference = values_Q if reference is None else reference
        is_read = encoding.context != "none"
        rows.append(
            AblationRow(
                name=name,
                context_documents=min(context.context_documents, len(judged.doc_ids)) if is_read else 0,
                max_document_tokens=context.max_document_tokens if is_read else 0,
                ndcg=float(values_Q.mean()),
                comparison=compare_paired(values_Q, reference, seed=seed) if rows else None,
            )
        )
    return rows


def _contexts(
    encoder: EncoderConfig, served: ContextConfig, num_documents: int
) -> Iterator[tuple[str, Encoding, ContextConfig]]:
    corpus = Encoding(encoder=encoder, context="corpus")
    size = min(served.context_documents, num_documents)
    yield "as served", corpus, served
    yield "none", Encoding(encoder=encoder.without_context), served
    yield "random", Encoding(encoder=encoder, context="random"), served
    if has_own_first_stage(load_backbone(encoder)):
        yield "tied", Encoding(encoder=encoder, context="tied"), served
    for documents in CONTEXT_SIZES:
        if documents <= num_documents and documents != size:
            yield f"{documents} documents", corpus, replace(served, context_documents=documents)
    for tokens in CONTEXT_TOKENS:
        if tokens != served.max_document_tokens:
            yield f"{tokens} tokens", corpus, replace(served, max_document_tokens=tokens)
