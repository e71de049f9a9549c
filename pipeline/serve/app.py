"""The application: routes inside a guard inside an envelope, over one set of opened collections.

    create_app(ServeSettings(root=Path("cairn-data")))

Pages and other routers are added to what it returns with FastAPI's own ``mount`` and ``include_router``. The
OpenAPI description is FastAPI's own, with the problems that each route can answer with.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from functools import partial
from importlib.metadata import version
from typing import Any, Final

from cairn.pipeline.collection import load_query_encoder
from cairn.pipeline.errors import StorageError
from cairn.pipeline.index.generation import OpenOne
from cairn.pipeline.serve import (
    answers,
    collection_routes,
    map_routes,
    mcp_routes,
    openai_routes,
    page_routes,
    schemas,
    write_routes,
)
from cairn.pipeline.serve.answers import (
    AdminGrant,
    ServerState,
    State,
    refuse_unknown_parameters,
)
from cairn.pipeline.serve.collections import LoadEncoder
from cairn.pipeline.serve.middleware import METRICS_TYPE, OPEN_PATHS, Envelope, telemetry_config
from cairn.pipeline.serve.problems import (
    MEDIA_TYPE,
    TYPE_PREFIX,
    Kind,
    Problem,
    ProblemError,
    schema_problem,
    search_problem,
)
from cairn.pipeline.serve.schemas import Health
from cairn.pipeline.serve.settings import ServeSettings
from cairn.pipeline.types import Reranker
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response

log = logging.getLogger(__name__)

_DESCRIPTION: Final = (
    "Search documents and their passages, each answer from one generation of a collection. "
    "Errors are problem+json (RFC 9457) with a stable `type`."
)
_STATUSES: Final = sorted({kind.status for kind in Kind})
_OF_A_BODY: Final = {
    kind.status for kind in (Kind.INVALID_JSON, Kind.BODY_SLOW, Kind.BODY_TOO_LARGE, Kind.MEDIA_TYPE_REFUSED)
}

_health = APIRouter(tags=["server"])


@_health.get("/healthz", response_model_exclude_none=True)
async def live() -> Health:
    """Say that the server lives."""
    return Health(status="ok")


@_health.get("/readyz", response_model_exclude_none=True)
async def ready(state: State) -> Health:
    """Say that collections are open: all the server was started for, else at least one if any is published.

    One that is published later is opened when it is first asked for.
    """
    if not state.keyring.is_readable:
        raise Kind.NOT_READY("the server's keeper has to restore the file of keys")
    reason = state.collections.readiness()
    if reason is not None:
        raise Kind.NOT_READY(reason)
    reasons = [*await asyncio.to_thread(state.collections.degraded), *state.writers.troubles()]
    return Health(status="degraded", reason="; ".join(reasons)) if reasons else Health(status="ready")


@_health.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def figures(state: State, grant: AdminGrant) -> Response:  # noqa: ARG001 - the grant is what lets the request in
    """Give the server's figures for Prometheus."""
    return Response(state.metrics.text(), media_type=METRICS_TYPE)


def create_app(
    settings: ServeSettings,
    *,
    load_encoder: LoadEncoder = load_query_encoder,
    reranker: Reranker | None = None,
    on_encoder_thread: Callable[[], None] | None = None,
    open_one: OpenOne | None = None,
) -> FastAPI:
    """Return the application; collections are opened when it starts up.

    ``on_encoder_thread`` runs first on every model's thread. The first search thread limits BLAS to one
    thread in all of the process, unless another thread has set a limit. ``open_one`` opens generations
    elsewhere than in this process.
    """
    state = ServerState(settings, load_encoder, reranker, on_encoder_thread, open_one)
    mcp = mcp_routes.McpEndpoint(is_writable=settings.writable)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        state.start()
        yield
        await mcp.close()
        await state.close()

    app = FastAPI(
        title="Cairn",
        version=version("cairn-index"),
        description=_DESCRIPTION,
        docs_url=None,  # Swagger's page loads its scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        telemetry=telemetry_config(),
        middleware=[Middleware(Envelope, settings=settings, metrics=state.metrics, keyring=state.keyring)],
        exception_handlers={
            RequestValidationError: _refuse_request,
            HTTPException: _refuse_route,
            StorageError: _refuse_storage,
        },
    )
    app.state.server = state
    app.state.mcp = mcp
    searching = (answers.router, collection_routes.router, collection_routes.clicks, map_routes.router)
    openai = (openai_routes.files_router, openai_routes.router)
    for router in (*searching, write_routes.router, *openai, mcp_routes.router):
        app.include_router(router, dependencies=[Depends(refuse_unknown_parameters)])
    for router in (_health, page_routes.router):
        app.include_router(router)
    app.openapi = partial(_describe, app)
    return app


async def _refuse_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    raise schema_problem(error.errors(), _known_fields(request.scope["route"].dependant))


def _known_fields(route: Dependant) -> frozenset[str]:
    """Return what a problem may call by name: what a route takes, and all fields of schemas."""
    own = (*route.path_params, *route.query_params, *route.header_params, *route.body_params)
    return schemas.field_names(schemas.Request).union(
        (field.alias for field in own), *map(_known_fields, route.dependencies)
    )


async def _refuse_route(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 400:  # a form that cannot be read
        if isinstance(error.__cause__, ProblemError):  # why its body did not come
            raise error.__cause__
        if isinstance(error.__cause__, ClientDisconnect):
            raise Kind.BODY_SLOW("the connection ended before it was whole")
        told = "send multipart/form-data with one file, by a name that is not too long, and its purpose"
        raise Kind.INVALID_FORM(told)
    if error.status_code == 404:
        raise Kind.NOT_FOUND("see GET /openapi.json for the addresses there are")
    if error.status_code == 405:
        allowed = {name: value.replace("GET", "GET, HEAD") for name, value in (error.headers or {}).items()}
        raise Kind.METHOD_REFUSED("see GET /openapi.json for its methods", headers=allowed)
    raise Kind.INTERNAL_ERROR()


async def _refuse_storage(_: Request, error: Exception) -> Response:
    assert isinstance(error, StorageError)
    log.error("serve.storage_failed sentence=%s", error)
    raise search_problem(error)


def _describe(app: FastAPI) -> dict[str, Any]:
    """Return the description of an app's routes, made once."""
    if app.openapi_schema is None:
        found = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        schemas = found.setdefault("components", {}).setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        reference = "#/components/schemas/{model}"
        problem = Problem.model_json_schema(ref_template=reference, mode="serialization")
        schemas.update(problem.pop("$defs", {}))
        schemas["Problem"] = problem
        found["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer", "description": "From `cairn keys create`."}
        }
        found["components"]["responses"] = {f"Problem{status}": _response(status) for status in _STATUSES}
        for path, operations in found["paths"].items():
            for operation in operations.values():
                _refer_to_problems(operation, is_open=path in OPEN_PATHS)
        app.openapi_schema = found
    return app.openapi_schema


def _response(status: int) -> dict[str, Any]:
    kinds = [kind for kind in Kind if kind.status == status]
    return {
        "description": "; ".join(f"`{TYPE_PREFIX}{kind.code}`: {kind.title}" for kind in kinds),
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }


def _refer_to_problems(operation: dict[str, Any], *, is_open: bool) -> None:
    operation["responses"] = {
        code: reply for code, reply in operation["responses"].items() if code.startswith("2")
    }
    if not is_open:
        operation["security"] = [{"key": []}, {}]  # none is needed before the first is made
    for status in _STATUSES:
        if "requestBody" in operation or status not in _OF_A_BODY:
            operation["responses"][str(status)] = {"$ref": f"#/components/responses/Problem{status}"}
