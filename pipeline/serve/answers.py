"""One search, from checked options to hits: encoded in company, ranked on a thread of its own, given as JSON values.

Options are checked before the encoder is asked, and again, with the collection's columns, by the searcher.
"""

from __future__ import annotations

import asyncio
import base64
import datetime as dt
import decimal
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pydantic import JsonValue

from pipeline.errors import CairnError, CollectionNotFoundError, FingerprintMismatchError
from pipeline.search.options import SearchOptions, check_queries
from pipeline.serve.access import ServerState, reachable
from pipeline.serve.collections import ServedCollection
from pipeline.serve.keys import Grant
from pipeline.serve.problems import search_problem
from pipeline.serve.schemas import HitReply, PassageReply
from pipeline.types import Hit, SearchResult

_Result = TypeVar("_Result")


async def search(state: ServerState, grant: Grant, name: str, queries: Sequence[str], options: dict[str, Any]) -> list[SearchResult]:
    """Answer queries from one generation of a collection, within the grant's restriction."""
    options = {**options, "restriction": grant.restriction}
    served = await reachable(state, grant, name)
    try:
        SearchOptions(**options)
        check_queries(queries)
    except CairnError as error:
        raise search_problem(error) from None

    async def attempt(opened: ServedCollection) -> list[SearchResult]:
        vectors = await opened.encoder.encode(queries)
        return await on_search_thread(state, lambda: opened.searcher.search_vectors(vectors, queries=queries, **options))

    results = await with_collection(state, served, attempt)
    state.metrics.generation.labels(name).set(results[0].generation)
    return results


async def with_collection(state: ServerState, served: ServedCollection, attempt: Callable[[ServedCollection], Any]) -> Any:
    """Await ``attempt(collection)``; a generation of another encoder is opened and asked once more, errors become problems."""
    try:
        try:
            return await attempt(served)
        except FingerprintMismatchError:
            return await attempt(await state.collections.reopen(served))
    except CollectionNotFoundError as error:
        state.collections.forget(served)
        raise search_problem(error) from None
    except CairnError as error:
        raise search_problem(error) from error


async def on_search_thread(state: ServerState, call: Callable[[], _Result]) -> _Result:
    """Run a blocking read on a search thread."""

    def timed() -> _Result:
        started_seconds = time.perf_counter()
        try:
            return call()
        finally:
            state.metrics.search_seconds.observe(time.perf_counter() - started_seconds)

    return await asyncio.get_running_loop().run_in_executor(state.search_pool, timed)


def hit_reply(hit: Hit, *, include_text: bool) -> HitReply:
    """Return a hit as it is sent."""
    return HitReply(
        doc_id=hit.doc_id,
        title=hit.title,
        score=hit.score,
        scores=dict(hit.scores),
        metadata={name: json_value(value) for name, value in hit.metadata.items()},
        passages=[
            PassageReply(
                start_char=passage.start_char,
                end_char=passage.end_char,
                score=passage.score,
                scores=dict(passage.scores),
                text=passage.text if include_text else None,
            )
            for passage in hit.passages
        ],
    )


def json_value(value: Any) -> JsonValue:
    """Return a stored value as JSON has it: dates and times as ISO 8601, bytes as base64, decimals as text."""
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
