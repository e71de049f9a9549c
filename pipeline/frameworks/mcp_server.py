"""A read-only MCP server over one collection, with the tools ``search`` and ``get_document``.

    cairn mcp handbook                                   speaks MCP on stdin and stdout

Nothing can be changed through it. Answers are bounded in characters, since a model reads them whole.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any, Final

from anyio import to_thread
from pydantic import BaseModel, Field

from pipeline.errors import CairnError, extra_missing
from pipeline.frameworks.source import Searchable
from pipeline.types import Hit, SearchResult

try:
    from mcp.server import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp.types import ToolAnnotations
except ModuleNotFoundError as error:
    raise extra_missing(error, what="the MCP server", module="mcp", package="mcp", extra="mcp") from None

MAX_TOP_K: Final = 50
MAX_ANSWER_CHARACTERS: Final = 20_000
DEFAULT_ANSWER_CHARACTERS: Final = 4_000
MAX_STRETCH_CHARACTERS: Final = 50_000
DEFAULT_STRETCH_CHARACTERS: Final = 10_000
_READS: Final = ToolAnnotations(
    read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
)


class PassageAnswer(BaseModel):
    """A span of a document: characters ``start_char`` to ``end_char`` of its text."""

    start_char: int
    end_char: int
    text: str
    score: float


class DocumentAnswer(BaseModel):
    """A document with the passages that answer best; ``doc_id`` is what get_document takes."""

    doc_id: str
    title: str | None
    score: float
    metadata: dict[str, Any]
    passages: list[PassageAnswer]


class SearchAnswer(BaseModel):
    """Ranked documents, all from one generation of the collection."""

    collection: str
    generation: int
    documents: list[DocumentAnswer]


class DocumentStretch(BaseModel):
    """A stretch of a document's text; ``end_char`` < ``num_characters`` says that there is more."""

    doc_id: str
    title: str | None
    metadata: dict[str, Any]
    start_char: int
    end_char: int
    num_characters: int
    text: str


def make_server(collection: Searchable) -> MCPServer:
    """Return a server whose tools read one collection."""
    server = MCPServer(
        "cairn",
        title=f"Cairn: {collection.name}",
        version=version("cairn-retrieval"),
        instructions=f"Look things up in the collection {collection.name!r}: search first; read a "
        "document where passages are too short.",
        log_level="WARNING",
    )

    @server.tool(annotations=_READS)
    async def search(
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
    ) -> SearchAnswer:
        """Find the passages of the collection that answer a query best, with their documents."""
        return await to_thread.run_sync(_search, collection, query, top_k, max_characters, filters)

    @server.tool(annotations=_READS)
    async def get_document(
        doc_id: Annotated[
            str, Field(min_length=1, max_length=1_024, description="A doc_id that search gave.")
        ],
        start_char: Annotated[int, Field(ge=0, description="First character to give.")] = 0,
        max_characters: Annotated[int, Field(ge=1, le=MAX_STRETCH_CHARACTERS)] = DEFAULT_STRETCH_CHARACTERS,
    ) -> DocumentStretch:
        """Read a document of the collection, or a stretch of its text."""
        return await to_thread.run_sync(_read, collection, doc_id, start_char, max_characters)

    return server


def _search(
    collection: Searchable, query: str, top_k: int, max_characters: int, filters: dict[str, Any] | None
) -> SearchAnswer:
    try:
        result: SearchResult = collection.search(
            query, top_k=top_k, max_characters=max_characters, filters=filters
        )
    except CairnError as error:
        raise ToolError(error.fault) from None
    return SearchAnswer(
        collection=collection.name,
        generation=result.generation,
        documents=[_document_answer(hit) for hit in result.hits if hit.passages],
    )


def _document_answer(hit: Hit) -> DocumentAnswer:
    passages = [
        PassageAnswer(
            start_char=passage.start_char, end_char=passage.end_char, text=passage.text, score=passage.score
        )
        for passage in hit.passages
    ]
    return DocumentAnswer(
        doc_id=hit.doc_id, title=hit.title, score=hit.score, metadata=_plain(hit.metadata), passages=passages
    )


def _read(collection: Searchable, doc_id: str, start_char: int, max_characters: int) -> DocumentStretch:
    try:
        document = collection.read_document(doc_id)
    except CairnError as error:
        raise ToolError(error.fault) from None
    if document is None:
        raise ToolError("there is no document of this id; take a doc_id that search gave")
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
