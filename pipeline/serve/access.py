"""What a route gets beside its request: the server's state, and a grant with the scope the route needs."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, cast

from fastapi import Depends, Request

from pipeline.serve.collections import Collections, ServedCollection
from pipeline.serve.guard import GRANT
from pipeline.serve.keys import Grant
from pipeline.serve.metrics import Metrics
from pipeline.serve.problems import SCOPE_MISSING, ProblemError, unknown_collection
from pipeline.serve.settings import ServeSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerState:
    """Everything the routes of one server share."""

    settings: ServeSettings
    collections: Collections
    metrics: Metrics
    search_pool: ThreadPoolExecutor


async def _state(request: Request) -> ServerState:
    return cast(ServerState, request.app.state.server)


def _scope(name: str) -> Callable[[Request], Any]:
    async def require(request: Request) -> Grant:
        grant = cast(Grant, request.scope[GRANT])
        if name not in grant.scopes:
            raise ProblemError(SCOPE_MISSING, f"this address needs a key with the scope {name}")
        return grant

    return require


State = Annotated[ServerState, Depends(_state)]
SearchGrant = Annotated[Grant, Depends(_scope("search"))]
EmbedGrant = Annotated[Grant, Depends(_scope("embed"))]
AdminGrant = Annotated[Grant, Depends(_scope("admin"))]


async def reachable(state: ServerState, grant: Grant, name: str) -> ServedCollection:
    """Return an opened collection that the grant is for; nobody learns of one that it is not."""
    if not grant.reaches(name):
        raise unknown_collection()
    return await state.collections.get(name)
