"""Searching a collection, and pages of one ranking.

A cursor holds a hash of the generation, the offset and a hash of the request. It is a small JSON object in
base64, not signed. A forged one can only name another place in the same ranking, since filters come with the
request and the key, never with the cursor. The generation is that of one collection: a name that was switched
to another one has no further page, even where the numbers are the same.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from cairn.pipeline.search_options import MAX_TOP_K, SearchKeywords
from cairn.pipeline.serve.answers import SearchGrant, State, hit_reply, json_response, reachable, search
from cairn.pipeline.serve.collections import ServedCollection
from cairn.pipeline.serve.problems import CURSOR_EXPIRED, INVALID_CURSOR, INVALID_REQUEST, ProblemError
from cairn.pipeline.serve.schemas import (
    MAX_ANSWER_TOKENS,
    MAX_RERANK_PAIRS,
    START_CURSOR,
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
    vector = request.query_vector
    if vector is not None and (isinstance(request.query, list) or request.cursor is not None):
        raise ProblemError(
            INVALID_REQUEST, "a query_vector is of a single query and one page; leave the others out"
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
        (result,) = await search(
            state, grant, name, [request.query], options, rerank=request.rerank, vector=vector
        )
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


MAX_DEPTH: Final = MAX_TOP_K
"""Documents that all pages together may hold; the ranking looks that far from the first page on."""
_DIGEST_CHARACTERS: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A page of a request's ranking; ``generation`` is the hash of one, None on the first page."""

    request: str
    offset: int
    generation: str | None

    @classmethod
    def of(cls, cursor: str, query: str, options: Mapping[str, Any]) -> Page:
        """Read a cursor; one of another query or other options raises :class:`ProblemError`."""
        request = _digest(query, options)
        if cursor == START_CURSOR:
            return cls(request=request, offset=0, generation=None)
        try:
            content = json.loads(base64.b64decode(cursor, altchars=b"-_", validate=True))
            generation, offset, digest = content["g"], content["o"], content["r"]
        except (ValueError, KeyError, TypeError, binascii.Error, RecursionError):
            raise _invalid() from None
        is_valid = (
            type(generation) is str and type(offset) is int and 0 < offset < MAX_DEPTH and digest == request
        )
        if not is_valid:
            raise _invalid()
        return cls(request=request, offset=offset, generation=generation)

    def options(self, options: SearchKeywords, top_k: int) -> SearchKeywords:
        """Return the options that answer this page: a ranking of one depth, whatever the page's size."""
        top_k = min(top_k, MAX_DEPTH - self.offset)
        return {**options, "top_k": top_k, "offset": self.offset, "max_candidates": MAX_DEPTH}

    def next_cursor(self, result: SearchResult, served: ServedCollection, top_k: int) -> str | None:
        """Return the next page's cursor, None at the end; one of another generation has expired."""
        run = served.searcher.generation.manifest.run_id  # a collection made anew counts from 1 again
        generation = _hash([served.name, run, result.generation])
        if self.generation not in (None, generation):
            raise ProblemError(CURSOR_EXPIRED, "start again with the first page")
        offset = self.offset + len(result.hits)
        if len(result.hits) < top_k or offset >= MAX_DEPTH:
            return None
        content = json.dumps({"g": generation, "o": offset, "r": self.request}, separators=(",", ":"))
        return base64.urlsafe_b64encode(content.encode()).decode("ascii")


def _digest(query: str, options: Mapping[str, Any]) -> str:
    """Hash what must be the same on every page; the size of a page and its text may differ."""
    kept = {
        name: value for name, value in options.items() if name not in ("top_k", "passages", "chunk_tokens")
    }
    return _hash([query, kept])


def _hash(values: Sequence[Any]) -> str:
    content = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode(errors="replace")).hexdigest()[:_DIGEST_CHARACTERS]


def _invalid() -> ProblemError:
    return ProblemError(
        INVALID_CURSOR, "a cursor goes with the query and the options of the page that gave it out"
    )
