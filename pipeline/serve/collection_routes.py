"""What can be searched, what it holds, its documents, and clicks on hits for the feedback log."""

from __future__ import annotations

from typing import Annotated, Final

from cairn.pipeline.search.filters import filterable_columns
from cairn.pipeline.search_options import MAX_TOP_K
from cairn.pipeline.serve import answers
from cairn.pipeline.serve.access import SearchGrant, State, reachable
from cairn.pipeline.serve.answers import json_value, read_from
from cairn.pipeline.serve.collections import ServedCollection
from cairn.pipeline.serve.keys import Grant
from cairn.pipeline.serve.problems import UNKNOWN_DOCUMENT, ProblemError
from cairn.pipeline.serve.schemas import (
    DEFAULT_DOCUMENT_CHARACTERS,
    MAX_DOC_ID_CHARACTERS,
    MAX_DOCUMENT_CHARACTERS,
    CollectionList,
    CollectionName,
    CollectionReply,
    CollectionSummary,
    Column,
    DocumentReply,
    Reply,
    Request,
)
from cairn.pipeline.serve.schemas import (
    Query as SearchedQuery,
)
from cairn.pipeline.types import Lineage
from fastapi import APIRouter, Path, Query
from pydantic import Field
from starlette.convertors import Convertor, register_url_convertor
from typing_extensions import override


class DocIdConvertor(Convertor[str]):
    """The rest of an address, slashes and line breaks included: ids are what a source's rows have."""

    regex = "(?s:.+)"

    @override
    def convert(self, value: str) -> str:
        return value

    @override
    def to_string(self, value: str) -> str:
        return value


register_url_convertor("doc_id", DocIdConvertor())

router = APIRouter(prefix="/v1/collections", tags=["collections"], redirect_slashes=False)
clicks = APIRouter(prefix="/v1/collections", tags=["feedback"])

DocId = Annotated[
    str,
    Path(
        min_length=1, max_length=MAX_DOC_ID_CHARACTERS, description="Id of a document; it may hold slashes."
    ),
]
MAX_OFFSET: Final = 1 << 31
"""Beyond the longest text."""


@router.get("")
async def list_collections(state: State, grant: SearchGrant) -> CollectionList:
    """List the collections this key may ask, by name, and those of which nothing is published yet."""

    def summaries() -> list[CollectionSummary]:
        return [
            _visible(state.collections.summarise(name), grant)
            for name in state.collections.listed()
            if grant.reaches(name)
        ]

    return CollectionList(collections=await state.search_threads.run(summaries))


@router.get("/{name}")
async def describe_collection(name: CollectionName, state: State, grant: SearchGrant) -> CollectionReply:
    """Say what a collection holds and how it may be asked."""
    return await read_from(
        state, grant, name, lambda served: _describe(served, grant, reranks=state.reranker is not None)
    )


@router.get("/{name}/documents/{doc_id:doc_id}")
async def read_document(
    name: CollectionName,
    doc_id: DocId,
    state: State,
    grant: SearchGrant,
    start_char: Annotated[int, Query(ge=0, le=MAX_OFFSET, description="First character to give.")] = 0,
    max_characters: Annotated[int, Query(ge=1, le=MAX_DOCUMENT_CHARACTERS)] = DEFAULT_DOCUMENT_CHARACTERS,
) -> DocumentReply:
    """Give a document by its id, or a stretch of its text."""
    document = await answers.read_document(state, grant, name, doc_id)
    if document is None:
        raise ProblemError(UNKNOWN_DOCUMENT, "ids are those of the source's rows, as hits give them")
    text = document.text[start_char : start_char + max_characters]
    first = min(start_char, len(document.text))
    return DocumentReply(
        doc_id=document.doc_id,
        title=document.title,
        metadata={name: json_value(value) for name, value in document.metadata.items()},
        generation=document.generation,
        num_tokens=document.num_tokens,
        num_characters=len(document.text),
        start_char=first,
        end_char=first + len(text),
        text=text,
    )


@router.get("/{name}/lineage/{doc_id:doc_id}")
async def read_lineage(name: CollectionName, doc_id: DocId, state: State, grant: SearchGrant) -> Lineage:
    """Say where a document came from, and what its vectors were made with."""
    found = await read_from(
        state,
        grant,
        name,
        lambda served: served.searcher.read_lineage(doc_id, restriction=grant.restriction),
    )
    if found is None:
        raise ProblemError(UNKNOWN_DOCUMENT, "ids are those of the source's rows, as hits give them")
    return found


class ClickRequest(Request):
    """A hit that was opened, or otherwise found good."""

    query: SearchedQuery
    doc_id: Annotated[str, Field(min_length=1, max_length=MAX_DOC_ID_CHARACTERS)]
    rank: Annotated[int, Field(ge=1, le=MAX_TOP_K)] | None = Field(
        default=None, description="The hit's place in the answer, from 1."
    )


class ClickReply(Reply):
    """Whether the server keeps a feedback log."""

    logged: bool


@clicks.post("/{name}/clicks")
async def log_click(
    name: CollectionName, click: ClickRequest, state: State, grant: SearchGrant
) -> ClickReply:
    """Note in the feedback log, where the server keeps one, that a hit of a query was opened.

    A document that is not there, or that the key does not see, is refused and not logged.
    """
    await reachable(state, grant, name)
    if state.feedback is not None:
        if await answers.read_document(state, grant, name, click.doc_id) is None:
            raise ProblemError(UNKNOWN_DOCUMENT, "ids are those of the source's rows, as hits give them")
        state.feedback.clicked(name, click.query, click.doc_id, click.rank)
    return ClickReply(logged=state.feedback is not None)


def _visible(summary: CollectionSummary, grant: Grant) -> CollectionSummary:
    """Leave out counts that tell a key about documents it may not see."""
    if grant.restriction is None:
        return summary
    return summary.model_copy(update={"documents": None, "chunks": None})


def _describe(served: ServedCollection, grant: Grant, *, reranks: bool) -> CollectionReply:
    searcher = served.searcher
    generation = searcher.generation
    manifest = generation.manifest
    return CollectionReply(
        name=served.name,
        generation=generation.number,
        created_at=manifest.created_at,
        documents=searcher.count_documents(grant.restriction),
        chunks=manifest.chunks if grant.restriction is None else None,
        vector_dim=manifest.vector_dim,
        landmark_interval=manifest.encoder.landmark_interval,
        context_documents=manifest.context_documents if grant.restriction is None else None,
        uses_context=manifest.encoder.needs_context,
        reranks=reranks,
        filter_columns=[
            Column(name=name, type=str(data_type))
            for name, data_type in filterable_columns(generation.document_schema).items()
        ],
        is_outdated=searcher.is_outdated,
    )
