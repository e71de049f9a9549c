"""The shapes of OpenAI's API that RAG applications speak: reading and searching vector stores, embeddings.

A vector store is a collection, a file a document. What cannot be done here (rewriting queries, other
dimensions) is refused, not ignored.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from cairn.pipeline.serve.schemas import (
    MAX_QUERIES,
    CollectionName,
    Filter,
    HighlightReply,
    Query,
    Reply,
    Request,
    not_blank,
)
from pydantic import AfterValidator, ConfigDict, Field

MAX_RESULTS: Final = 50
MAX_INPUTS: Final = 256
MAX_INPUT_CHARACTERS: Final = 32 << 10
"""Characters of one text to embed: about 8,000 tokens."""


class RankingOptions(Request):
    """How results are ranked: ``ranker`` names are accepted and mean the same ranking."""

    ranker: Literal["auto", "none", "default-2024-11-15"] = "auto"
    score_threshold: Annotated[float, Field(ge=0, le=1, description="Leave out results that score less.")] = (
        0.0
    )


class VectorStoreSearch(Request):
    """OpenAI's search of a vector store; several queries are answered by the best documents of any."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "query": "how do I reset a password",
                    "max_num_results": 3,
                    "filters": {"type": "gte", "key": "year", "value": 2020},
                }
            ]
        }
    )

    query: Query | Annotated[list[Query], Field(min_length=1, max_length=MAX_QUERIES)]
    filters: Filter | None = None
    max_num_results: Annotated[int, Field(ge=1, le=MAX_RESULTS)] = 10
    ranking_options: RankingOptions | None = None
    rewrite_query: Literal[False] = False


class TextContent(Reply):
    """A passage's text."""

    type: Literal["text"] = "text"
    text: str


class PassageContent(TextContent):
    """A passage, and an extension: where it stands in the document, and the words that answered the query."""

    start_char: int
    end_char: int
    highlights: list[HighlightReply]
    title_highlights: list[HighlightReply]


class FileResult(Reply):
    """A document with its best passages; ``filename`` is its title, or its id where it has none."""

    file_id: str
    filename: str
    score: float
    attributes: dict[str, str | int | float | bool]
    content: list[PassageContent]


class FileResults(Reply):
    """A page of results, the only one; ``warnings``, an extension, say what it lacks."""

    object: Literal["vector_store.search_results.page"] = "vector_store.search_results.page"
    search_query: list[str]
    data: list[FileResult]
    warnings: list[str]
    has_more: Literal[False] = False
    next_page: None = None


class FileCounts(Reply):
    """The documents of a collection, all of them ready."""

    total: int
    completed: int
    in_progress: Literal[0] = 0
    failed: Literal[0] = 0
    cancelled: Literal[0] = 0


class VectorStore(Reply):
    """A collection that can be searched; times are those of its generation, in Unix seconds."""

    id: str
    object: Literal["vector_store"] = "vector_store"
    name: str
    created_at: int
    last_active_at: int
    status: Literal["completed"] = "completed"
    file_counts: FileCounts
    usage_bytes: Annotated[int, Field(description="Bytes of the search files; 0 for a key with a filter.")]
    metadata: None = None
    expires_after: None = None
    expires_at: None = None


class VectorStoreFile(Reply):
    """A document; ``usage_bytes`` is the size of its text in UTF-8."""

    id: str
    object: Literal["vector_store.file"] = "vector_store.file"
    vector_store_id: str
    created_at: int
    status: Literal["completed"] = "completed"
    last_error: None = None
    usage_bytes: int
    attributes: dict[str, str | int | float | bool]


class VectorStores(Reply):
    """A page of collections."""

    object: Literal["list"] = "list"
    data: list[VectorStore]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VectorStoreFiles(Reply):
    """A page of documents."""

    object: Literal["list"] = "list"
    data: list[VectorStoreFile]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileContent(Reply):
    """The whole text of a document."""

    object: Literal["vector_store.file_content.page"] = "vector_store.file_content.page"
    data: list[TextContent]
    has_more: Literal[False] = False
    next_page: None = None


Input = Annotated[str, Field(min_length=1, max_length=MAX_INPUT_CHARACTERS), AfterValidator(not_blank)]


class EmbeddingsRequest(Request):
    """OpenAI's embeddings in the space of a collection, which ``model`` names.

    Its context stands before every text. ``input_type`` is an extension: documents and queries may be
    embedded differently.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "model": "python-docs",
                    "input": ["a text to compare with the collection's"],
                    "input_type": "query",
                }
            ]
        }
    )

    model: CollectionName
    input: Input | Annotated[list[Input], Field(min_length=1, max_length=MAX_INPUTS)]
    input_type: Literal["query", "document"] = "query"
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int | None, Field(ge=1, le=1 << 16, description="Must be the collection's.")] = None
    user: Annotated[str | None, Field(max_length=512, description="Taken and not used.")] = None


class Embedding(Reply):
    """One vector, L2-normalised: numbers, or little-endian float32 in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class Usage(Reply):
    """What was read, in the texts' own tokens."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(Reply):
    """The vectors in the order of the texts."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: Usage
