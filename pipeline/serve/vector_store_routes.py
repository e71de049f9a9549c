"""OpenAI's vector stores, read only: a store is a collection, a file a document.

Files are listed in the order in which they were ingested.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeVar

import numpy as np
import pyarrow.compute as pc
from cairn.pipeline.search.documents import read_documents, visible_documents
from cairn.pipeline.search.served import Served
from cairn.pipeline.serve.access import SearchGrant, ServerState, State, reachable
from cairn.pipeline.serve.answers import read_document, read_from
from cairn.pipeline.serve.collection_routes import DocId
from cairn.pipeline.serve.collections import ServedCollection
from cairn.pipeline.serve.keys import Grant
from cairn.pipeline.serve.openai_routes import attributes_of
from cairn.pipeline.serve.openai_schemas import (
    FileContent,
    FileCounts,
    TextContent,
    VectorStore,
    VectorStoreFile,
    VectorStoreFiles,
    VectorStores,
)
from cairn.pipeline.serve.problems import INVALID_REQUEST, UNKNOWN_DOCUMENT, ProblemError
from cairn.pipeline.serve.schemas import MAX_DOC_ID_CHARACTERS, CollectionName, InvalidField
from cairn.pipeline.serve.settings import TABLE_TIMEOUT_SECONDS
from cairn.pipeline.types import Document
from fastapi import APIRouter, Depends, Query, Request
from jaxtyping import Int64

router = APIRouter(prefix="/v1/vector_stores", tags=["openai"], redirect_slashes=False)

Positions = Int64[np.ndarray, " A"]
Place = Annotated[str | None, Query(min_length=1, max_length=MAX_DOC_ID_CHARACTERS)]
_CONTENT: Final = b"/content"


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
                    raise ProblemError(
                        INVALID_REQUEST, "1 part(s) of the request must be changed", errors=[field]
                    )
                kept = kept[sign * side * (kept - place) > 0]
        is_backwards = self.before is not None and self.after is None
        return kept[-self.limit :] if is_backwards else kept[: self.limit], len(kept) > self.limit


Pages = Annotated[Paging, Depends()]


@router.get("")
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
    return _page_of(VectorStores, [found[position] for position in chosen], has_more)


@router.get("/{vector_store_id}")
async def retrieve_vector_store(
    vector_store_id: CollectionName, state: State, grant: SearchGrant
) -> VectorStore:
    """Describe a collection as OpenAI describes a vector store."""
    return await _store(state, grant, vector_store_id)


@router.get("/{vector_store_id}/files")
async def list_files(
    vector_store_id: CollectionName,
    state: State,
    grant: SearchGrant,
    paging: Pages,
    filter: Literal["in_progress", "completed", "failed", "cancelled"] | None = None,  # noqa: A002 - OpenAI's name
) -> VectorStoreFiles:
    """List documents in the order of their ingest; all are completed."""

    def read(whole: Served) -> tuple[list[Document], bool]:
        generation = whole.generation
        timeout = dt.timedelta(seconds=TABLE_TIMEOUT_SECONDS)
        positions = visible_documents(generation, grant.restriction, timeout)

        def position_of(doc_id: str) -> int | None:
            found = pc.index(generation.doc_ids, doc_id).as_py()
            return None if found < 0 else found

        chosen, has_more = paging.page(positions, position_of)
        return read_documents(generation, chosen), has_more

    def files_of(served: ServedCollection) -> VectorStoreFiles:
        documents, has_more = served.searcher.reading(read)
        return _page_of(VectorStoreFiles, [_file(served, document) for document in documents], has_more)

    if filter not in (None, "completed"):
        await reachable(state, grant, vector_store_id)
        return _page_of(VectorStoreFiles, [], has_more=False)
    return await read_from(state, grant, vector_store_id, files_of)


@router.get("/{vector_store_id}/files/{file_id:doc_id}")
async def retrieve_file(
    vector_store_id: CollectionName, file_id: DocId, request: Request, state: State, grant: SearchGrant
) -> VectorStoreFile | FileContent:
    """Describe a document, or give its text where the address ends in ``/content``.

    Slashes of an id are sent as ``%2F``, so that an id may end in ``/content`` itself.
    """
    wants_content = request.scope.get("raw_path", b"").endswith(_CONTENT)
    doc_id = file_id.removesuffix(_CONTENT.decode()) if wants_content else file_id
    document = await read_document(state, grant, vector_store_id, doc_id)
    if document is None:
        raise ProblemError(UNKNOWN_DOCUMENT, "ids are those of the source's rows, as results give them")
    if wants_content:
        return FileContent(data=[TextContent(text=document.text)])
    return _file(await reachable(state, grant, vector_store_id), document)


_Page = TypeVar("_Page", VectorStores, VectorStoreFiles)


def _page_of(kind: type[_Page], entries: Sequence[Any], has_more: bool) -> _Page:
    first, last = (entries[0].id, entries[-1].id) if entries else (None, None)
    return kind(data=list(entries), first_id=first, last_id=last, has_more=has_more)


async def _store(state: ServerState, grant: Grant, name: str) -> VectorStore:
    def describe(served: ServedCollection) -> VectorStore:
        count = served.searcher.count_documents(grant.restriction)
        files = served.searcher.generation.manifest.files.values()
        return VectorStore(
            id=name,
            name=name,
            created_at=_created_at(served),
            last_active_at=_created_at(served),
            file_counts=FileCounts(total=count, completed=count),
            usage_bytes=0 if grant.restriction else sum(each.size_bytes for each in files),
        )

    return await read_from(state, grant, name, describe)


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
