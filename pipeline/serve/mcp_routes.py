"""MCP over streamable HTTP: the tools of ``cairn mcp`` for all collections that a request's key reaches.

Each request stands alone: there are no sessions and no streams, so that every answer keeps to the server's
deadline. The SDK is imported by the first request, which takes a second; a server that nobody asks this way
does without it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, cast

from cairn.pipeline.errors import ConfigError
from cairn.pipeline.search_options import SearchKeywords
from cairn.pipeline.serve import answers
from cairn.pipeline.serve.access import SearchGrant, ServerState
from cairn.pipeline.serve.guard import GRANT
from cairn.pipeline.serve.keys import Grant
from cairn.pipeline.serve.problems import NOT_FOUND, ProblemError
from cairn.pipeline.types import Document, SearchResult
from fastapi import APIRouter, Request, Response
from typing_extensions import Unpack, override

if TYPE_CHECKING:
    from mcp.server.mcpserver import Context
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
    from starlette.types import Receive, Scope, Send

router = APIRouter()


@router.post("/mcp", include_in_schema=False)
async def exchange(request: Request, grant: SearchGrant) -> Response:  # noqa: ARG001 - the grant is what lets the request in
    """Answer one message of a language model's host."""
    return _Exchange(await cast(McpEndpoint, request.app.state.mcp).manager())


class _Exchange(Response):
    """What the SDK answers."""

    def __init__(self, manager: StreamableHTTPSessionManager) -> None:
        super().__init__()
        self._manager = manager

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._manager.handle_request(scope, receive, send)


class McpEndpoint:
    """The MCP server of all collections, started when it is first asked for."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._manager: StreamableHTTPSessionManager | None = None
        self._task: asyncio.Task[None] | None = None

    async def manager(self) -> StreamableHTTPSessionManager:
        """Return what answers requests; without the extra ``mcp`` raise a problem."""
        async with self._lock:
            if self._manager is None:
                try:
                    manager = await asyncio.to_thread(_make_manager)
                except ConfigError:
                    raise ProblemError(
                        NOT_FOUND, "MCP needs the server's keeper to install the extra mcp of cairn-index"
                    ) from None
                is_running = asyncio.Event()
                self._task = asyncio.create_task(_run(manager, is_running))
                await is_running.wait()
                self._manager = manager
        return self._manager

    async def close(self) -> None:
        """Stop it."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task


async def _run(manager: StreamableHTTPSessionManager, is_running: asyncio.Event) -> None:
    """Run a manager in a task of its own: its task group is left where it was entered."""
    async with manager.run():
        is_running.set()
        await asyncio.Event().wait()


def _make_manager() -> StreamableHTTPSessionManager:
    from cairn.pipeline.frameworks.mcp_server import make_server, session_manager

    def open_library(context: Context[Any, Request]) -> _ServedLibrary:
        request = context.request_context.request
        assert request is not None
        return _ServedLibrary(request.app.state.server, request.scope[GRANT])

    return session_manager(make_server(open_library))


class _ServedLibrary:
    """The collections that a grant reaches, as the tools read them."""

    def __init__(self, state: ServerState, grant: Grant) -> None:
        self._state = state
        self._grant = grant

    async def names(self) -> list[str]:
        """Return the names of the collections the grant reaches."""
        listed = await self._state.search_threads.run(self._state.collections.listed)
        return [name for name in listed if self._grant.reaches(name)]

    async def search(self, collection: str, query: str, **options: Unpack[SearchKeywords]) -> SearchResult:
        """Search as the other routes do."""
        with _sentences():
            return (await answers.search(self._state, self._grant, collection, [query], options))[0]

    async def read_document(self, collection: str, doc_id: str) -> Document | None:
        """Read as the other routes do."""
        with _sentences():
            return await answers.read_document(self._state, self._grant, collection, doc_id)


@contextlib.contextmanager
def _sentences() -> Generator[None]:
    """Tell a model what a problem is as a tool does."""
    from mcp.server.mcpserver.exceptions import ToolError

    try:
        yield
    except ProblemError as problem:
        errors = (f"{error.pointer}: {error.detail}" for error in problem.errors)
        raise ToolError("; ".join([problem.kind.title, problem.detail, *errors])) from None
