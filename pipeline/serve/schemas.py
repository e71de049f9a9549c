"""Requests and replies of the search API as typed schemas; the OpenAPI description is made from them.

Requests are strict: no field that is not named here, no text for a number, no NaN. Limits are those of
:mod:`cairn.pipeline.search_options`, tighter where one request could hold up others.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, cast

from cairn.pipeline.manifest import COLLECTION_NAME
from cairn.pipeline.options import Option, options_of
from cairn.pipeline.search.filters import MAX_LIST_VALUES, MAX_NODES, MAX_STRING_BYTES, TREE_FIELDS
from cairn.pipeline.search.ranking import DEFAULT_CHUNK_TOKENS
from cairn.pipeline.search.rerank import RERANK_DOCUMENTS
from cairn.pipeline.search_options import MAX_QUERY_BYTES, SearchKeywords, SearchOptions
from cairn.pipeline.types import CollectionSummary, Hit
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

MAX_QUERIES: Final = 32
"""Queries of one request: more would keep the encoder from others."""
MAX_ANSWER_TOKENS: Final = 1 << 21
"""Tokens that the passages of all answers of a request may have together: about 8 MB of text."""
CHARACTERS_A_TOKEN: Final = 4
MAX_RERANK_PAIRS: Final = 1_000
"""Passages that one request may have judged: some seconds of a small cross-encoder on two cores."""
MAX_WEIGHT: Final = 1e6
MAX_VECTOR_DIM: Final = 16_384
MAX_CURSOR_CHARACTERS: Final = 256
START_CURSOR: Final = "*"
MAX_DOC_ID_CHARACTERS: Final = 1_024
MAX_DOCUMENT_CHARACTERS: Final = 1_000_000
DEFAULT_DOCUMENT_CHARACTERS: Final = 100_000


class Reply(BaseModel):
    """Base of what is given."""

    model_config = ConfigDict(frozen=True)


def _within_bytes(limit: int) -> AfterValidator:
    def check(text: str) -> str:
        if len(text) * 4 > limit and len(text.encode()) > limit:
            raise PydanticCustomError(
                "too_many_bytes", "Text should have at most {limit} bytes in UTF-8", {"limit": limit}
            )
        return text

    return AfterValidator(check)


def not_blank(text: str) -> str:
    """Refuse a text of white space only."""
    if not text.strip():
        raise PydanticCustomError("blank_text", "Text should hold more than white space")
    return text


CollectionName = Annotated[
    str,
    Field(
        pattern=f"^{COLLECTION_NAME.pattern}$", description="Name of a collection.", examples=["python-docs"]
    ),
]
Query = Annotated[
    str,
    Field(min_length=1, json_schema_extra={"pattern": r"\S"}, examples=["how do I reset a password"]),
    AfterValidator(not_blank),
    _within_bytes(MAX_QUERY_BYTES),
]


MAX_TOLD: Final = 10
"""Parts of a request that a problem speaks of; a caller who has mended those may hear of others."""
UNKNOWN_FIELD: Final = "unknown_field"
"""The type of the error that names fields a schema does not have."""


class Request(BaseModel):
    """Base of what is taken."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, sent: Any) -> Any:
        """Say which fields are not known, and which are; pydantic says the former only."""
        if isinstance(sent, dict):
            names = [name for name in cast("dict[str, Any]", sent) if name not in cls.model_fields]
            if names:
                told = {"names": names[:MAX_TOLD], "fields": list(cls.model_fields)}
                raise PydanticCustomError(
                    UNKNOWN_FIELD, "There are fields here that the schema does not have", told
                )
        return cast("Any", sent)


FilterValue = Annotated[str, Field(max_length=MAX_STRING_BYTES)] | bool | int | float
FilterValues = Annotated[list[FilterValue], Field(min_length=1, max_length=MAX_LIST_VALUES)]
Key = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_STRING_BYTES,
        description="A column of the collection.",
        examples=["year"],
    ),
]


class Comparison(Request):
    """A column compared with a value; `contains` asks for a part of a text or an element of a list.

    A null matches no comparison.
    """

    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "contains"]
    key: Key
    value: FilterValue


class Membership(Request):
    """A column compared with a list of values; one of lists may hold any of them, or none."""

    type: Literal["in", "nin"]
    key: Key
    value: FilterValues


class NullTest(Request):
    """A column that has no value, or has one."""

    type: Literal["is_null", "is_not_null"]
    key: Key


class Combination(Request):
    """Filters of which all or any must match; at most 8 levels and 256 nodes."""

    type: Literal["and", "or"]
    filters: Annotated[list[Filter], Field(min_length=1, max_length=MAX_NODES)]


FilterNode = Annotated[Comparison | Membership | NullTest | Combination, Field(discriminator="type")]
FilterColumns = Annotated[
    dict[Key, FilterValue | FilterValues | None],
    Field(
        max_length=MAX_NODES,
        description="Columns with a value, several of which any may match, or null; without one, no filter.",
        examples=[{"kind": "module"}],
        json_schema_extra={"propertyNames": {"not": {"enum": [*sorted(TREE_FIELDS)]}}},
    ),
]


def _filter_shape(sent: Any) -> str:
    return "columns" if isinstance(sent, dict) and not TREE_FIELDS & sent.keys() else "node"


Filter = Annotated[
    Annotated[FilterNode, Tag("node")] | Annotated[FilterColumns, Tag("columns")],
    Discriminator(_filter_shape),
]


class Weights(Request):
    """How much each part of the score counts; a part left out keeps its default."""

    document: Annotated[float, Field(ge=0, le=MAX_WEIGHT)] | None = None
    chunk: Annotated[float, Field(ge=0, le=MAX_WEIGHT)] | None = None
    bm25: Annotated[float, Field(ge=0, le=MAX_WEIGHT)] | None = None
    sparse: Annotated[float, Field(ge=0, le=MAX_WEIGHT)] | None = None


_STRUCTURED: Final[Mapping[str, Any]] = {"filters": Filter, "weights": Weights}
"""Options whose values have a schema of their own."""


def option_fields(kind: type) -> dict[str, Any]:
    """Return a field of a request for each option of a dataclass that has a help text."""
    return {
        name: (Annotated[_schema_type(each), _limits(each)], each.default)
        for name, each in options_of(kind).items()
        if each.about.help
    }


def _schema_type(each: Option) -> Any:
    kind = _STRUCTURED.get(each.name, each.kind)
    return kind | None if each.is_optional else kind


def _limits(each: Option) -> Any:
    return Field(ge=each.about.low, le=each.high, gt=each.about.above, description=each.about.help)


class _Asked(Request):
    query: Query | Annotated[list[Query], Field(min_length=1, max_length=MAX_QUERIES)] = Field(
        description=f"One query, or a list of them, each of at most {MAX_QUERY_BYTES:,} bytes in UTF-8."
    )


if TYPE_CHECKING:

    class _WithOptions(_Asked):  # the fields that the server itself reads
        top_k: int
        passages: int
        chunk_tokens: int | None
        max_characters: int | None

else:
    _WithOptions = create_model("_WithOptions", __base__=_Asked, **option_fields(SearchOptions))


class SearchRequest(_WithOptions):
    """A query, or several with the same options."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {"query": "how do I run a function in another thread", "top_k": 3},
                {
                    "query": ["parse command line arguments", "read a file line by line"],
                    "top_k": 5,
                    "granularity": "chunk",
                    "filters": {"type": "eq", "key": "kind", "value": "module"},
                    "include_text": False,
                },
            ]
        }
    )

    query_vector: Annotated[
        list[float] | None,
        Field(
            min_length=1,
            max_length=MAX_VECTOR_DIM,
            description="The vector of a single query, in place of its encoding. BM25 reads the text of "
            "`query`, unless `hybrid` is false.",
        ),
    ] = None
    rerank: Annotated[
        bool,
        Field(
            description="Rerank the passages of the best documents with the server's cross-encoder, "
            "where it has one."
        ),
    ] = False
    include_text: Annotated[
        bool, Field(description="Give the text of passages beside their spans; else it is empty.")
    ] = True
    cursor: Annotated[
        str | None,
        Field(
            min_length=1,
            max_length=MAX_CURSOR_CHARACTERS,
            description='"*" asks for the first of several pages, `next_cursor` for the next; it holds '
            "while the generation is served.",
        ),
    ] = None


class SearchReply(Reply):
    """A ranked answer, all of it from one generation."""

    query: str
    generation: int
    hits: list[Hit]
    warnings: list[str] = Field(
        default=[],
        description="Sentences on what the answer lacks: a query without a word that carries weight, or a "
        "budget of characters that no passage fits.",
    )
    next_cursor: str | None = Field(
        default=None, description="Asks for the next page; null where there is none."
    )


class SearchReplies(Reply):
    """The answers to a list of queries, in their order, all from one generation."""

    generation: int
    answers: list[SearchReply]


class CollectionList(Reply):
    """The collections this key may ask."""

    collections: list[CollectionSummary]
    is_writable: bool = Field(
        description="Whether this key may fill a collection without documents here: one listed, or a new one."
    )


class DocumentReply(Reply):
    """A document, or a stretch of its text."""

    doc_id: str
    title: str | None
    metadata: dict[str, JsonValue]
    generation: int
    content_sha256: str = Field(description="Changes with the text, the title and the metadata.")
    num_tokens: int
    num_characters: int
    start_char: int
    end_char: int
    text: str = Field(description="The characters from start_char to end_char.")


class Health(Reply):
    """Whether the server lives, or serves."""

    status: Literal["ok", "ready", "degraded"]
    reason: str | None = Field(default=None, description="Why the server is degraded.")


def field_names(model: type[BaseModel]) -> frozenset[str]:
    """Return the names of all fields of a model and of those made of it: what a problem may call by name."""
    return frozenset(model.model_fields).union(*map(field_names, model.__subclasses__()))


def answer_tokens(request: SearchRequest) -> int:
    """Return how many tokens the passages that a request asks for may have at most."""
    num_queries = len(request.query) if isinstance(request.query, list) else 1
    if request.max_characters is not None:
        return num_queries * request.max_characters // CHARACTERS_A_TOKEN
    return num_queries * request.top_k * request.passages * (request.chunk_tokens or DEFAULT_CHUNK_TOKENS)


def rerank_pairs(request: SearchRequest) -> int:
    """Return how many passages a request lets the cross-encoder judge at most."""
    num_queries = len(request.query) if isinstance(request.query, list) else 1
    pairs = num_queries * max(request.top_k, RERANK_DOCUMENTS) * max(request.passages, 1)
    return pairs if request.rerank else 0


def search_keywords(request: SearchRequest) -> SearchKeywords:
    """Return the keywords of the Python search that a request stands for."""
    return cast("SearchKeywords", {name: plain(getattr(request, name)) for name in _search_fields()})


@cache
def _search_fields() -> tuple[str, ...]:
    return tuple(name for name, each in options_of(SearchOptions).items() if each.about.help)


def plain(value: Any) -> Any:
    """Return what was sent for a part of a request, where that is a schema of its own."""
    return value.model_dump(exclude_none=True) if isinstance(value, BaseModel) else value
