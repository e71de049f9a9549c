"""The application: routes inside a guard inside an envelope, over one set of opened collections.

    create_app(ServeSettings(root=Path("cairn-data")))

Pages and other routers are added to what it returns with FastAPI's own ``mount`` and ``include_router``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.metadata import version
from typing import Final

from cairn.pipeline.collection import load_query_encoder
from cairn.pipeline.search.reader import LocalReader
from cairn.pipeline.search.served import MakeReader
from cairn.pipeline.serve import (
    collection_routes,
    health_routes,
    map_routes,
    mcp_routes,
    openai_routes,
    openai_schemas,
    openapi,
    page_routes,
    schemas,
    search_routes,
    vector_store_routes,
)
from cairn.pipeline.serve.access import SearchThreads, ServerState, refuse_unknown_parameters
from cairn.pipeline.serve.collections import Collections, LoadEncoder
from cairn.pipeline.serve.envelope import Envelope
from cairn.pipeline.serve.feedback_log import FeedbackLog
from cairn.pipeline.serve.guard import Guard
from cairn.pipeline.serve.keys import KeyFile, Keyring
from cairn.pipeline.serve.length_curve import LengthBin
from cairn.pipeline.serve.maps.corpus_map import CorpusMap
from cairn.pipeline.serve.maps.map_cache import GenerationCache, lower_thread_priority
from cairn.pipeline.serve.maps.map_files import MapFiles
from cairn.pipeline.serve.metrics import Metrics, telemetry_config
from cairn.pipeline.serve.problems import (
    INTERNAL_ERROR,
    METHOD_REFUSED,
    NOT_FOUND,
    OPENAI_PATHS,
    ProblemError,
    schema_problem,
)
from cairn.pipeline.serve.schemas import Combination, Comparison, Membership
from cairn.pipeline.serve.settings import ServeSettings, num_processors
from cairn.pipeline.types import Reranker
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import Response
from threadpoolctl import threadpool_limits

_DESCRIPTION: Final = (
    "Search documents and their passages, each answer from one generation of a collection. "
    "Errors are problem+json (RFC 9457) with a stable `type`."
)
_REQUESTS: Final = (
    *(schemas.SearchRequest, schemas.Weights, Comparison, Membership, Combination),
    collection_routes.ClickRequest,
    *(openai_schemas.VectorStoreSearch, openai_schemas.RankingOptions, openai_schemas.EmbeddingsRequest),
)
_PARAMETERS: Final = frozenset(
    {"name", "doc_id", "start_char", "max_characters"}
    | {"vector_store_id", "file_id", "limit", "order", "after", "before", "filter"}
)
_KNOWN_FIELDS: Final = schemas.field_names(*_REQUESTS) | _PARAMETERS


def create_app(
    settings: ServeSettings,
    *,
    load_encoder: LoadEncoder = load_query_encoder,
    reranker: Reranker | None = None,
    on_encoder_thread: Callable[[], None] | None = None,
    make_reader: MakeReader = LocalReader,
) -> FastAPI:
    """Return the application; collections are opened when it starts up.

    ``on_encoder_thread`` runs first on every model's thread. The first search thread limits BLAS to one
    thread in all of the process, unless another thread has set a limit. ``make_reader`` says who reads the
    segments of a generation.
    """
    metrics = Metrics()
    keys = KeyFile(settings.keys_path)
    keyring = Keyring(keys, is_required=not settings.is_loopback)
    collections = Collections(
        settings,
        load_encoder,
        on_start=on_encoder_thread,
        observe=metrics.observe_pass,
        make_reader=make_reader,
    )
    # A search thread is one processor's work: threads of FAISS and BLAS would spin beside it, waiting for
    # more, where others could work.
    pool = ThreadPoolExecutor(
        settings.search_threads or num_processors(),
        thread_name_prefix="cairn-search",
        initializer=partial(threadpool_limits, limits=1),
    )
    rerank_pool = ThreadPoolExecutor(1, thread_name_prefix="cairn-rerank", initializer=on_encoder_thread)
    map_pool = ThreadPoolExecutor(1, thread_name_prefix="cairn-map", initializer=lower_thread_priority)
    maps = GenerationCache[CorpusMap](map_pool)
    feedback = settings.feedback_log and FeedbackLog(
        settings.feedback_log, settings.feedback_log_megabytes << 20
    )
    mcp = mcp_routes.McpEndpoint()

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncGenerator[None]:
        collections.start_preloading()
        if feedback is not None:
            feedback.start()
        yield
        if feedback is not None:
            await asyncio.to_thread(feedback.stop)
        maps.stop()
        await mcp.close()
        await collections.close()
        for each in (pool, rerank_pool, map_pool):
            each.shutdown(wait=False, cancel_futures=True)

    app = FastAPI(
        title="Cairn",
        version=version("cairn-index"),
        description=_DESCRIPTION,
        docs_url=None,  # Swagger's page loads its scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
        telemetry=telemetry_config(),
        middleware=[
            Middleware(
                Envelope,
                metrics=metrics,
                max_requests=settings.max_requests,
                deadline_seconds=settings.deadline_seconds,
            ),
            Middleware(Guard, settings=settings, keyring=keyring),
        ],
        exception_handlers={RequestValidationError: _refuse_request, HTTPException: _refuse_route},
    )
    app.state.server = ServerState(
        settings=settings,
        keyring=keyring,
        collections=collections,
        metrics=metrics,
        search_threads=SearchThreads(pool, metrics.observe_search),
        rerank_pool=rerank_pool,
        reranker=reranker,
        maps=maps,
        map_files=MapFiles(),
        length_curves=GenerationCache[list[LengthBin]](pool),
        feedback=feedback,
    )
    app.state.mcp = mcp
    searching = (search_routes.router, collection_routes.router, collection_routes.clicks, map_routes.router)
    openai = (openai_routes.router, vector_store_routes.router)
    for router in (*searching, *openai, mcp_routes.router):
        app.include_router(router, dependencies=[Depends(refuse_unknown_parameters)])
    for routes in (health_routes, page_routes):
        app.include_router(routes.router)
    app.openapi = partial(openapi.describe, app)
    return app


async def _refuse_request(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    raise schema_problem(error.errors(), _KNOWN_FIELDS)


async def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if request.method != "GET" and request.url.path.startswith(OPENAI_PATHS):
        raise ProblemError(
            METHOD_REFUSED,
            "vector stores are only read here; collections are written by `ingest` and the Python library",
            headers=error.headers,
        )
    if error.status_code == 404:
        raise ProblemError(NOT_FOUND, "see GET /openapi.json for the addresses there are")
    if error.status_code == 405:
        allowed = {name: value.replace("GET", "GET, HEAD") for name, value in (error.headers or {}).items()}
        raise ProblemError(METHOD_REFUSED, "see GET /openapi.json for its methods", headers=allowed)
    raise ProblemError(INTERNAL_ERROR, "the server's log says more")
