"""OpenAI's search and embeddings, so that its clients need only another base URL."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from cairn.pipeline.search_options import SearchKeywords
from cairn.pipeline.serve.access import EmbedGrant, SearchGrant, State, reachable
from cairn.pipeline.serve.answers import highlight_replies, json_value, search
from cairn.pipeline.serve.openai_schemas import (
    Embedding,
    Embeddings,
    EmbeddingsRequest,
    FileResult,
    FileResults,
    PassageContent,
    Usage,
    VectorStoreSearch,
)
from cairn.pipeline.serve.problems import INVALID_REQUEST, ProblemError
from cairn.pipeline.serve.schemas import CollectionName, InvalidField, plain
from cairn.pipeline.types import Hit, SearchResult
from fastapi import APIRouter
from jaxtyping import Float32

router = APIRouter(prefix="/v1", tags=["openai"])


@router.post("/vector_stores/{vector_store_id}/search")
async def search_vector_store(
    vector_store_id: CollectionName, request: VectorStoreSearch, state: State, grant: SearchGrant
) -> FileResults:
    """Search a collection as OpenAI's clients search a vector store."""
    queries = request.query if isinstance(request.query, list) else [request.query]
    options: SearchKeywords = {"top_k": request.max_num_results, "filters": plain(request.filters)}
    results = await search(state, grant, vector_store_id, queries, options)
    threshold = request.ranking_options.score_threshold if request.ranking_options else 0.0
    found = [_file_result(hit) for hit in _best_of(results)[: request.max_num_results]]
    return FileResults(
        search_query=list(queries),
        data=[result for result in found if result.score >= threshold],
        warnings=list(dict.fromkeys(warning for result in results for warning in result.warnings)),
    )


@router.post("/embeddings")
async def embed(request: EmbeddingsRequest, state: State, grant: EmbedGrant) -> Embeddings:
    """Embed texts with a collection's encoder and context."""
    served = await reachable(state, grant, request.model)
    encoder = served.encoder.encoder
    if request.dimensions not in (None, encoder.vector_dim):
        field = InvalidField(
            pointer="#/dimensions",
            detail=f"the collection's vectors have {encoder.vector_dim} dimensions; leave it out",
        )
        raise ProblemError(INVALID_REQUEST, "1 part(s) of the request must be changed", errors=[field])
    texts = request.input if isinstance(request.input, list) else [request.input]
    num_tokens = await state.search_threads.run(lambda: encoder.count_tokens(texts))
    vectors = await served.encoder.encode(texts, request.input_type)
    return Embeddings(
        data=[
            Embedding(
                index=index,
                embedding=_encoded(vector) if request.encoding_format == "base64" else vector.tolist(),
            )
            for index, vector in enumerate(vectors)
        ],
        model=request.model,
        usage=Usage(prompt_tokens=num_tokens, total_tokens=num_tokens),
    )


def _best_of(results: Sequence[SearchResult]) -> list[Hit]:
    """Merge answers: each document once, with the hit that scored best, ties by id."""
    best: dict[str, Hit] = {}
    for hit in (hit for result in results for hit in result.hits):
        if hit.doc_id not in best or hit.score > best[hit.doc_id].score:
            best[hit.doc_id] = hit
    return sorted(best.values(), key=lambda hit: (-hit.score, hit.doc_id))


def _file_result(hit: Hit) -> FileResult:
    return FileResult(
        file_id=hit.doc_id,
        filename=hit.title or hit.doc_id,
        score=hit.score,
        attributes=attributes_of(hit.metadata),
        content=[
            PassageContent(
                text=passage.text,
                start_char=passage.start_char,
                end_char=passage.end_char,
                highlights=highlight_replies(passage.highlights),
                title_highlights=highlight_replies(passage.title_highlights),
            )
            for passage in hit.passages
        ],
    )


def attributes_of(metadata: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """Return what of a document's columns OpenAI's attributes can hold."""
    values = {name: json_value(value) for name, value in metadata.items()}
    return {name: value for name, value in values.items() if isinstance(value, str | bool | int | float)}


def _encoded(vector: Float32[np.ndarray, " V"]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
