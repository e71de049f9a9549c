"""The shapes of OpenAI's API that RAG applications speak: files, vector stores, embeddings.

A vector store is a collection, a file a document. What cannot be done here (rewriting queries, other
dimensions) is refused, not ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, cast

from cairn.pipeline.serve.schemas import (
    MAX_DOC_ID_CHARACTERS,
    MAX_QUERIES,
    CollectionName,
    Filter,
    HighlightReply,
    Query,
    Reply,
    Request,
    not_blank,
)
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_RESULTS: Final = 50
MAX_INPUTS: Final = 256
MAX_INPUT_CHARACTERS: Final = 32 << 10
"""Characters of one text to embed: about 8,000 tokens."""


class RankingOptions(Request):
    """How results are ranked: ``ranker`` names are accepted and mean the same ranking."""

    ranker: Literal["auto", "none", "default-2024-11-15"] = "auto"
    score_threshold: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            description="Leave out results that answer with less than this probability; scores are "
            "probabilities then.",
        ),
    ] = 0.0


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
    page: str | None
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
    """The documents of a collection, and the files that are not among them yet."""

    total: int
    completed: int
    in_progress: int = 0
    failed: int = 0
    cancelled: int = 0


class VectorStore(Reply):
    """A collection; times are those of its generation, in Unix seconds."""

    id: str
    object: Literal["vector_store"] = "vector_store"
    name: str
    created_at: int
    last_active_at: int
    status: Literal["in_progress", "completed"] = "completed"
    file_counts: FileCounts
    usage_bytes: Annotated[int, Field(description="Bytes of the search files; 0 for a key with a filter.")]
    metadata: dict[str, str] | None = None
    expires_after: None = None
    expires_at: None = None


class FileFault(Reply):
    """Why nothing of a file is in the collection."""

    code: Literal["server_error", "unsupported_file", "invalid_file"]
    message: str


class VectorStoreFile(Reply):
    """A document, or a file that is to be one; ``usage_bytes`` is the size of its text in UTF-8.

    ``warnings``, an extension, name pages and rows of the file that could not be read.
    """

    id: str
    object: Literal["vector_store.file"] = "vector_store.file"
    vector_store_id: str
    created_at: int
    status: Literal["in_progress", "completed", "failed", "cancelled"] = "completed"
    last_error: FileFault | None = None
    usage_bytes: int
    attributes: dict[str, str | int | float | bool]
    warnings: list[str] = Field(default_factory=list)


class Page(Reply):
    """A part of a list, whose entries have ids."""

    object: Literal["list"] = "list"
    first_id: str | None
    last_id: str | None
    has_more: bool


class VectorStores(Page):
    """A page of collections."""

    data: list[VectorStore]


class VectorStoreFiles(Page):
    """A page of documents."""

    data: list[VectorStoreFile]


class FileContent(Reply):
    """The whole text of a document."""

    object: Literal["vector_store.file_content.page"] = "vector_store.file_content.page"
    data: list[TextContent]
    has_more: Literal[False] = False
    next_page: None = None


def _not_token_ids(sent: Any) -> Any:
    """Say what to do to a client that sends the tokens of another model."""
    values = cast("list[Any]", sent) if isinstance(sent, list) else []
    if values and all(isinstance(each, int | list) for each in values):
        raise PydanticCustomError(
            "token_ids",
            "Input should be texts, not token ids: with LangChain's OpenAIEmbeddings set "
            "check_embedding_ctx_length=False",
        )
    return sent


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
    input: Annotated[
        Input | Annotated[list[Input], Field(min_length=1, max_length=MAX_INPUTS)],
        BeforeValidator(_not_token_ids),
    ]
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


class Model(Reply):
    """A collection, as what embeds."""

    id: str
    object: Literal["model"] = "model"
    created: Literal[0] = 0
    owned_by: Literal["cairn"] = "cairn"


class Models(Reply):
    """The collections this key may ask."""

    object: Literal["list"] = "list"
    data: list[Model]


MAX_FILES: Final = 2_000
Purpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
Attributes = Annotated[
    dict[
        Annotated[str, Field(min_length=1, max_length=64)],
        Annotated[str, Field(max_length=512)] | bool | int | float,
    ],
    Field(max_length=16, description="Values to filter by: columns of the collection."),
]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
FileId = Annotated[str, Field(min_length=1, max_length=MAX_DOC_ID_CHARACTERS)]
DocumentId = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_DOC_ID_CHARACTERS,
        description="An extension: the id that the document of the file is to have, else that of the file.",
    ),
]


class Chunking(Request):
    """How a file is cut: only ``auto``, since each search cuts passages as it is asked to."""

    type: Literal["auto"]


class NewVectorStore(Request):
    """A collection to be made; its id is made of the name."""

    name: Annotated[str, Field(max_length=256)] | None = None
    description: Annotated[str, Field(max_length=4_096, description="Taken and not used.")] | None = None
    file_ids: list[FileId] = Field(default_factory=list[FileId], max_length=MAX_FILES)
    chunking_strategy: Chunking | None = None
    metadata: Metadata | None = None
    expires_after: None = Field(default=None, description="Collections do not expire.")


class VectorStoreChanges(Request):
    """What is said of a collection."""

    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    metadata: Metadata | None = None
    expires_after: None = Field(default=None, description="Collections do not expire.")


class NewVectorStoreFile(Request):
    """A file to put into a collection."""

    file_id: FileId
    attributes: Attributes | None = None
    chunking_strategy: Chunking | None = None
    doc_id: DocumentId | None = None


class NewFileBatch(Request):
    """Files to put into a collection: ``file_ids`` with the same attributes, or ``files`` with their own."""

    file_ids: Annotated[list[FileId], Field(min_length=1, max_length=MAX_FILES)] | None = None
    files: Annotated[list[NewVectorStoreFile], Field(min_length=1, max_length=MAX_FILES)] | None = None
    attributes: Attributes | None = None
    chunking_strategy: Chunking | None = None

    @model_validator(mode="after")
    def _require_one(self) -> NewFileBatch:
        if (self.file_ids is None) == (self.files is None):
            raise ValueError("there must be file_ids or files, and not both")
        return self


class FileChanges(Request):
    """Attributes of a file to take the place of those it has."""

    attributes: Attributes


class StoredFile(Reply):
    """A file that was sent; `error`: no collection that it was put into could take it."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed", "error"]
    status_details: str | None


class StoredFiles(Page):
    """A page of files."""

    data: list[StoredFile]


class FileBatch(Reply):
    """Files that were put into a collection together."""

    id: str
    object: Literal["vector_store.files_batch"] = "vector_store.files_batch"
    created_at: int
    vector_store_id: str
    status: Literal["in_progress", "completed", "cancelled"]
    file_counts: FileCounts


class Deleted(Reply):
    """What is gone: a file with its documents, a collection, or a file of a collection."""

    id: str
    object: Literal["file", "vector_store.deleted", "vector_store.file.deleted"]
    deleted: Literal[True] = True
