"""OpenAI's embeddings and vector stores, as they are read, so that its clients need only another base URL.

A store is a collection, a file a document. Files are listed in the order in which they were ingested, and
behind them those that are not documents yet. What writes is ``openai_write_routes``.
"""

from __future__ import annotations

import base64
import datetime as dt
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

import numpy as np
from cairn.pipeline.config import NO_MODEL
from cairn.pipeline.search.documents import count_documents, read_documents, visible_documents
from cairn.pipeline.search.served import Served
from cairn.pipeline.search_options import SearchKeywords
from cairn.pipeline.serve.answers import (
    EmbedGrant,
    SearchGrant,
    ServerState,
    State,
    json_value,
    reachable,
    read_document,
    read_from,
    search,
)
from cairn.pipeline.serve.collection_routes import DocId
from cairn.pipeline.serve.collections import ServedCollection
from cairn.pipeline.serve.keys import Grant
from cairn.pipeline.serve.openai_schemas import (
    Embedding,
    Embeddings,
    EmbeddingsRequest,
    FileContent,
    FileCounts,
    FileFault,
    FileResult,
    FileResults,
    Model,
    Models,
    PassageContent,
    StoredFiles,
    TextContent,
    Usage,
    VectorStore,
    VectorStoreFile,
    VectorStoreFiles,
    VectorStores,
    VectorStoreSearch,
)
from cairn.pipeline.serve.problems import (
    COLLECTION_BUILDING,
    COLLECTION_EMPTY,
    INVALID_REQUEST,
    ProblemError,
    invalid_request,
    unknown_document,
)
from cairn.pipeline.serve.schemas import MAX_DOC_ID_CHARACTERS, CollectionName, InvalidField, plain
from cairn.pipeline.serve.uploads import FILE_PREFIX, Attachment
from cairn.pipeline.types import Document, Hit, SearchResult
from fastapi import APIRouter, Depends, Query, Request
from fastapi.concurrency import run_in_threadpool
from jaxtyping import Float32, Int64

router = APIRouter(prefix="/v1", tags=["openai"], redirect_slashes=False)

Positions = Int64[np.ndarray, " A"]
Place = Annotated[str | None, Query(min_length=1, max_length=MAX_DOC_ID_CHARACTERS)]
_CONTENT: Final = b"/content"
MAX_CONTENTS: Final = 100
"""Documents of a table whose texts are given at once."""


@router.post("/vector_stores/{vector_store_id}/search")
async def search_vector_store(
    vector_store_id: CollectionName, request: VectorStoreSearch, state: State, grant: SearchGrant
) -> FileResults:
    """Search a collection as OpenAI's clients search a vector store."""
    queries = request.query if isinstance(request.query, list) else [request.query]
    options: SearchKeywords = {"top_k": request.max_num_results, "filters": plain(request.filters)}
    if request.ranking_options and request.ranking_options.score_threshold:
        options["min_probability"] = request.ranking_options.score_threshold
    results = await search(state, grant, vector_store_id, queries, options)
    hits = _best_of(results)[: request.max_num_results]
    names = await run_in_threadpool(_names_of_files, state, hits)
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
    served = await reachable(state, grant, request.model)
    encoder = served.encoder.encoder
    is_document = request.input_type == "document"
    if encoder.config.given_dims is not None and (is_document or encoder.config.model == NO_MODEL):
        detail = "documents of this collection bring their vectors; nothing embeds them here"
        raise ProblemError(INVALID_REQUEST, detail)
    if request.dimensions not in (None, encoder.vector_dim):
        field = InvalidField(
            pointer="#/dimensions",
            detail=f"the collection's vectors have {encoder.vector_dim} dimensions; leave it out",
        )
        raise invalid_request(field)
    texts = request.input if isinstance(request.input, list) else [request.input]
    num_tokens = await state.search_threads.run(lambda: encoder.count_tokens(texts))
    vectors = await served.encoder.encode(texts, request.input_type)
    return Embeddings(
        data=[
            Embedding(
                index=index,
                embedding=_encoded(vector) if request.encoding_format == "base64" else vector.tolist(),
            )
            for index, vector in enumerate(vectors)
        ],
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

    def page(self, positions: Positions, position_of: Callable[[str], int | None]) -> tuple[Positions, bool]:
        """Choose among ascending positions; tell whether there are more beyond the page."""
        sign = 1 if self.order == "asc" else -1
        kept = positions[::sign]
        for name, mark, side in (("after", self.after, 1), ("before", self.before, -1)):
            if mark is not None:
                place = position_of(mark)
                if place is None or place not in positions:
                    field = InvalidField(pointer=f"query/{name}", detail="there is no entry of this id")
                    raise invalid_request(field)
                kept = kept[sign * side * (kept - place) > 0]
        is_backwards = self.before is not None and self.after is None
        return kept[-self.limit :] if is_backwards else kept[: self.limit], len(kept) > self.limit


Pages = Annotated[Paging, Depends()]


@router.get("/vector_stores")
async def list_vector_stores(state: State, grant: SearchGrant, paging: Pages) -> VectorStores:
    """List the collections that this key can search, ordered by the time of their generation."""
    found: list[VectorStore] = []
    for name in await state.search_threads.run(state.collections.listed):
        if grant.reaches(name):
            try:
                found.append(await _store(state, grant, name))
            except ProblemError:  # not published yet, or damaged
                continue
    found.sort(key=lambda store: (store.created_at, store.id))
    positions = {store.id: position for position, store in enumerate(found)}
    chosen, has_more = paging.page(np.arange(len(found)), positions.get)
    return page_of(VectorStores, [found[position] for position in chosen], has_more)


@router.get("/vector_stores/{vector_store_id}")
async def retrieve_vector_store(
    vector_store_id: CollectionName, state: State, grant: SearchGrant
) -> VectorStore:
    """Describe a collection as OpenAI describes a vector store."""
    return await _store(state, grant, vector_store_id)


@router.get("/vector_stores/{vector_store_id}/files")
async def list_files(
    vector_store_id: CollectionName,
    state: State,
    grant: SearchGrant,
    paging: Pages,
    filter: Literal["in_progress", "completed", "failed", "cancelled"] | None = None,  # noqa: A002 - OpenAI's name
) -> VectorStoreFiles:
    """List documents in the order of their ingest, then the files that are not documents yet."""
    others = await _unfinished(state, grant, vector_store_id)

    def read(whole: Served) -> tuple[list[Document], list[Attachment], bool]:
        generation, positions = visible_documents(whole, grant.restriction)
        num_documents = generation.num_documents
        behind = {each.file_id: num_documents + place for place, each in enumerate(others)}
        if filter is None:
            positions = np.append(positions, np.array([*behind.values()], np.int64))

        def position_of(doc_id: str) -> int | None:
            found = generation.position_of(doc_id)
            return behind.get(doc_id) if found is None else found

        chosen, has_more = paging.page(positions, position_of)
        documents = read_documents(generation, chosen[chosen < num_documents])
        waiting = [others[place - num_documents] for place in chosen if place >= num_documents]
        return documents, waiting, has_more

    def files_of(served: ServedCollection) -> VectorStoreFiles:
        documents, waiting, has_more = served.searcher.reading(read)
        files = [_file(served, document) for document in documents]
        unread = [attached_file(vector_store_id, each) for each in waiting]
        both = [*files, *unread] if paging.order == "asc" else [*unread, *files]
        return page_of(VectorStoreFiles, both, has_more)

    if filter in (None, "completed"):
        try:
            return await read_from(state, grant, vector_store_id, files_of)
        except ProblemError as problem:
            if not _is_begun(state, problem):
                raise
    else:
        await _reach(state, grant, vector_store_id)
    chosen = [each for each in others if filter in (None, each.status)]
    return files_page(vector_store_id, chosen, paging)


def files_page(name: str, attachments: Sequence[Attachment], paging: Paging) -> VectorStoreFiles:
    """Return a page of files."""
    places = {each.file_id: place for place, each in enumerate(attachments)}
    positions, has_more = paging.page(np.arange(len(attachments)), places.get)
    files = [attached_file(name, attachments[place]) for place in positions]
    return page_of(VectorStoreFiles, files, has_more)


@router.get("/vector_stores/{vector_store_id}/files/{file_id:doc_id}")
async def retrieve_file(
    vector_store_id: CollectionName, file_id: DocId, request: Request, state: State, grant: SearchGrant
) -> VectorStoreFile | FileContent:
    """Describe a document, or give its text where the address ends in ``/content``.

    Slashes of an id are sent as ``%2F``, so that an id may end in ``/content`` itself.
    """
    wants_content = request.scope.get("raw_path", b"").endswith(_CONTENT)
    doc_id = file_id.removesuffix(_CONTENT.decode()) if wants_content else file_id
    attached = await _attached(state, grant, vector_store_id, doc_id)
    if attached is not None and attached.status != "completed" and not wants_content:
        return attached_file(vector_store_id, attached)
    own = [doc_id] if attached is None else attached.doc_ids
    read = [await read_document(state, grant, vector_store_id, each) for each in own[:MAX_CONTENTS]]
    documents = [document for document in read if document is not None]
    if not documents:
        raise unknown_document()
    if wants_content:
        return FileContent(data=[TextContent(text=document.text) for document in documents])
    if attached is not None:
        return attached_file(vector_store_id, attached)
    return _file(await reachable(state, grant, vector_store_id), documents[0])


_Page = TypeVar("_Page", VectorStores, VectorStoreFiles, StoredFiles)


def page_of(kind: type[_Page], entries: Sequence[Any], has_more: bool) -> _Page:
    """Return a page of entries that have ids."""
    first, last = (entries[0].id, entries[-1].id) if entries else (None, None)
    return kind(data=list(entries), first_id=first, last_id=last, has_more=has_more)


async def _store(state: ServerState, grant: Grant, name: str) -> VectorStore:
    others = Counter(each.status for each in await _unfinished(state, grant, name))
    own = None
    if state.settings.writable:
        own = await run_in_threadpool(state.uploads.store, state.collections.target(name))

    def describe(served: ServedCollection | None) -> VectorStore:
        made = own.created_at if own else 0
        count = size_bytes = 0
        if served is not None:
            count = served.searcher.reading(count_documents, grant.restriction)
            files = served.searcher.generation.manifest.files.values()
            size_bytes = 0 if grant.restriction else sum(each.size_bytes for each in files)
        return VectorStore(
            id=name,
            name=own.name if own else name,
            created_at=made or (0 if served is None else _created_at(served)),
            last_active_at=made if served is None else _created_at(served),
            status="in_progress" if others["in_progress"] else "completed",
            file_counts=FileCounts(total=count + others.total(), completed=count, **others),
            usage_bytes=size_bytes,
            metadata=None if own is None or own.metadata is None else dict(own.metadata),
        )

    try:
        return await read_from(state, grant, name, describe)
    except ProblemError as problem:
        if _is_begun(state, problem):
            return describe(None)
        raise


def _is_begun(state: ServerState, problem: ProblemError) -> bool:
    """Tell whether a problem is that a collection, which is written here, has no documents yet."""
    return problem.kind is COLLECTION_EMPTY or (
        problem.kind is COLLECTION_BUILDING and state.settings.writable
    )


async def _reach(state: ServerState, grant: Grant, name: str) -> None:
    """Require a collection that the grant is for; it may be one without documents."""
    try:
        await reachable(state, grant, name)
    except ProblemError as problem:
        if not _is_begun(state, problem):
            raise


async def _unfinished(state: ServerState, grant: Grant, name: str) -> list[Attachment]:
    """Return the files of a collection that are not documents; none for a key that sees a part of it."""
    if not state.settings.writable or grant.restriction is not None or not grant.reaches(name):
        return []
    found = await run_in_threadpool(state.uploads.attachments, state.collections.target(name))
    return [each for each in found if each.status != "completed"]


async def _attached(state: ServerState, grant: Grant, name: str, file_id: str) -> Attachment | None:
    if not state.settings.writable or grant.restriction is not None:
        return None
    await _reach(state, grant, name)
    return await run_in_threadpool(state.uploads.attachment, state.collections.target(name), file_id)


def attached_file(name: str, attachment: Attachment) -> VectorStoreFile:
    """Return a file of a collection as OpenAI has it."""
    fault = None
    if attachment.error_code is not None:
        fault = FileFault(code=attachment.error_code, message=attachment.error_message or "")
    return VectorStoreFile(
        id=attachment.file_id,
        vector_store_id=name,
        created_at=attachment.created_at,
        status=attachment.status,
        last_error=fault,
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
