"""Searching a collection."""

from __future__ import annotations

from typing import Any

from cairn.pipeline.serve.access import SearchGrant, State, reachable
from cairn.pipeline.serve.answers import hit_reply, json_response, search
from cairn.pipeline.serve.cursors import Page
from cairn.pipeline.serve.problems import CURSOR_EXPIRED, INVALID_CURSOR, INVALID_REQUEST, ProblemError
from cairn.pipeline.serve.schemas import (
    MAX_ANSWER_TOKENS,
    MAX_RERANK_PAIRS,
    CollectionName,
    SearchReplies,
    SearchReply,
    SearchRequest,
    answer_tokens,
    rerank_pairs,
    search_keywords,
)
from cairn.pipeline.types import SearchResult
from fastapi import APIRouter, Response

router = APIRouter(tags=["search"])


@router.post("/v1/collections/{name}/search", response_model=SearchReply | SearchReplies)
async def search_collection(
    name: CollectionName, request: SearchRequest, state: State, grant: SearchGrant
) -> Response:
    """Rank the collection's documents for a query, each with its best passages.

    A list of queries gives a list of answers, all from one generation, encoded in one pass.
    """
    if answer_tokens(request) > MAX_ANSWER_TOKENS:
        raise ProblemError(
            INVALID_REQUEST,
            "queries, top_k, passages and chunk_tokens together must ask for at most "
            f"{MAX_ANSWER_TOKENS:,} tokens",
        )
    if rerank_pairs(request) > MAX_RERANK_PAIRS:
        raise ProblemError(
            INVALID_REQUEST,
            f"queries, top_k and passages together must ask to rerank at most {MAX_RERANK_PAIRS:,} passages",
        )
    if request.rerank and request.cursor is not None:
        raise ProblemError(
            INVALID_CURSOR, "reranked results have one page only; leave the cursor out, or rerank"
        )
    options = search_keywords(request)
    if isinstance(request.query, list):
        if request.cursor is not None:
            raise ProblemError(
                INVALID_CURSOR, "pages are of a single query; leave the cursor out, or send one query"
            )
        results = await search(state, grant, name, request.query, options, rerank=request.rerank)
        answers = [_reply(result, request) for result in results]
        return json_response({"generation": results[0].generation, "answers": answers})
    if request.cursor is None:
        (result,) = await search(state, grant, name, [request.query], options, rerank=request.rerank)
        return json_response(_reply(result, request))
    if request.max_characters is not None:
        raise ProblemError(
            INVALID_CURSOR, "a budget of characters is spent on one page; leave the cursor out, or the budget"
        )
    page = Page.of(request.cursor, request.query, options)
    options = page.options(options, request.top_k)
    served = await reachable(state, grant, name)
    result = (await search(state, grant, name, [request.query], options))[0]
    if await reachable(state, grant, name) is not served:  # which of the two answered cannot be told
        raise ProblemError(CURSOR_EXPIRED, "start again with the first page")
    return json_response(_reply(result, request, page.next_cursor(result, served, request.top_k)))


def _reply(result: SearchResult, request: SearchRequest, next_cursor: str | None = None) -> dict[str, Any]:
    """Return the fields of a :class:`SearchReply`."""
    return {
        "query": result.query,
        "generation": result.generation,
        "hits": [hit_reply(hit, include_text=request.include_text) for hit in result.hits],
        "warnings": result.warnings,
        "next_cursor": next_cursor,
    }
