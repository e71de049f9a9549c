"""One search of the API, from options to hits as JSON values."""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import decimal
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from cairn.pipeline.errors import (
    CairnError,
    CollectionNotFoundError,
    FingerprintMismatchError,
    IntegrityError,
)
from cairn.pipeline.search.rerank import reranked, widened
from cairn.pipeline.search.searcher import check_queries
from cairn.pipeline.search_options import SearchKeywords, SearchOptions
from cairn.pipeline.serve.access import ServerState, reachable
from cairn.pipeline.serve.collections import ServedCollection
from cairn.pipeline.serve.keys import Grant
from cairn.pipeline.serve.metrics import stage
from cairn.pipeline.serve.problems import (
    INVALID_REQUEST,
    RERANKER_FAILED,
    ProblemError,
    contract,
    search_problem,
)
from cairn.pipeline.serve.schemas import HighlightReply, InvalidField
from cairn.pipeline.types import Document, Highlight, Hit, Reranker, SearchResult
from fastapi import Response
from pydantic import JsonValue
from pydantic_core import to_json

log = logging.getLogger(__name__)

_Reply = TypeVar("_Reply")


async def search(
    state: ServerState,
    grant: Grant,
    name: str,
    queries: Sequence[str],
    options: SearchKeywords,
    *,
    rerank: bool = False,
) -> list[SearchResult]:
    """Answer queries from one generation of a collection, within the grant's restriction."""
    reranker = _reranker(state) if rerank else None
    served = await reachable(state, grant, name)
    try:
        keywords: SearchKeywords = {**options, "restriction": grant.restriction}
        asked = SearchOptions(**keywords)
        check_queries(queries)
        chosen = asked if reranker is None else widened(asked)
    except CairnError as error:
        raise search_problem(error) from None

    async def attempt(opened: ServedCollection) -> list[SearchResult]:
        with stage("search.encode"):
            encoded = await opened.encoder.encode(queries, "search")
        with stage("search.rank"):
            return await state.search_threads.run(
                lambda: opened.searcher.answer(queries, chosen, encoded=encoded)
            )

    with stage("search", collection=name, queries=len(queries)):
        results = await with_collection(state, served, attempt)
    state.metrics.generation.labels(name).set(results[0].generation)
    if reranker is not None:
        with stage("search.rerank"):
            results = await _reranked(state, reranker, results, asked)
    if state.feedback is not None and asked.offset == 0:  # a further page is no other query
        state.feedback.searched(name, results)
    return results


async def read_from(
    state: ServerState, grant: Grant, name: str, read: Callable[[ServedCollection], _Reply]
) -> _Reply:
    """Return what a search thread reads of a collection that the grant reaches."""

    async def attempt(opened: ServedCollection) -> _Reply:
        return await state.search_threads.run(lambda: read(opened))

    return await with_collection(state, await reachable(state, grant, name), attempt)


async def read_document(state: ServerState, grant: Grant, name: str, doc_id: str) -> Document | None:
    """Read a document of a collection, None where the grant shows no such document."""
    return await read_from(
        state,
        grant,
        name,
        lambda served: served.searcher.read_document(doc_id, restriction=grant.restriction),
    )


def _reranker(state: ServerState) -> Reranker:
    if state.reranker is None:
        field = InvalidField(pointer="#/rerank", detail="this server has no cross-encoder; leave it out")
        raise ProblemError(INVALID_REQUEST, "1 part(s) of the request must be changed", errors=[field])
    return state.reranker


async def _reranked(
    state: ServerState, reranker: Reranker, results: Sequence[SearchResult], asked: SearchOptions
) -> list[SearchResult]:
    """Judge answers again, on the thread of the cross-encoder, one after another."""
    found: list[SearchResult] = []
    for result in results:
        try:
            found.append(
                await asyncio.get_running_loop().run_in_executor(
                    state.rerank_pool, reranked, result, reranker, asked
                )
            )
        except CairnError as error:
            log.error("serve.reranker_failed error=%s", type(error).__name__)  # noqa: TRY400 - its message may hold text
            raise ProblemError(
                RERANKER_FAILED, "the model gave no score; the server's log says more"
            ) from None
    return found


async def with_collection(
    state: ServerState, served: ServedCollection, attempt: Callable[[ServedCollection], Awaitable[_Reply]]
) -> _Reply:
    """Await ``attempt(collection)``; errors become problems.

    Where another encoder has made the newest generation, the collection is opened and asked once more; where
    no generation is whole, it is mended and asked again.
    """
    try:
        try:
            reply = await attempt(served)
        except FingerprintMismatchError:
            reply = await attempt(await state.collections.reopen(served))
        except IntegrityError:
            wanted = served.searcher.last_generation.held_files.wanted_file
            if not await state.collections.is_healed(served.name, {wanted} if wanted else ()):
                raise
            reply = await attempt(served)
    except CollectionNotFoundError as error:
        state.collections.forget(served)
        raise search_problem(error) from None
    except CairnError as error:
        problem = search_problem(error)
        if problem.kind.status >= 500:
            log.error(  # noqa: TRY400 - the sentence says it
                "serve.read_failed collection=%s error=%s sentence=%s",
                served.name,
                type(error).__name__,
                contract(error),
            )
        raise problem from error
    state.collections.heal_outdated(served)
    return reply


def json_response(reply: Mapping[str, Any]) -> Response:
    """Return fields of a schema as JSON.

    They are those of the schema in its order; to make and check its objects first takes twice as long.
    """
    return Response(to_json(reply, inf_nan_mode="null"), media_type="application/json")


def hit_reply(hit: Hit, *, include_text: bool) -> dict[str, Any]:
    """Return the fields of a :class:`HitReply`."""
    return {
        "doc_id": hit.doc_id,
        "title": hit.title,
        "score": hit.score,
        "scores": hit.scores,
        "metadata": {name: json_value(value) for name, value in hit.metadata.items()},
        "passages": [
            {
                "start_char": passage.start_char,
                "end_char": passage.end_char,
                "score": passage.score,
                "scores": passage.scores,
                "text": passage.text if include_text else None,
                "highlights": passage.highlights,
                "title_highlights": passage.title_highlights,
            }
            for passage in hit.passages
        ],
    }


def highlight_replies(highlights: Sequence[Highlight]) -> list[HighlightReply]:
    """Return highlights as they are sent."""
    return [
        HighlightReply(
            start_char=each.start_char,
            end_char=each.end_char,
            weight=each.weight,
            query_words=list(each.query_words),
        )
        for each in highlights
    ]


def json_value(value: Any) -> JsonValue:
    """Return a stored value as JSON has it.

    Dates and times as ISO 8601, bytes as base64, decimals as text.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, dict):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return format(value, "f") if isinstance(value, decimal.Decimal) else str(value)
