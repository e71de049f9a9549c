"""MCP over streamable HTTP: the tools of ``cairn mcp`` for all collections that a request's key reaches.

Each request stands alone: there are no sessions and no streams, so that every answer keeps to the server's
deadline. The SDK is imported by the first request, which takes a second; a server that no one asks this way
does without it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast

from cairn.pipeline.errors import ConfigError
from cairn.pipeline.frameworks.source import Readable, faults_of
from cairn.pipeline.line.live import LiveWriter, Receipt
from cairn.pipeline.line.written_rows import Stored
from cairn.pipeline.search.contents import count_documents, list_matches, read_document, summarise_columns
from cairn.pipeline.search.searcher import Searcher
from cairn.pipeline.search_options import SearchKeywords
from cairn.pipeline.serve.answers import SearchGrant, ServerState
from cairn.pipeline.serve.collections import ServedCollection
from cairn.pipeline.serve.keys import ApiKey
from cairn.pipeline.serve.middleware import GRANT, replay, require_scope
from cairn.pipeline.serve.problems import Kind, ProblemError
from cairn.pipeline.serve.write_routes import AskedWrite, delete_one
from cairn.pipeline.types import ColumnSummary, Document, ListedDocument, SearchResult
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, ValidationError
from typing_extensions import Unpack, override

if TYPE_CHECKING:
    from mcp.server.mcpserver import Context
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
    from starlette.types import Receive, Scope, Send

router = APIRouter()
_Answer = TypeVar("_Answer")
LISTED: Final = 101
"""Documents that are read for a list: one more than a tool gives."""
INVALID_REQUEST: Final = -32600
"""JSON-RPC's code."""


@router.post("/mcp", include_in_schema=False)
@router.post("/mcp/", include_in_schema=False)
async def exchange(request: Request, grant: SearchGrant) -> Response:  # noqa: ARG001 - the grant is what lets the request in
    """Answer one message of a language model's host."""
    manager = await cast(McpEndpoint, request.app.state.mcp).manager()
    body = await request.body()
    try:
        _Message.model_validate_json(body)
    except ValidationError as error:
        fault = {"code": INVALID_REQUEST, "message": f"{faults_of(error)}, as JSON-RPC 2.0 has it"}
        return JSONResponse({"jsonrpc": "2.0", "id": None, "error": fault}, status_code=400)
    return _Exchange(manager, body)


class _Message(BaseModel):
    """What must be of a request of JSON-RPC."""

    model_config = ConfigDict(strict=True)

    jsonrpc: Literal["2.0"]
    method: str
    params: dict[str, Any] = {}
    id: str | int = 0


class _Exchange(Response):
    """What the SDK answers."""

    def __init__(self, manager: StreamableHTTPSessionManager, body: bytes) -> None:
        super().__init__()
        self._manager, self._body = manager, body

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._manager.handle_request(scope, replay(self._body), send)


class McpEndpoint:
    """The MCP server of all collections, started when it is first asked for."""

    def __init__(self, *, is_writable: bool) -> None:
        self._is_writable = is_writable
        self._lock = asyncio.Lock()
        self._manager: StreamableHTTPSessionManager | None = None
        self._task: asyncio.Task[None] | None = None

    async def manager(self) -> StreamableHTTPSessionManager:
        """Return what answers requests; without the extra ``mcp`` raise a problem."""
        async with self._lock:
            if self._manager is None:
                try:
                    manager = await asyncio.to_thread(_make_manager, self._is_writable)
                except ConfigError:
                    raise Kind.NOT_FOUND(
                        "MCP needs the server's keeper to install the extra mcp of cairn-index"
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


def _make_manager(is_writable: bool) -> StreamableHTTPSessionManager:
    from cairn.pipeline.frameworks.mcp_server import make_server, session_manager

    def open_library(context: Context[Any, Request]) -> _ServedLibrary:
        request = context.request_context.request
        assert request is not None
        return _ServedLibrary(request.app.state.server, request.scope[GRANT])

    return session_manager(make_server(open_library, open_library if is_writable else None))


class _Visible:
    """What a grant shows of a collection."""

    def __init__(self, searcher: Searcher, within: Mapping[str, Any] | None) -> None:
        self._searcher, self._within = searcher, within

    def read_document(self, doc_id: str) -> Document | None:
        return self._searcher.reading(read_document, doc_id, self._within)

    def columns(self) -> list[ColumnSummary]:
        return self._searcher.reading(summarise_columns, restriction=self._within)

    def count(self, filters: Mapping[str, Any] | None = None) -> int:
        return self._searcher.reading(count_documents, self._within, filters)

    def list_documents(
        self, filters: Mapping[str, Any] | None = None, *, after: str | None = None
    ) -> Iterator[ListedDocument]:
        page = self._searcher.reading(list_matches, filters, after, LISTED, self._within)
        return iter(page.documents)


class _ServedLibrary:
    """The collections that a grant reaches, as the tools read them."""

    def __init__(self, state: ServerState, grant: ApiKey) -> None:
        self._state = state
        self._grant = grant

    async def names(self) -> list[str]:
        listed = await self._state.search_threads.run(self._state.collections.listed)
        return [name for name in listed if self._grant.reaches(name)]

    async def search(self, collection: str, query: str, **options: Unpack[SearchKeywords]) -> SearchResult:
        with _sentences():
            return (await self._asked(collection).search([query], options))[0]

    async def read(self, collection: str, read: Callable[[Readable], _Answer]) -> _Answer:
        def visible(served: ServedCollection) -> _Answer:
            return read(_Visible(served.searcher, self._grant.restriction))

        with _sentences():
            return await self._asked(collection).read_served(visible)

    async def add_document(
        self, collection: str, doc_id: str, text: str, title: str | None, metadata: dict[str, Any]
    ) -> None:
        row = {"doc_id": doc_id, "title": title, "text": text, "metadata": metadata}
        await self._write(collection, lambda writer, stored: writer.write([row], stored))

    async def delete_document(self, collection: str, doc_id: str) -> None:
        await self._write(collection, lambda writer, stored: delete_one(writer, stored, doc_id))

    async def _write(self, collection: str, write: Callable[[LiveWriter, Stored], Receipt | None]) -> None:
        with _sentences():
            require_scope(self._grant, "write", self._state.settings)
            await self._asked(collection).answered(write)

    def _asked(self, collection: str) -> AskedWrite:
        return AskedWrite(self._state, self._grant, collection, wait="searchable")


@contextlib.contextmanager
def _sentences() -> Generator[None]:
    """Tell a model what a problem is as a tool does."""
    from mcp.server.mcpserver.exceptions import ToolError

    try:
        yield
    except ProblemError as problem:
        if problem.kind is Kind.UNKNOWN_COLLECTION:
            raise ToolError(f"{problem.kind.title}; list_collections names those there are") from None
        errors = (f"{error.pointer}: {error.detail}" for error in problem.errors)
        raise ToolError("; ".join([problem.kind.title, problem.detail, *errors])) from None
