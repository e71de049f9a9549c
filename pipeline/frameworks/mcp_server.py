"""A read-only MCP server, with the tools ``list_collections``, ``search`` and ``get_document``.

    cairn mcp handbook                                   one collection, on stdin and stdout
    cairn serve                                          all collections, over HTTP at /mcp

Nothing can be changed through it. Answers are bounded in characters, since a model reads them whole. Where
collections are read from is a :class:`Library`; the HTTP server brings its own.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any, Final, Protocol, TypeVar

from anyio import to_thread
from cairn.pipeline.errors import CairnError, extra_missing
from cairn.pipeline.frameworks.source import Searchable
from cairn.pipeline.manifest import COLLECTION_NAME
from cairn.pipeline.search_options import SearchKeywords
from cairn.pipeline.types import Document, Hit, Passage, SearchResult
from pydantic import BaseModel, Field
from typing_extensions import Unpack

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
_READS: Final = ToolAnnotations(
    read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
)


class PassageAnswer(BaseModel):
    """A span of a document: characters ``start_char`` to ``end_char`` of its text.

    ``highlights`` are its words that answered the query, strongest first.
    """

    start_char: int
    end_char: int
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


class CollectionNames(BaseModel):
    """The collections that can be asked."""

    collections: list[str]


class Library(Protocol):
    """Where the tools read. What cannot be answered raises ``ToolError`` with a sentence."""

    async def names(self) -> list[str]:
        """Return the names of the collections."""
        ...

    async def search(self, collection: str, query: str, **options: Unpack[SearchKeywords]) -> SearchResult:
        """Search a collection."""
        ...

    async def read_document(self, collection: str, doc_id: str) -> Document | None:
        """Return a document by its id, None where there is none."""
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
        return await self._ask(collection, lambda: self._collection.search(query, **options))

    async def read_document(self, collection: str, doc_id: str) -> Document | None:
        """Read a document of it, on a thread."""
        return await self._ask(collection, lambda: self._collection.read_document(doc_id))

    async def _ask(self, name: str, call: Callable[[], _Answer]) -> _Answer:
        if name != self._collection.name:
            raise ToolError(f"the only collection is {self._collection.name!r}")
        try:
            return await to_thread.run_sync(call)
        except CairnError as error:
            raise ToolError(error.fault) from None


CollectionArgument = Annotated[
    str | None,
    Field(
        pattern=f"^{COLLECTION_NAME.pattern}$",
        description="A name that list_collections gave; needed where there are several.",
    ),
]


def make_server(open_library: Callable[[Context[Any, Any]], Library]) -> MCPServer:
    """Return a server whose tools read the library that ``open_library`` gives for each call."""
    server = MCPServer(
        "cairn",
        title="Cairn",
        version=version("cairn-index"),
        instructions="Look things up in collections of documents: search first; read a document where "
        "passages are too short.",
        log_level="WARNING",
    )

    @server.tool(annotations=_READS)
    async def list_collections(context: Context) -> CollectionNames:
        """List the collections that can be searched."""
        return CollectionNames(collections=await open_library(context).names())

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
        filters: Annotated[
            dict[str, Any] | None,
            Field(
                description='What documents must match: columns with values, such as {"kind": ["guide", '
                '"note"]}, or {"type": "gte", "key": "year", "value": 2020}.'
            ),
        ] = None,
        collection: CollectionArgument = None,
    ) -> SearchAnswer:
        """Find the passages of a collection that answer a query best, with their documents."""
        library = open_library(context)
        name = await _chosen(library, collection)
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
        library = open_library(context)
        document = await library.read_document(await _chosen(library, collection), doc_id)
        if document is None:
            raise ToolError("there is no document of this id; take a doc_id that search gave")
        return _stretch(document, start_char, max_characters)

    return server


def session_manager(server: MCPServer) -> StreamableHTTPSessionManager:
    """Return what answers a server's HTTP requests, each by itself, in JSON.

    Whoever serves them checks ``Host`` and ``Origin`` first.
    """
    server.streamable_http_app(
        json_response=True,
        stateless_http=True,
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )
    return server.session_manager


async def _chosen(library: Library, name: str | None) -> str:
    if name is not None:
        return name
    names = await library.names()
    if len(names) != 1:
        raise ToolError("a collection must be named, as list_collections gives them")
    return names[0]


def _document_answer(hit: Hit) -> DocumentAnswer:
    passages = [
        PassageAnswer(
            start_char=passage.start_char,
            end_char=passage.end_char,
            text=passage.text,
            score=passage.score,
            highlights=_highlighted_words(passage),
        )
        for passage in hit.passages
    ]
    return DocumentAnswer(
        doc_id=hit.doc_id, title=hit.title, score=hit.score, metadata=_plain(hit.metadata), passages=passages
    )


def _highlighted_words(passage: Passage) -> list[str]:
    strongest = sorted(passage.highlights, key=lambda each: -each.weight)
    start = passage.start_char
    words = (passage.text[each.start_char - start : each.end_char - start] for each in strongest)
    return list(dict.fromkeys(words))


def _stretch(document: Document, start_char: int, max_characters: int) -> DocumentStretch:
    text = document.text[start_char : start_char + max_characters]
    return DocumentStretch(
        doc_id=document.doc_id,
        title=document.title,
        metadata=_plain(document.metadata),
        start_char=min(start_char, len(document.text)),
        end_char=min(start_char, len(document.text)) + len(text),
        num_characters=len(document.text),
        text=text,
    )


def _plain(metadata: Any) -> dict[str, Any]:
    """Return metadata as JSON has it: what it has no type for, such as a date, as text."""
    kept = (str, int, float, bool, list, dict, type(None))
    return {name: value if isinstance(value, kept) else str(value) for name, value in metadata.items()}
