"""Records and protocols that every stage of the line speaks.

Shape suffixes used across the project (``x_BTD`` is a tensor of batch x tokens x model dim):

    B batch            T tokens           L landmarks        D model dim
    H heads            V vector dim       C context docs     N documents / points
    K clusters         Q queries

An "embedding" lives inside a model; a "vector" lives in an index and is L2-normalised float32.
"""

from __future__ import annotations

import base64
import datetime as dt
import decimal
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, Protocol, cast, runtime_checkable

import numpy as np
import pyarrow as pa
from jaxtyping import Float32, Float64, Int32, Int64
from typing_extensions import override

GIVEN_VECTORS = "given_vectors"
"""The column of staged rows with the vectors that they brought: ``cairn.pipeline.corpus.given_vectors``."""

RESERVED_COLUMNS = frozenset(
    {
        GIVEN_VECTORS,
        "doc_id",
        "title",
        "text",
        "query",
        "content_sha256",
        "cluster_id",
        "num_tokens",
        "num_chunks",
        "source_file",
        "vector",
        "_rowid",
        "_rowaddr",
        "_rowoffset",
        "_row_created_at_version",
        "_row_last_updated_at_version",
        "_score",
        "_distance",
        "_relevance_score",
    }
)
"""Column names the stored tables own; a metadata column may not carry one of them."""


def is_filterable(arrow_type: pa.DataType) -> bool:
    """Tell whether filters can name a column of this type.

    Text, booleans, integers, floats, dates and timestamps can be named, and lists of them.
    """
    if pa.types.is_list(arrow_type) or pa.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    checks = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_boolean,
        pa.types.is_integer,
        pa.types.is_floating,
        pa.types.is_date,
        pa.types.is_timestamp,
    )
    return any(check(arrow_type) for check in checks)


def staged_schema(metadata: Sequence[pa.Field]) -> pa.Schema:
    """Return the schema of a checked source row, before encoding.

    ``title`` and ``query`` are nullable; ``content_sha256`` is the lower-case hex digest of everything that
    is stored of the row, and of :data:`GIVEN_VECTORS`, which are null where the model makes them.
    """
    return pa.schema(
        [
            pa.field("doc_id", pa.string(), nullable=False),
            pa.field("title", pa.string()),
            pa.field("text", pa.large_string(), nullable=False),
            pa.field("query", pa.string()),
            pa.field("content_sha256", pa.string(), nullable=False),
            pa.field("source_file", pa.string(), nullable=False),
            pa.field(GIVEN_VECTORS, pa.large_binary()),
            *metadata,
        ]
    )


def documents_schema(metadata: Sequence[pa.Field], vector_dim: int) -> pa.Schema:
    """Return the schema of the ``documents`` table: one row a document, in ingest order."""
    return pa.schema(
        [
            pa.field("doc_id", pa.string(), nullable=False),
            pa.field("title", pa.string()),
            pa.field("text", pa.large_string(), nullable=False),
            pa.field("content_sha256", pa.string(), nullable=False),
            pa.field("source_file", pa.string(), nullable=False),
            pa.field("cluster_id", pa.int32(), nullable=False),
            pa.field("num_tokens", pa.int32(), nullable=False),
            pa.field("num_chunks", pa.int32(), nullable=False),
            pa.field("vector", pa.list_(pa.float32(), vector_dim), nullable=False),
            *metadata,
        ]
    )


def chunks_schema(vector_dim: int, added: Sequence[pa.Field] = ()) -> pa.Schema:
    """Return the schema of the ``chunks`` table: one row a landmark, ordered by document then ordinal.

    Spans are Python character offsets into the document's ``text``, contiguous, and cover it whole. A
    collection's encoders may have ``added`` columns: :data:`TOKEN_FIELDS`,
    :data:`SPARSE_FIELDS`, and :data:`LINE_FIELD`.
    """
    return pa.schema(
        [
            pa.field("chunk_id", pa.string(), nullable=False),
            pa.field("doc_id", pa.string(), nullable=False),
            pa.field("ordinal", pa.int32(), nullable=False),
            pa.field("start_char", pa.int64(), nullable=False),
            pa.field("end_char", pa.int64(), nullable=False),
            pa.field("vector", pa.list_(pa.float32(), vector_dim), nullable=False),
            *added,
        ]
    )


TOKEN_FIELDS = (pa.field("token_codes", pa.large_binary()), pa.field("title_codes", pa.large_binary()))
"""What a collection with token vectors has in ``chunks``: null where the encoder made none.

Those of a document's title stand in its first row.
"""
FAR: Final = 255
"""Characters from one token to the next from which on their number is not kept behind a token's code."""
SPARSE_FIELDS = (pa.field("sparse_weights", pa.large_binary()),)
"""What a collection with a sparse encoder has in ``chunks``: rows of :data:`SPARSE_WEIGHT`, end to end."""
SPARSE_WEIGHT: Final = np.dtype([("token", "<u4"), ("weight", "u1")])
"""A token of the sparse encoder's vocabulary, and what it weighs in :data:`SPARSE_STEP`."""
SPARSE_STEP: Final = 1 / 64
"""Weights reach 255 steps, 3.98: log(1 + x) of a logit of 52, which no published model comes near."""
LINE_FIELD = pa.field("line", pa.large_string())


@runtime_checkable
class ProgressListener(Protocol):
    """Receives what a long stage has done so far; called from one thread, a few times a second at most."""

    def __call__(self, stage: str, done: int, total: int | None, unit: str) -> None:
        """Hear that ``done`` of ``total`` units (None: unknown) are behind."""
        ...


BETWEEN_BATCHES: Final[ContextVar[Callable[[], None]]] = ContextVar("between_batches")
"""Called on the thread that waits for a model, after each batch; what it raises gives up the rest."""


def silent_progress(stage: str, done: int, total: int | None, unit: str) -> None:
    """Listen to nothing: the default where no terminal is attached."""


@runtime_checkable
class QueryEncoder(Protocol):
    """What a searcher needs of a model.

    Text to L2-normalised vectors, and a name for the space they lie in.
    """

    @property
    def fingerprint(self) -> str:
        """Identify weights, tokenizer and every setting that moves a vector; must equal the index's."""
        ...

    def encode_queries(self, texts: Sequence[str]) -> Float32[np.ndarray, "Q V"]:
        """Embed queries, L2-normalised, in the order given."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QueryTokens:
    """The tokens of one query's words: unit states of the last layer, ids, characters they stand for."""

    states_TD: Float32[np.ndarray, "T D"]
    ids_T: Int32[np.ndarray, " T"]
    start_char: Int64[np.ndarray, " T"]
    end_char: Int64[np.ndarray, " T"]

    @classmethod
    def none(cls) -> QueryTokens:
        """Return those of a query whose encoder shows no states."""
        nothing = np.zeros(0, np.int64)
        return cls(
            states_TD=np.zeros((0, 1), np.float32),
            ids_T=nothing.astype(np.int32),
            start_char=nothing,
            end_char=nothing,
        )


@runtime_checkable
class TokenQueryEncoder(QueryEncoder, Protocol):
    """A query encoder that shows tokens, for late interaction."""

    def encode_query_tokens(
        self, texts: Sequence[str]
    ) -> tuple[Float32[np.ndarray, "Q V"], list[QueryTokens]]:
        """Embed queries, and return the states of their tokens from the same pass, too."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedQueries:
    """Queries as a search with late interaction takes them."""

    vectors_QV: Float32[np.ndarray, "Q V"]
    tokens: Sequence[QueryTokens]

    def split(self) -> list[EncodedQueries]:
        """Return each query by itself."""
        return [
            replace(self, vectors_QV=vector_V[None], tokens=[tokens])
            for vector_V, tokens in zip(self.vectors_QV, self.tokens, strict=True)
        ]

    @classmethod
    def joined(cls, parts: Sequence[EncodedQueries]) -> EncodedQueries:
        """Return queries of one encoder together; there must be one."""
        return replace(
            parts[0],
            vectors_QV=np.concatenate([part.vectors_QV for part in parts]),
            tokens=[tokens for part in parts for tokens in part.tokens],
        )


@runtime_checkable
class Reranker(Protocol):
    """Judges passages with their query: slower than comparing vectors, often better."""

    def score(self, query: str, texts: Sequence[str]) -> Float64[np.ndarray, " N"]:
        """Score texts for a query, each from 0 to 1, in the order given."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelScores:
    """How good a model is: one number to choose by, and the measures it is made of, named ``set/measure``."""

    mean: float
    by_measure: Mapping[str, float]


@runtime_checkable
class ModelScorer(Protocol):
    """Judges the models a training saves; the layer that trains knows no measure."""

    @property
    def fingerprint(self) -> str:
        """Identify what is judged with: scores of another one do not compare."""
        ...

    def score(self, model_folder: Path) -> ModelScores:
        """Score a saved model folder."""
        ...


@runtime_checkable
class TextEmbedder(Protocol):
    """One vector a text, L2-normalised: the surrogate of clustering and the first stage of context."""

    @property
    def fingerprint(self) -> str:
        """Identify everything that moves a vector."""
        ...

    @property
    def vector_dim(self) -> int:
        """Return V."""
        ...

    def embed(self, texts: Sequence[str]) -> Float32[np.ndarray, "N V"]:
        """Embed texts, L2-normalised, in the order given; an empty text gives a zero row, never NaN."""
        ...


DESCRIBED: Final = {"use_attribute_docstrings": True}
"""What HTTP's schema says of a record's fields stands below them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Highlight:
    """A word of a document's text or title, and the words of the query it answered."""

    __pydantic_config__ = DESCRIBED

    start_char: int
    """Counts from the start of the document's text, or of its title."""
    end_char: int
    """The character behind the word's last."""
    weight: float
    """What the word adds to `late` of the passage's scores."""
    query_words: Sequence[str]
    """Strongest first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passage:
    """A span of a document: ``text`` is ``document.text[start_char:end_char]``.

    ``scores`` holds parts of ``score``: ``chunk`` is the passage's own cosine, ``bm25`` its own BM25, where
    it has one, ``late`` its MaxSim. ``highlights`` are its words that answered the query, in order, and
    ``title_highlights`` those of the title that did so better; there are none where token vectors did not
    judge, and where no word is like one of the query. ``page`` is where it stands in its file, such as
    `page 3`, `sheet Prices`, `lines 12-20` or `section Install`, None for a row of a table.
    """

    start_char: int
    end_char: int
    text: str
    score: float
    page: str | None = None
    scores: Mapping[str, float] = field(default_factory=dict[str, float])
    highlights: Sequence[Highlight] = ()
    title_highlights: Sequence[Highlight] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Hit:
    """One document of an answer with its best passages, best first.

    ``scores`` holds the parts the final ``score`` was made of: ``document`` and ``chunk`` are cosines,
    ``bm25`` is that of title and text, ``passage_bm25`` that of the best passage, ``sparse`` what a learned
    sparse encoder gives the best passage, ``late`` the MaxSim of its best window, ``rerank`` the score of a
    reranker; absent parts were not asked for or not found.
    """

    doc_id: str
    title: str | None
    score: float
    scores: Mapping[str, float]
    metadata: Mapping[str, Any]
    passages: Sequence[Passage]

    @property
    def threshold_score(self) -> float:
        """The score that thresholds are compared with: the probability where the answer has one."""
        return self.scores.get("probability", self.score)


def json_value(value: Any) -> Any:
    """Return a stored value as JSON: dates and times as ISO 8601, bytes as base64, decimals as text."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, dict):
        return {str(key): json_value(item) for key, item in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in cast("Sequence[Any]", value)]
    return format(value, "f") if isinstance(value, decimal.Decimal) else str(value)


class TwiceError(ValueError):
    """A key stands twice in an object, and one of its values would be lost."""


def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; :class:`TwiceError` where a key stands twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise TwiceError(f"key {twice[:100]!r} stands twice in an object")
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """A ranked answer, all of it from one generation; ``warnings`` are sentences on what it lacks."""

    query: str
    generation: int
    hits: Sequence[Hit]
    warnings: Sequence[str] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON shape of the CLI and the HTTP API.

        Dates are ISO 8601, bytes base64 and decimals texts.
        """
        return json_value(asdict(self))

    @override
    def __repr__(self) -> str:
        found = "".join(f"\n  {hit.score:.3f}  {hit.doc_id}" for hit in self.hits)
        return f"<{len(self.hits)} found for {self.query!r}, generation {self.generation}{found}>"


@runtime_checkable
class ArrowStream(Protocol):
    """Any table that speaks Arrow's C stream interface, as those of pandas, polars and DuckDB."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        """Return a capsule."""
        ...


def read_frame(given: Any) -> pa.Table | list[dict[str, Any]]:
    """Return what Arrow can read as a table; a frame of pandas with values that it does not take as rows."""
    if not (hasattr(given, "iloc") and hasattr(given, "columns") and given.columns.is_unique):
        return pa.table(given)
    if all(given.index.names) and not {*given.index.names} & {*given.columns}:
        given = given.reset_index()  # Arrow passes over one that counts
    if not _has_objects(given):
        with suppress(pa.ArrowException, TypeError, ValueError):
            return pa.table(given)
    return given.to_dict("records")


def _has_objects(frame: Any) -> bool:
    """Whether a frame of pandas has objects that Arrow would read by the first of them, or refuse."""
    for column in (frame[name] for name in frame.columns):
        kinds = set(map(type, column[column.notna()])) if column.dtype == object else set()
        if not (kinds <= {str} or kinds <= {np.ndarray}):
            return True
    return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One stored document as it came, read from one generation."""

    doc_id: str
    title: str | None
    text: str
    num_tokens: int
    metadata: Mapping[str, Any]
    generation: int
    content_sha256: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedDocument:
    """A document without its text."""

    doc_id: str
    title: str | None
    num_tokens: int
    metadata: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentPage:
    """Documents that match a filter, in the order of their ids, out of ``total``.

    ``next_after`` is the id that the next page goes on after, None on the last page.
    """

    generation: int
    total: int
    documents: Sequence[ListedDocument]
    next_after: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueCount:
    """A value of a column, or an element of a list column, and how many documents have it."""

    value: Any
    documents: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnSummary:
    """A column that filters can name, over some documents.

    ``documents`` of them have a value, of ``different_values``; ``values`` are the most frequent ones.
    ``low`` and ``high`` are the range of numbers, dates and times, None of other types.
    """

    name: str
    type: str
    documents: int
    different_values: int
    values: Sequence[ValueCount]
    low: Any = None
    high: Any = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectionSummary:
    """A collection in a line.

    Counts are missing where there are none, or where the key sees a part of the documents only.
    """

    __pydantic_config__ = DESCRIBED

    name: str
    status: Literal["ready", "building", "empty", "unfinished", "damaged"]
    """building: its first ingest is at work; empty: it was created without a document; unfinished: its first
    ingest was stopped, and goes on when it is run again."""
    generation: int | None = None
    documents: int | None = None
    chunks: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterColumn:
    """A column that filters can name; ``type`` is Arrow's, such as `int64` or `timestamp[us, tz=UTC]`."""

    name: str
    type: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectionDescription:
    """What a collection holds and how it can be searched."""

    __pydantic_config__ = DESCRIBED

    name: str
    generation: int
    created_at: str
    documents: int
    """Those the key sees."""
    chunks: int | None
    """null where the key sees a part of the documents only."""
    vector_dim: int
    landmark_interval: int
    """`chunk_tokens` of a search must be a multiple of it."""
    context_documents: int | None
    """Documents of the stored context; null where the key sees a part of the documents only."""
    uses_context: bool
    """Whether vectors depend on the context."""
    reranks: bool
    """Whether the server has a cross-encoder, so that a search may say `rerank`."""
    is_writable: bool
    """Whether the key may write to it here."""
    filter_columns: Sequence[FilterColumn]
    is_outdated: bool
    """A newer generation was published but is damaged; an older one answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenDocument:
    """A document as it is kept; its hash, which goes into If-Match, changes with text, title and metadata."""

    doc_id: str
    content_sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class IngestedSource:
    """What became of the rows of a source."""

    __pydantic_config__ = DESCRIBED

    rows: int
    indexed: int
    unchanged: int
    quarantined: int
    """Rows that could not be stored."""
    quarantine_reasons: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteReport:
    """A write that outlives a kill of the server; one that is ``searchable`` is seen by the next search."""

    __pydantic_config__ = DESCRIBED

    write: int
    """Its number, to ask for what became of it."""
    status: Literal["durable", "searchable"]
    generation: int | None
    """The one that has it, once it is searchable."""
    documents: Sequence[WrittenDocument]
    deleted: int
    missing: Sequence[str]
    """Ids to delete that were not there."""
    warnings: Sequence[str]
    ingested: IngestedSource | None
    """Of a source, once it is searchable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LineageRun:
    """A run that read a document: when it began, in UTC, and the generation it published, where known."""

    run_id: str
    started_at: str
    job: str | None
    generation: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """Where a document came from and what its vectors were made with.

    ``pages`` says how many the document has, such as `48 pages`. ``source_row`` counts from 0; it and ``run``
    are None where no file of a run tells. ``model_revision`` is the commit of a model that was fetched from a
    hub. ``context_documents`` is 0 where no vector depends on a context, and None for a caller who may not
    read all documents. ``generation`` is the one that answered, published by the run ``published_by``.
    """

    doc_id: str
    source_file: str
    pages: str | None
    source_row: int | None
    content_sha256: str
    cluster_id: int
    num_tokens: int
    num_chunks: int
    run: LineageRun | None
    model: str
    model_revision: str | None
    encoder_fingerprint: str
    context_documents: int | None
    context_fingerprint: str
    collection: str
    generation: int
    published_by: str
    published_at: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class IngestReport:
    """What one ingest did; ``rows == indexed + unchanged + quarantined`` always holds.

    ``encoded`` counts the documents that passed through the encoder in this run; after a resumed run it is
    smaller than ``indexed``. ``unread_files`` of the ``files`` had not changed and were not read; their rows
    are counted as if they had been. ``left_out`` counts files and folders that are no source, by why.
    ``quarantine_file`` is Parquet, with the reason of every refused row; ``quarantine_examples`` has the
    place and the detail of the first of each reason. ``newly_quarantined`` of them were not refused by the
    runs before.
    """

    collection: str
    rows: int
    indexed: int
    unchanged: int
    quarantined: int
    deleted: int
    encoded: int
    generation: int
    seconds: float
    files: int = 0
    unread_files: int = 0
    chunks: int = 0
    tokens: int = 0
    newly_quarantined: int = 0
    quarantine_reasons: Mapping[str, int] = field(default_factory=dict[str, int])
    quarantine_examples: Mapping[str, str] = field(default_factory=dict[str, str])
    left_out: Mapping[str, int] = field(default_factory=dict[str, int])
    stage_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    warnings: Sequence[str] = ()
    quarantine_file: str | None = None
