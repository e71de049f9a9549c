"""An MCP server whose tools search, read, list and count.

    cairn mcp handbook                                   one collection, on stdin and stdout
    cairn serve                                          all collections, over HTTP at /mcp

A writable server over HTTP has ``add_document`` and ``delete_document`` too. Nothing else can be changed.
Answers are bounded in characters, since a model reads them whole. Where collections are read from is a
:class:`Library`; the HTTP server brings its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import version
from itertools import islice
from typing import Annotated, Any, Final, Protocol, TypeVar

from anyio import to_thread
from cairn.pipeline.errors import CairnError, extra_missing
from cairn.pipeline.frameworks.source import Readable, Searchable, faults_of
from cairn.pipeline.manifest import COLLECTION_NAME
from cairn.pipeline.search_options import SearchKeywords
from cairn.pipeline.types import Document, Hit, ListedDocument, Passage, SearchResult, json_value
from pydantic import BaseModel, Field, ValidationError
from typing_extensions import Unpack, override

try:
    from mcp.server import MCPServer
    from mcp.server.mcpserver import Context
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
    from mcp.server.transport_security import TransportSecuritySettings
    from mcp.types import ToolAnnotations
except ModuleNotFoundError as error:
    raise extra_missing(error, what="the MCP server", module="mcp", package="mcp", extra="mcp") from None

_Answer = TypeVar("_Answer")

MAX_TOP_K: Final = 50
MAX_ANSWER_CHARACTERS: Final = 20_000
DEFAULT_ANSWER_CHARACTERS: Final = 4_000
MAX_STRETCH_CHARACTERS: Final = 50_000
DEFAULT_STRETCH_CHARACTERS: Final = 10_000
MAX_LISTED: Final = 100
_READS: Final = ToolAnnotations(
    read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
)
_WRITES: Final = ToolAnnotations(
    read_only_hint=False, destructive_hint=True, idempotent_hint=True, open_world_hint=False
)
MAX_TEXT_CHARACTERS: Final = 200_000


class PassageAnswer(BaseModel):
    """A span of a document: characters ``start_char`` to ``end_char`` of its text.

    ``page`` is where it stands in its file, such as `page 3` or `section Install`. ``highlights`` are its
    words that answered the query, strongest first.
    """

    start_char: int
    end_char: int
    page: str | None
    text: str
    score: float
    highlights: list[str]


class DocumentAnswer(BaseModel):
    """A document with the passages that answer best; ``doc_id`` is what get_document takes."""

    doc_id: str
    title: str | None
    score: float
    metadata: dict[str, Any]
    passages: list[PassageAnswer]


class SearchAnswer(BaseModel):
    """Ranked documents, all from one generation of the collection; ``warnings`` say what the answer lacks."""

    collection: str
    generation: int
    documents: list[DocumentAnswer]
    warnings: list[str]


class DocumentStretch(BaseModel):
    """A stretch of a document's text; ``end_char`` < ``num_characters`` says that there is more."""

    doc_id: str
    title: str | None
    metadata: dict[str, Any]
    start_char: int
    end_char: int
    num_characters: int
    text: str


class ColumnAnswer(BaseModel):
    """A column that filters may name, its most frequent values with the number of documents, its range."""

    name: str
    type: str
    values: dict[str, int]
    low: Any
    high: Any


class ListAnswer(BaseModel):
    """Documents that match, in the order of their ids; ``next_after`` asks for more, null where none are."""

    documents: list[ListedDocument]
    next_after: str | None


class Library(Protocol):
    """Where the tools read. What cannot be answered raises ``ToolError`` with a sentence."""

    async def names(self) -> list[str]:
        """Return the names of the collections."""
        ...

    async def search(self, collection: str, query: str, **options: Unpack[SearchKeywords]) -> SearchResult:
        """Search a collection."""
        ...

    async def read(self, collection: str, read: Callable[[Readable], _Answer]) -> _Answer:
        """Return what a call reads of a collection, on a thread."""
        ...


class WritableLibrary(Library, Protocol):
    """A library whose documents can be changed."""

    async def add_document(
        self, collection: str, doc_id: str, text: str, title: str | None, metadata: dict[str, Any]
    ) -> None:
        """Add a document, or replace the one of this id, for the next search."""
        ...

    async def delete_document(self, collection: str, doc_id: str) -> None:
        """Delete a document."""
        ...


class OneCollection:
    """A library of one collection: of this machine, or behind the API."""

    def __init__(self, collection: Searchable) -> None:
        self._collection = collection

    async def names(self) -> list[str]:
        """Return its name."""
        return [self._collection.name]

    async def search(self, collection: str, query: str, **options: Unpack[SearchKeywords]) -> SearchResult:
        """Search it, on a thread."""
        return await self.read(collection, lambda _: self._collection.search(query, **options))

    async def read(self, collection: str, read: Callable[[Readable], _Answer]) -> _Answer:
        """Read of it, on a thread."""
        if collection != self._collection.name:
            raise ToolError(f"the only collection is {self._collection.name!r}")
        try:
            return await to_thread.run_sync(read, self._collection)
        except CairnError as error:
            raise ToolError(error.fault) from None


CollectionArgument = Annotated[
    str | None,
    Field(
        pattern=f"^{COLLECTION_NAME.pattern}$",
        description="A name that list_collections gave; needed where there are several.",
    ),
]


class _Server(MCPServer):
    """Tells what is wrong with a tool's arguments in sentences."""

    @override
    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
        """Call a tool as the SDK does."""
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            if not isinstance(error.__cause__, ValidationError):
                raise
            told = f"the arguments of {name} must fit its schema, got {faults_of(error.__cause__)}"
            raise ToolError(told) from None


FilterArgument = Annotated[
    dict[str, Any] | None,
    Field(
        description='What documents must match: columns with values, such as {"kind": ["guide", "note"]}, '
        'or {"type": "gte", "key": "year", "value": 2020}; list_columns names the columns.'
    ),
]


def make_server(
    open_library: Callable[[Context[Any, Any]], Library],
    open_writable: Callable[[Context[Any, Any]], WritableLibrary] | None = None,
) -> MCPServer:
    """Return a server whose tools read the library that ``open_library`` gives for each call.

    With ``open_writable`` it has tools that change documents, too.
    """
    server = _Server(
        "cairn",
        title="Cairn",
        version=version("cairn-index"),
        instructions="Look things up in collections of documents: search first; read a document where "
        "passages are too short.",
        log_level="WARNING",
    )

    async def chosen(context: Context, name: str | None) -> tuple[Library, str]:
        library = open_library(context)
        names = [name] if name is not None else await library.names()
        if len(names) != 1:
            raise ToolError("a collection must be named, as list_collections gives them")
        return library, names[0]

    @server.tool(annotations=_READS)
    async def list_collections(context: Context) -> list[str]:
        """List the collections that can be searched."""
        return await open_library(context).names()

    @server.tool(annotations=_READS)
    async def search(
        context: Context,
        query: Annotated[
            str, Field(min_length=1, max_length=8_192, description="What to look for, in plain words.")
        ],
        top_k: Annotated[int, Field(ge=1, le=MAX_TOP_K, description="Documents to answer with.")] = 5,
        max_characters: Annotated[
            int,
            Field(ge=1, le=MAX_ANSWER_CHARACTERS, description="Characters all passages may have together."),
        ] = DEFAULT_ANSWER_CHARACTERS,
        filters: FilterArgument = None,
        collection: CollectionArgument = None,
    ) -> SearchAnswer:
        """Find the passages of a collection that answer a query best, with their documents."""
        library, name = await chosen(context, collection)
        result = await library.search(
            name, query, top_k=top_k, max_characters=max_characters, filters=filters
        )
        return SearchAnswer(
            collection=name,
            generation=result.generation,
            documents=[_document_answer(hit) for hit in result.hits if hit.passages],
            warnings=list(result.warnings),
        )

    @server.tool(annotations=_READS)
    async def get_document(
        context: Context,
        doc_id: Annotated[
            str, Field(min_length=1, max_length=1_024, description="A doc_id that search gave.")
        ],
        start_char: Annotated[int, Field(ge=0, description="First character to give.")] = 0,
        max_characters: Annotated[int, Field(ge=1, le=MAX_STRETCH_CHARACTERS)] = DEFAULT_STRETCH_CHARACTERS,
        collection: CollectionArgument = None,
    ) -> DocumentStretch:
        """Read a document of a collection, or a stretch of its text."""
        library, name = await chosen(context, collection)
        document = await library.read(name, lambda own: own.read_document(doc_id))
        if document is None:
            raise ToolError("there is no document of this id; take a doc_id that search gave")
        return _stretch(document, start_char, max_characters)

    @server.tool(annotations=_READS)
    async def list_columns(context: Context, collection: CollectionArgument = None) -> list[ColumnAnswer]:
        """Name the columns that filters may ask for, with their types, most frequent values and ranges."""
        library, name = await chosen(context, collection)
        found = await library.read(name, lambda own: own.columns())
        counts = [{str(each.value): each.documents for each in column.values} for column in found]
        return [
            ColumnAnswer.model_validate({**json_value(asdict(column)), "values": values})
            for column, values in zip(found, counts, strict=True)
        ]

    @server.tool(annotations=_READS)
    async def count_documents(
        context: Context, filters: FilterArgument = None, collection: CollectionArgument = None
    ) -> int:
        """Count the documents that match a filter, all without one."""
        library, name = await chosen(context, collection)
        return await library.read(name, lambda own: own.count(filters))

    @server.tool(annotations=_READS)
    async def list_documents(
        context: Context,
        filters: FilterArgument = None,
        after: Annotated[
            str | None,
            Field(min_length=1, max_length=1_024, description="The page before's next_after."),
        ] = None,
        limit: Annotated[int, Field(ge=1, le=MAX_LISTED)] = 20,
        collection: CollectionArgument = None,
    ) -> ListAnswer:
        """List all documents that match a filter, page by page, without ranking and without their texts."""
        library, name = await chosen(context, collection)
        found = await library.read(
            name, lambda own: list(islice(own.list_documents(filters, after=after), limit + 1))
        )
        documents = [replace(each, metadata=json_value(each.metadata)) for each in found[:limit]]
        return ListAnswer(
            documents=documents, next_after=documents[-1].doc_id if len(found) > limit else None
        )

    if open_writable is None:
        return server

    @server.tool(annotations=_WRITES)
    async def add_document(
        context: Context,
        doc_id: Annotated[str, Field(min_length=1, max_length=1_024, description="Its id, new or known.")],
        text: Annotated[str, Field(min_length=1, max_length=MAX_TEXT_CHARACTERS)],
        title: str | None = None,
        metadata: Annotated[
            dict[str, Any] | None, Field(description="Columns with values, to filter by.")
        ] = None,
        collection: CollectionArgument = None,
    ) -> None:
        """Add a document to a collection, or replace the one of this id."""
        _, name = await chosen(context, collection)
        await open_writable(context).add_document(name, doc_id, text, title, metadata or {})

    @server.tool(annotations=_WRITES)
    async def delete_document(
        context: Context,
        doc_id: Annotated[str, Field(min_length=1, max_length=1_024)],
        collection: CollectionArgument = None,
    ) -> None:
        """Delete a document of a collection."""
        _, name = await chosen(context, collection)
        await open_writable(context).delete_document(name, doc_id)

    return server


def session_manager(server: MCPServer) -> StreamableHTTPSessionManager:
    """Return what answers HTTP requests, each by itself; who serves them checks ``Host`` and ``Origin``."""
    server.streamable_http_app(
        json_response=True,
        stateless_http=True,
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
    return server.session_manager


def _document_answer(hit: Hit) -> DocumentAnswer:
    passages = [{**asdict(each), "highlights": _highlighted_words(each)} for each in hit.passages]
    return DocumentAnswer.model_validate({**json_value(asdict(hit)), "passages": passages})


def _highlighted_words(passage: Passage) -> list[str]:
    strongest = sorted(passage.highlights, key=lambda each: -each.weight)
    start = passage.start_char
    words = (passage.text[each.start_char - start : each.end_char - start] for each in strongest)
    return list(dict.fromkeys(words))


def _stretch(document: Document, start_char: int, max_characters: int) -> DocumentStretch:
    text = document.text[start_char : start_char + max_characters]
    first = min(start_char, len(document.text))
    span = {"start_char": first, "end_char": first + len(text), "num_characters": len(document.text)}
    return DocumentStretch.model_validate({**json_value(asdict(document)), **span, "text": text})
