"""Dependencies of the routes: the server's state, a grant of the needed scope, no undeclared parameters."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast, get_origin

from cairn.pipeline.serve.collections import Collections, ServedCollection
from cairn.pipeline.serve.feedback_log import FeedbackLog
from cairn.pipeline.serve.guard import GRANT
from cairn.pipeline.serve.keys import Grant, Keyring
from cairn.pipeline.serve.length_curve import LengthBin
from cairn.pipeline.serve.maps.corpus_map import CorpusMap
from cairn.pipeline.serve.maps.map_cache import GenerationCache
from cairn.pipeline.serve.maps.map_files import MapFiles
from cairn.pipeline.serve.metrics import Metrics
from cairn.pipeline.serve.problems import (
    INVALID_REQUEST,
    SCOPE_MISSING,
    ProblemError,
    unknown_collection,
    unknown_names,
)
from cairn.pipeline.serve.schemas import MAX_TOLD, InvalidField
from cairn.pipeline.serve.settings import ServeSettings
from cairn.pipeline.types import Reranker
from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class SearchThreads:
    """Threads for the blocking work of requests, reading and ranking, never encoding; calls are timed."""

    pool: ThreadPoolExecutor
    observe_seconds: Callable[[float], None]

    async def run(self, call: Callable[[], _Result]) -> _Result:
        """Await a blocking call."""

        def timed() -> _Result:
            started_seconds = time.perf_counter()
            try:
                return call()
            finally:
                self.observe_seconds(time.perf_counter() - started_seconds)

        return await asyncio.get_running_loop().run_in_executor(self.pool, timed)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerState:
    """Everything the routes of one server share."""

    settings: ServeSettings
    keyring: Keyring
    collections: Collections
    metrics: Metrics
    search_threads: SearchThreads
    rerank_pool: ThreadPoolExecutor
    reranker: Reranker | None
    maps: GenerationCache[CorpusMap]
    map_files: MapFiles
    length_curves: GenerationCache[list[LengthBin]]
    feedback: FeedbackLog | None


async def _state(request: Request) -> ServerState:
    return cast(ServerState, request.app.state.server)


def _scope(name: str) -> Callable[[Request], Any]:
    async def require(request: Request) -> Grant:
        grant = cast(Grant, request.scope[GRANT])
        if name not in grant.scopes:
            raise ProblemError(SCOPE_MISSING, f"this address needs a key with the scope {name}")
        return grant

    return require


async def _require_whole_server(request: Request) -> Grant:
    """Return a grant of the scope admin, which is of no use to a key for some collections or documents.

    Figures are of all.
    """
    grant = await _scope("admin")(request)
    if grant.collections is not None or grant.restriction is not None:
        raise ProblemError(
            SCOPE_MISSING,
            "the server's figures are of all collections: they need a key without a filter and for all "
            "of them",
        )
    return grant


State = Annotated[ServerState, Depends(_state)]
SearchGrant = Annotated[Grant, Depends(_scope("search"))]
EmbedGrant = Annotated[Grant, Depends(_scope("embed"))]
AdminGrant = Annotated[Grant, Depends(_require_whole_server)]


async def reachable(state: ServerState, grant: Grant, name: str) -> ServedCollection:
    """Return an opened collection that the grant is for; others look unknown."""
    if not grant.reaches(name):
        raise unknown_collection()
    return await state.collections.get(name)


async def refuse_unknown_parameters(request: Request) -> None:
    """Refuse query parameters that the route does not declare, or that come twice.

    One that is ignored looks like one that works.
    """
    if not request.scope["query_string"]:
        return
    taken = dict(_query_parameters(cast(APIRoute, request.scope["route"]).dependant))
    advice = f"this address takes {', '.join(taken)}" if taken else "this address takes none"
    if request.method == "POST":
        advice += ": what is asked goes into the body"
    sent = Counter(name for name, _ in request.query_params.multi_items())
    wrong = unknown_names("query", [name for name in sent if name not in taken][:MAX_TOLD], advice)
    wrong += [
        InvalidField(pointer=f"query/{name}", detail="there must be one of it")
        for name, count in sent.items()
        if count > 1 and taken.get(name) is False
    ]
    if wrong:
        raise ProblemError(
            INVALID_REQUEST, f"{len(wrong)} part(s) of the request must be changed", errors=wrong
        )


def _query_parameters(dependant: Dependant) -> Iterator[tuple[str, bool]]:
    """Give the name of each parameter, and whether it may come more than once."""
    for field in dependant.query_params:
        yield field.alias, get_origin(field.field_info.annotation) is list
    for each in dependant.dependencies:
        yield from _query_parameters(each)
