"""OpenAI's embeddings, files and vector stores, so that its clients need only another base URL.

    POST /v1/files ─▶ kept ─▶ POST /v1/vector_stores/{id}/files ─▶ in_progress ─▶ completed or failed

A store is a collection, a file a document. Files are listed in the order in which they were ingested, and
behind them those that are not documents yet. A file that is a document has the id of the file as its document
id; rows of a table keep theirs. What writes asks for a server that was started with --writable. What cannot
be done here (rewriting queries, other dimensions) is refused, not ignored.
"""

from __future__ import annotations

import base64
import datetime as dt
import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Final, Generic, Literal, Self, TypeVar, cast

import numpy as np
from cairn.pipeline.client.errors import FieldProblem
from cairn.pipeline.config import NO_MODEL
from cairn.pipeline.errors import DocumentsRefusedError
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.line.live import Receipt
from cairn.pipeline.manifest import COLLECTION_NAME
from cairn.pipeline.search.contents import count_documents, read_document, read_documents, visible_documents
from cairn.pipeline.search.searcher import Served
from cairn.pipeline.search_options import SearchKeywords
from cairn.pipeline.serve.answers import (
    Asked,
    EmbedGrant,
    SearchGrant,
    ServerState,
    State,
    WriteGrant,
    granted,
)
from cairn.pipeline.serve.collection_routes import DocId
from cairn.pipeline.serve.collections import ServedCollection
from cairn.pipeline.serve.keys import ApiKey
from cairn.pipeline.serve.problems import Kind, ProblemError, invalid_request
from cairn.pipeline.serve.schemas import (
    MAX_DOC_ID_CHARACTERS,
    MAX_QUERIES,
    CollectionName,
    Filter,
    Reply,
    not_blank,
    plain,
)
from cairn.pipeline.serve.schemas import Query as SearchedQuery
from cairn.pipeline.serve.schemas import Request as Sent
from cairn.pipeline.serve.settings import MAX_FILE_BYTES
from cairn.pipeline.serve.uploads import (
    FILE_PREFIX,
    Attachment,
    Attributes,
    Chunking,
    ErrorCode,
    FileId,
    NewVectorStoreFile,
    Status,
    Store,
    UploadedFile,
)
from cairn.pipeline.serve.write_routes import (
    AskedWrite,
    NewCollection,
    create_collection,
    delete_collection,
)
from cairn.pipeline.types import Document, Highlight, Hit, SearchResult, json_value
from fastapi import APIRouter, Depends, Form, Path, Query, Request, UploadFile
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse
from jaxtyping import Float32, Int64
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

MAX_RESULTS: Final = 50
MAX_INPUTS: Final = 256
MAX_INPUT_CHARACTERS: Final = 32 << 10
"""Characters of one text to embed: about 8,000 tokens."""


class RankingOptions(Sent):
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


class VectorStoreSearch(Sent):
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

    query: SearchedQuery | Annotated[list[SearchedQuery], Field(min_length=1, max_length=MAX_QUERIES)]
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
    highlights: list[Highlight]
    title_highlights: list[Highlight]


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

    code: ErrorCode
    message: str


class VectorStoreFile(Reply):
    """A document, or a file that is to be one; ``usage_bytes`` is the size of its text in UTF-8.

    ``warnings``, an extension, name pages and rows of the file that could not be read.
    """

    id: str
    object: Literal["vector_store.file"] = "vector_store.file"
    vector_store_id: str
    created_at: int
    status: Status = "completed"
    last_error: FileFault | None = None
    usage_bytes: int
    attributes: dict[str, str | int | float | bool]
    warnings: list[str] = Field(default_factory=list)


_Entry = TypeVar("_Entry", VectorStore, VectorStoreFile, UploadedFile)


class Page(Reply, Generic[_Entry]):
    """A part of a list, whose entries have ids."""

    object: Literal["list"] = "list"
    data: list[_Entry]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, entries: Sequence[_Entry], has_more: bool) -> Self:
        """Return a page of entries."""
        first, last = (entries[0].id, entries[-1].id) if entries else (None, None)
        return cls(data=list(entries), first_id=first, last_id=last, has_more=has_more)


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


class EmbeddingsRequest(Sent):
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
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class NewVectorStore(Sent):
    """A collection to be made; its id is made of the name."""

    name: Annotated[str, Field(max_length=256)] | None = None
    description: Annotated[str, Field(max_length=4_096, description="Taken and not used.")] | None = None
    file_ids: list[FileId] = Field(default_factory=list[FileId], max_length=MAX_FILES)
    chunking_strategy: Chunking | None = None
    metadata: Metadata | None = None
    expires_after: None = Field(default=None, description="Collections do not expire.")


class VectorStoreChanges(Sent):
    """What is said of a collection."""

    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    metadata: Metadata | None = None
    expires_after: None = Field(default=None, description="Collections do not expire.")


class NewFileBatch(Sent):
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


class FileChanges(Sent):
    """Attributes of a file to take the place of those it has."""

    attributes: Attributes


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


router = APIRouter(prefix="/v1", tags=["openai"], redirect_slashes=False)

Positions = Int64[np.ndarray, " A"]
Place = Annotated[str | None, Query(min_length=1, max_length=MAX_DOC_ID_CHARACTERS)]
StoreId = Annotated[CollectionName, Path(alias="vector_store_id")]
_Result = TypeVar("_Result")
_CONTENT: Final = b"/content"
MAX_CONTENTS: Final = 100
"""Documents of a table whose texts are given at once."""


@dataclass(frozen=True, slots=True)
class AskedStore(AskedWrite):
    """A collection as OpenAI's clients see it: with files, some of which are not documents yet."""

    async def described(self, describe: Callable[[ServedCollection | None], _Result]) -> _Result:
        """Return what is read of it, where it is written here also before it has documents: of None."""
        try:
            return await self.read_served(describe)
        except ProblemError as problem:
            is_writable = self.state.settings.writable
            if problem.kind is Kind.COLLECTION_EMPTY or (
                problem.kind is Kind.COLLECTION_BUILDING and is_writable
            ):
                return describe(None)
            raise

    async def unfinished(self) -> list[Attachment]:
        """Return its files that are not documents; none for a key that sees a part of it."""
        if not self._shows_files() or not self.grant.reaches(self.name):
            return []
        found = await run_in_threadpool(self.state.uploads.attachments, self._target())
        return [each for each in found if each.status != "completed"]

    async def attachment(self, file_id: str) -> Attachment | None:
        """Return a file that was sent."""
        if not self._shows_files():
            return None
        await self.described(lambda _: None)
        return await run_in_threadpool(self.state.uploads.attachment, self._target(), file_id)

    def _shows_files(self) -> bool:
        return self.state.settings.writable and self.restriction is None

    def _target(self) -> str:
        return self.state.collections.target(self.name)

    async def attach(self, files: Sequence[NewVectorStoreFile], batch_id: str | None) -> list[Attachment]:
        """Put files into it, to be read in the background."""
        self.layout()
        for each in files:
            await _own_file(self.state, self.grant, each.file_id)
        uploads = self.state.uploads
        try:
            attached = await self.state.writers.run(lambda: uploads.attach(self.name, files, batch_id))
        except DocumentsRefusedError:  # removed since it was looked for
            raise Kind.UNKNOWN_FILE() from None
        self.state.ingestion.begin(attached)
        return attached

    async def batch(self, batch_id: str) -> tuple[int, list[Attachment]]:
        """Return when a batch was made, and its files."""
        self.layout()
        found = await self.state.writers.run(lambda: self.state.uploads.batch(self.name, batch_id))
        if found is None:
            raise Kind.UNKNOWN_FILE("there is no batch of this id in the collection")
        return found

    async def take_out(self, attachment: Attachment) -> None:
        """Delete the documents of a file; where that fails, its entry stays, and the next try goes on.

        Other files with some of these documents are read again.
        """
        state = self.state
        async with state.ingestion.order:
            doc_ids, others = await state.writers.run(lambda: state.uploads.cancel(attachment))
        try:
            if doc_ids and CollectionLayout.at(state.settings.root, self.name).is_begun():
                await self.delete(doc_ids)
        finally:
            state.ingestion.begin(others)
        await state.writers.run(lambda: state.uploads.detach(attachment))

    async def delete(self, doc_ids: Sequence[str]) -> int:
        """Delete documents; searches find them no more, unless that takes longer than a request may."""
        writer, stored = await self.writer()
        receipt = await self.state.writers.run(lambda: writer.delete(doc_ids, stored))
        await self.published(receipt)
        return receipt.answer["deleted"]


async def _store(name: StoreId, request: Request) -> AskedStore:
    return AskedStore(request.app.state.server, granted(request, "search"), name)


async def _written_store(name: StoreId, request: Request) -> AskedStore:
    return AskedStore(request.app.state.server, granted(request, "write"), name)


SearchedStore = Annotated[AskedStore, Depends(_store)]
WrittenStore = Annotated[AskedStore, Depends(_written_store)]


@router.post("/vector_stores/{vector_store_id}/search")
async def search_vector_store(request: VectorStoreSearch, store: SearchedStore) -> FileResults:
    """Search a collection as OpenAI's clients search a vector store."""
    queries = request.query if isinstance(request.query, list) else [request.query]
    options: SearchKeywords = {"top_k": request.max_num_results, "filters": plain(request.filters)}
    if request.ranking_options and request.ranking_options.score_threshold:
        options["min_probability"] = request.ranking_options.score_threshold
    results = await store.search(queries, options)
    hits = _best_of(results)[: request.max_num_results]
    names = await run_in_threadpool(_names_of_files, store.state, hits)
    return FileResults(
        search_query=list(queries),
        data=[_file_result(hit, names.get(hit.doc_id)) for hit in hits],
        warnings=list(dict.fromkeys(each for result in results for each in result.warnings)),
    )


@router.get("/models")
async def list_models(state: State, grant: SearchGrant) -> Models:
    """List the collections this key may ask: each stands for its encoder."""
    listed = await state.search_threads.run(state.collections.listed)
    return Models(data=[Model(id=name) for name in listed if grant.reaches(name)])


@router.post("/embeddings")
async def embed(request: EmbeddingsRequest, state: State, grant: EmbedGrant) -> Embeddings:
    """Embed texts with a collection's encoder and context."""
    served = await Asked(state, grant, request.model).served()
    encoder = served.encoder.encoder
    is_document = request.input_type == "document"
    if encoder.config.given_dims is not None and (is_document or encoder.config.model == NO_MODEL):
        detail = "documents of this collection bring their vectors; nothing embeds them here"
        raise Kind.INVALID_REQUEST(detail)
    if request.dimensions not in (None, encoder.vector_dim):
        detail = f"the collection's vectors have {encoder.vector_dim} dimensions; leave it out"
        raise invalid_request(FieldProblem(pointer="#/dimensions", detail=detail))
    texts = request.input if isinstance(request.input, list) else [request.input]
    num_tokens = await state.search_threads.run(lambda: encoder.count_tokens(texts))
    vectors = await served.encoder.encode(texts, request.input_type)
    encoded = _encoded if request.encoding_format == "base64" else np.ndarray.tolist
    return Embeddings(
        data=[Embedding(index=index, embedding=encoded(vector)) for index, vector in enumerate(vectors)],
        model=request.model,
        usage=Usage(prompt_tokens=num_tokens, total_tokens=num_tokens),
    )


def _best_of(results: Sequence[SearchResult]) -> list[Hit]:
    """Merge answers: each document once, with the hit whose shown score is best, ties by id."""
    best: dict[str, Hit] = {}
    for hit in (hit for result in results for hit in result.hits):
        if hit.doc_id not in best or hit.threshold_score > best[hit.doc_id].threshold_score:
            best[hit.doc_id] = hit
    return sorted(best.values(), key=lambda hit: (-hit.threshold_score, hit.doc_id))


def _names_of_files(state: ServerState, hits: Sequence[Hit]) -> dict[str, str]:
    if not state.settings.writable:
        return {}
    found = (state.uploads.file(hit.doc_id) for hit in hits if hit.doc_id.startswith(FILE_PREFIX))
    return {file.id: file.filename for file in found if file is not None}


def _file_result(hit: Hit, filename: str | None) -> FileResult:
    return FileResult(
        file_id=hit.doc_id,
        filename=filename or hit.title or hit.doc_id,
        score=hit.threshold_score,
        attributes=attributes_of(hit.metadata),
        content=[PassageContent.model_validate(passage, from_attributes=True) for passage in hit.passages],
    )


def attributes_of(metadata: Mapping[str, Any]) -> dict[str, str | int | float | bool]:
    """Return what of a document's columns OpenAI's attributes can hold."""
    values = {name: json_value(value) for name, value in metadata.items()}
    return {name: value for name, value in values.items() if isinstance(value, str | bool | int | float)}


def _encoded(vector: Float32[np.ndarray, " V"]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")


@dataclass(frozen=True, kw_only=True, slots=True)
class Paging:
    """Which entries of a list to give; ``after`` and ``before`` are ids of entries."""

    limit: Annotated[int, Query(ge=1, le=100, description="Entries to give.")] = 20
    order: Annotated[Literal["asc", "desc"], Query(description="Oldest or newest first.")] = "desc"
    after: Place = None
    before: Place = None

    def page(self, entries: Sequence[_Entry]) -> Page[_Entry]:
        """Return a page of a list that is in memory."""
        places = {entry.id: place for place, entry in enumerate(entries)}
        chosen, has_more = self.choose(np.arange(len(entries)), places.get)
        return Page[_Entry].of([entries[place] for place in chosen], has_more)

    def choose(
        self, positions: Positions, position_of: Callable[[str], int | None]
    ) -> tuple[Positions, bool]:
        """Choose among ascending positions; tell whether there are more beyond the page."""
        sign = 1 if self.order == "asc" else -1
        kept = positions[::sign]
        for name, mark, side in (("after", self.after, 1), ("before", self.before, -1)):
            if mark is not None:
                place = position_of(mark)
                if place is None or place not in positions:
                    field = FieldProblem(pointer=f"query/{name}", detail="there is no entry of this id")
                    raise invalid_request(field)
                kept = kept[sign * side * (kept - place) > 0]
        is_backwards = self.before is not None and self.after is None
        return kept[-self.limit :] if is_backwards else kept[: self.limit], len(kept) > self.limit


Pages = Annotated[Paging, Depends()]


@router.get("/vector_stores")
async def list_vector_stores(state: State, grant: SearchGrant, paging: Pages) -> Page[VectorStore]:
    """List the collections that this key can search, ordered by the time of their generation."""
    found: list[VectorStore] = []
    for name in await state.search_threads.run(state.collections.listed):
        if grant.reaches(name):
            with suppress(ProblemError):  # not published yet, or damaged
                found.append(await retrieve_vector_store(AskedStore(state, grant, name)))
    found.sort(key=lambda store: (store.created_at, store.id))
    return paging.page(found)


@router.get("/vector_stores/{vector_store_id}")
async def retrieve_vector_store(store: SearchedStore) -> VectorStore:
    """Describe a collection as OpenAI describes a vector store."""
    state = store.state
    others = Counter(each.status for each in await store.unfinished())
    own = None
    if state.settings.writable:
        own = await run_in_threadpool(state.uploads.store, state.collections.target(store.name))

    def describe(served: ServedCollection | None) -> VectorStore:
        made = own.created_at if own else 0
        count = size_bytes = 0
        if served is not None:
            count = served.searcher.reading(count_documents, store.restriction)
            files = served.searcher.generation.manifest.files.values()
            size_bytes = 0 if store.restriction else sum(each.size_bytes for each in files)
        return VectorStore(
            id=store.name,
            name=own.name if own else store.name,
            created_at=made or (0 if served is None else _created_at(served)),
            last_active_at=made if served is None else _created_at(served),
            status="in_progress" if others["in_progress"] else "completed",
            file_counts=FileCounts(total=count + others.total(), completed=count, **others),
            usage_bytes=size_bytes,
            metadata=None if own is None or own.metadata is None else dict(own.metadata),
        )

    return await store.described(describe)


@router.get("/vector_stores/{vector_store_id}/files")
async def list_files(
    store: SearchedStore,
    paging: Pages,
    filter: Status | None = None,  # noqa: A002 - OpenAI's name
) -> Page[VectorStoreFile]:
    """List documents in the order of their ingest, then the files that are not documents yet."""
    others = [each for each in await store.unfinished() if filter in (None, each.status)]

    def read(whole: Served, served: ServedCollection) -> Page[VectorStoreFile]:
        generation, positions = visible_documents(whole, store.restriction)
        num_documents = generation.num_documents
        behind = {each.file_id: num_documents + place for place, each in enumerate(others)}
        positions = np.append(positions, np.array([*behind.values()], np.int64))

        def position_of(doc_id: str) -> int | None:
            found = generation.position_of(doc_id)
            return behind.get(doc_id) if found is None else found

        chosen, has_more = paging.choose(positions, position_of)
        documents = read_documents(generation, chosen[chosen < num_documents])
        waiting = [others[place - num_documents] for place in chosen if place >= num_documents]
        files = [_file(served, document) for document in documents]
        unread = [attached_file(store.name, each) for each in waiting]
        both = [*files, *unread] if paging.order == "asc" else [*unread, *files]
        return Page[VectorStoreFile].of(both, has_more)

    def files_of(served: ServedCollection | None) -> Page[VectorStoreFile]:
        if served is not None and filter in (None, "completed"):
            return served.searcher.reading(read, served)
        return paging.page([attached_file(store.name, each) for each in others])

    return await store.described(files_of)


@router.get("/vector_stores/{vector_store_id}/files/{file_id:doc_id}")
async def retrieve_file(
    file_id: Annotated[str, Path(min_length=1, max_length=MAX_DOC_ID_CHARACTERS + len(_CONTENT))],
    request: Request,
    store: SearchedStore,
) -> VectorStoreFile | FileContent:
    """Describe a document, or give its text where the address ends in ``/content``.

    Slashes of an id are sent as ``%2F``, so that an id may end in ``/content`` itself.
    """
    doc_id = file_id.removesuffix(_CONTENT.decode())
    wants_content = doc_id != file_id and request.scope.get("raw_path", b"").endswith(_CONTENT)
    doc_id = doc_id if wants_content else file_id
    attached = await store.attachment(doc_id)
    if attached is not None and attached.status != "completed" and not wants_content:
        return attached_file(store.name, attached)
    own = [doc_id] if attached is None else attached.doc_ids
    read = [await store.read(read_document, each, store.restriction) for each in own[:MAX_CONTENTS]]
    documents = [document for document in read if document is not None]
    if not documents:
        raise Kind.UNKNOWN_DOCUMENT()
    if wants_content:
        return FileContent(data=[TextContent(text=document.text) for document in documents])
    if attached is not None:
        return attached_file(store.name, attached)
    return _file(await store.served(), documents[0])


def attached_file(name: str, attachment: Attachment) -> VectorStoreFile:
    """Return a file of a collection as OpenAI has it."""
    code, message = attachment.error_code, attachment.error_message or ""
    return VectorStoreFile(
        id=attachment.file_id,
        vector_store_id=name,
        created_at=attachment.created_at,
        status=attachment.status,
        last_error=None if code is None else FileFault(code=code, message=message),
        usage_bytes=attachment.num_bytes,
        attributes=dict(attachment.attributes),
        warnings=list(attachment.warnings),
    )


def _file(served: ServedCollection, document: Document) -> VectorStoreFile:
    return VectorStoreFile(
        id=document.doc_id,
        vector_store_id=served.name,
        created_at=_created_at(served),
        usage_bytes=len(document.text.encode()),
        attributes=attributes_of(document.metadata),
    )


def _created_at(served: ServedCollection) -> int:
    return int(dt.datetime.fromisoformat(served.searcher.generation.manifest.created_at).timestamp())


files_router = APIRouter(prefix="/v1", tags=["files"], redirect_slashes=False)

SentFileId = Annotated[str, Path(min_length=1, max_length=64, description="As POST /v1/files gives it.")]
BatchId = Annotated[str, Path(min_length=1, max_length=64)]
MIN_SECONDS: Final = 3_600
MAX_SECONDS: Final = 30 * 24 * 3_600
_NOT_IN_IDS: Final = re.compile(r"[^a-z0-9_-]+")


@files_router.post("/files", form_limits={"max_files": 1, "max_fields": 8, "max_part_size": 1_024})
async def send_file(
    file: UploadFile,
    purpose: Annotated[Purpose, Form()],
    state: State,
    grant: WriteGrant,
    anchor: Annotated[Literal["created_at"] | None, Form(alias="expires_after[anchor]")] = None,
    seconds: Annotated[
        int | None, Form(alias="expires_after[seconds]", ge=MIN_SECONDS, le=MAX_SECONDS)
    ] = None,
) -> UploadedFile:
    """Keep a file, to be put into collections by its id; half of one is not kept."""
    if not file.size:
        raise invalid_request(FieldProblem(pointer="#/file", detail="the file is empty"))
    if (anchor is None) != (seconds is None):
        told = "a span must come with both, the anchor created_at and its seconds"
        raise invalid_request(FieldProblem(pointer="#/expires_after", detail=told))
    if any("\ud800" <= character <= "\udfff" for character in file.filename or ""):
        raise Kind.INVALID_FORM("the name of the file must be text in UTF-8")
    if file.size > MAX_FILE_BYTES:
        raise Kind.BODY_TOO_LARGE(f"a file may have {MAX_FILE_BYTES:,} bytes")
    add = partial(state.uploads.add, file.file, file.filename or "", purpose=purpose, seconds=seconds)
    return await state.writers.run(lambda: add(owner=grant.key_id))


@files_router.get("/files")
async def list_sent_files(
    state: State,
    grant: WriteGrant,
    paging: Pages,
    purpose: Annotated[str | None, Query(max_length=64, description="Give files of this purpose.")] = None,
) -> Page[UploadedFile]:
    """List the files that this key can use."""
    found = await state.writers.run(state.uploads.files)
    found = [file for file in found if _is_own(file, grant) and purpose in (None, file.purpose)]
    return paging.page(found)


@files_router.get("/files/{file_id}")
async def retrieve_sent_file(file_id: SentFileId, state: State, grant: WriteGrant) -> UploadedFile:
    """Describe a file."""
    return await _own_file(state, grant, file_id)


@files_router.get(
    "/files/{file_id}/content",
    response_class=FileResponse,
    responses={200: {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}},
)
async def read_sent_file(file_id: SentFileId, state: State, grant: WriteGrant) -> FileResponse:
    """Give the bytes of a file."""
    file = await _own_file(state, grant, file_id)
    path = state.uploads.path(file)
    try:
        found = await run_in_threadpool(path.stat)  # it may be removed meanwhile
    except FileNotFoundError:
        raise Kind.UNKNOWN_FILE() from None
    media_type = "application/octet-stream"
    return FileResponse(path, stat_result=found, filename=file.filename, media_type=media_type)


@files_router.delete("/files/{file_id}")
async def delete_sent_file(file_id: SentFileId, state: State, grant: WriteGrant) -> Deleted:
    """Remove a file, and its documents from the collections that the key reaches."""
    await _own_file(state, grant, file_id)
    for attachment in await state.writers.run(lambda: state.uploads.of_file(file_id)):
        if grant.reaches(attachment.collection):
            await AskedStore(state, grant, attachment.collection).take_out(attachment)
    await state.writers.run(lambda: state.uploads.remove(file_id))
    return Deleted(id=file_id, object="file")


@files_router.post("/vector_stores")
async def create_vector_store(request: NewVectorStore, state: State, grant: WriteGrant) -> VectorStore:
    """Make a collection; its id is the name in small letters, with an ending where another has that id."""
    files = [NewVectorStoreFile(file_id=file_id) for file_id in request.file_ids]
    for each in files:
        await _own_file(state, grant, each.file_id)
    name = request.name or f"vs-{secrets.token_hex(6)}"
    store_id = _NOT_IN_IDS.sub("-", name.lower()).strip("-_")[:50] or "vs"
    if store_id in await state.search_threads.run(state.collections.listed):
        store_id = f"{store_id}-{secrets.token_hex(4)}"
    assert COLLECTION_NAME.fullmatch(store_id), "made of what a name may hold"
    await create_collection(NewCollection(name=store_id), state, grant)
    said = Store(name=name, metadata=request.metadata, created_at=int(time.time()))
    await state.writers.run(lambda: state.uploads.name_store(store_id, said))
    store = AskedStore(state, grant, store_id)
    if files:
        await store.attach(files, None)
    return await retrieve_vector_store(store)


@files_router.post("/vector_stores/{vector_store_id}")
async def change_vector_store(request: VectorStoreChanges, store: WrittenStore) -> VectorStore:
    """Change the name that is shown, or the metadata; the id stays."""
    store.layout()
    before = await retrieve_vector_store(store)
    is_said = "metadata" in request.model_fields_set
    said = Store(
        name=request.name or before.name,
        metadata=request.metadata if is_said else before.metadata,
        created_at=before.created_at,
    )
    await store.state.writers.run(lambda: store.state.uploads.name_store(store.name, said))
    return await retrieve_vector_store(store)


@files_router.delete("/vector_stores/{vector_store_id}")
async def delete_vector_store(store: WrittenStore) -> Deleted:
    """Remove a collection with all it holds; files that were sent stay."""
    await delete_collection(store.name, store.state, store.grant)
    return Deleted(id=store.name, object="vector_store.deleted")


@files_router.post("/vector_stores/{vector_store_id}/files")
async def attach_file(request: NewVectorStoreFile, store: WrittenStore) -> VectorStoreFile:
    """Put a file into a collection; it is read in the background."""
    (attachment,) = await store.attach([request], None)
    return attached_file(store.name, attachment)


@files_router.post("/vector_stores/{vector_store_id}/files/{file_id:doc_id}")
async def change_file(file_id: DocId, request: FileChanges, store: WrittenStore) -> VectorStoreFile:
    """Change the attributes of a file that is completed; a document by its id has others as well."""
    store.layout()
    name, uploads, run = store.name, store.state.uploads, store.state.writers.run
    writer, stored = await store.writer()
    attachment = await run(lambda: uploads.attachment(name, file_id))
    if attachment is not None and attachment.status != "completed":
        raise Kind.UNKNOWN_DOCUMENT("the file has no documents: it is being read, or was refused")
    before = {} if attachment is None else attachment.attributes
    changed = {**dict.fromkeys(before), **request.attributes}
    doc_ids = [file_id] if attachment is None else attachment.doc_ids

    def change() -> list[Receipt]:
        receipts = [writer.patch(doc_id, changed, stored) for doc_id in doc_ids if changed]
        if attachment is not None:
            uploads.change(attachment, request.attributes)
        return [receipt for receipt in receipts if receipt is not None]

    receipts = await run(change)
    if changed and not receipts:
        raise Kind.UNKNOWN_DOCUMENT()
    try:
        is_found = not receipts or await store.published(*receipts) is not None
    except ProblemError:
        if attachment is not None:
            await run(lambda: uploads.change(attachment, before))
        raise
    if attachment is None:
        answer = VectorStoreFile(
            id=file_id,
            vector_store_id=name,
            created_at=int(time.time()),
            usage_bytes=0,
            attributes=request.attributes,
        )
    else:
        answer = attached_file(name, await run(lambda: uploads.attachment(name, file_id)) or attachment)
    return answer if is_found else answer.model_copy(update={"status": "in_progress"})


@files_router.delete("/vector_stores/{vector_store_id}/files/{file_id:doc_id}")
async def detach_file(file_id: DocId, store: WrittenStore) -> Deleted:
    """Take the documents of a file out of a collection, or a document by its id; the file stays."""
    store.layout()
    attachment = await store.state.writers.run(lambda: store.state.uploads.attachment(store.name, file_id))
    if attachment is not None:
        await store.take_out(attachment)
    elif not await store.delete([file_id]):
        raise Kind.UNKNOWN_DOCUMENT()
    return Deleted(id=file_id, object="vector_store.file.deleted")


@files_router.post("/vector_stores/{vector_store_id}/file_batches")
async def attach_files(request: NewFileBatch, store: WrittenStore) -> FileBatch:
    """Put files into a collection, all of them or none where there is no such file."""
    named, common = request.file_ids or (), request.attributes
    files = request.files or [NewVectorStoreFile(file_id=each, attributes=common) for each in named]
    batch_id = f"vsfb-{secrets.token_hex(12)}"
    await store.attach(files, batch_id)
    return await retrieve_batch(batch_id, store)


@files_router.get("/vector_stores/{vector_store_id}/file_batches/{batch_id}")
async def retrieve_batch(batch_id: BatchId, store: WrittenStore) -> FileBatch:
    """Say how far a batch is."""
    created_at, files = await store.batch(batch_id)
    counts = Counter(each.status for each in files)
    is_cancelled = counts["cancelled"] and not counts["in_progress"]
    return FileBatch(
        id=batch_id,
        created_at=created_at,
        vector_store_id=store.name,
        status="in_progress" if counts["in_progress"] else "cancelled" if is_cancelled else "completed",
        file_counts=FileCounts(**{"completed": 0, **counts}, total=len(files)),
    )


@files_router.post("/vector_stores/{vector_store_id}/file_batches/{batch_id}/cancel")
async def cancel_batch(batch_id: BatchId, store: WrittenStore) -> FileBatch:
    """Leave out the files of a batch that nothing was written of yet."""
    state = store.state
    async with state.ingestion.order:
        _, files = await store.batch(batch_id)
        for each in files:
            if each.status == "in_progress" and not each.doc_ids:
                await state.writers.run(partial(state.uploads.note, each, status="cancelled"))
    return await retrieve_batch(batch_id, store)


@files_router.get("/vector_stores/{vector_store_id}/file_batches/{batch_id}/files")
async def list_batch_files(
    batch_id: BatchId,
    store: WrittenStore,
    paging: Pages,
    filter: Status | None = None,  # noqa: A002 - OpenAI's name
) -> Page[VectorStoreFile]:
    """List the files of a batch."""
    _, files = await store.batch(batch_id)
    chosen = [attached_file(store.name, each) for each in files if filter in (None, each.status)]
    return paging.page(chosen)


async def _own_file(state: ServerState, grant: ApiKey, file_id: str) -> UploadedFile:
    """Return a file; one that another key has sent, and that this one may not use, looks unknown."""
    file = await state.writers.run(lambda: state.uploads.file(file_id))
    if file is None or not _is_own(file, grant):
        raise Kind.UNKNOWN_FILE()
    return file


def _is_own(file: UploadedFile, grant: ApiKey) -> bool:
    return grant.collections is None or file.owner == grant.key_id
