"""What can be searched, what it holds, its documents, and clicks on hits for the feedback log."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any, Final, cast

from cairn.pipeline.search import contents
from cairn.pipeline.search.contents import (
    DEFAULT_VALUES,
    MAX_PAGE,
    MAX_VALUES,
    list_matches,
    summarise_columns,
)
from cairn.pipeline.search.filters import filterable_columns
from cairn.pipeline.search_options import MAX_TOP_K
from cairn.pipeline.serve.answers import Asked, Searched, SearchGrant, State, json_response, may_write
from cairn.pipeline.serve.collections import ServedCollection
from cairn.pipeline.serve.keys import ApiKey
from cairn.pipeline.serve.problems import Kind
from cairn.pipeline.serve.schemas import (
    DEFAULT_DOCUMENT_CHARACTERS,
    MAX_DOC_ID_CHARACTERS,
    MAX_DOCUMENT_CHARACTERS,
    CollectionList,
    DocumentReply,
    Filter,
    Reply,
    Request,
    plain,
)
from cairn.pipeline.serve.schemas import Query as SearchedQuery
from cairn.pipeline.types import (
    CollectionDescription,
    CollectionSummary,
    ColumnSummary,
    DocumentPage,
    FilterColumn,
    Lineage,
    json_value,
)
from fastapi import APIRouter, Path, Query, Response
from pydantic import Field
from starlette.convertors import PathConvertor, register_url_convertor


class DocIdConvertor(PathConvertor):
    """The rest of an address, slashes and line breaks included: ids are what a source's rows have."""

    regex = "(?s:.+)"


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


class ColumnSummaries(Reply):
    """Columns that filters may name."""

    columns: list[ColumnSummary]


class FacetsRequest(Request):
    """Columns whose values are to be counted over the documents that match."""

    columns: Annotated[list[Annotated[str, Field(max_length=256)]], Field(min_length=1, max_length=32)]
    filters: Filter | None = None
    num_values: Annotated[int, Field(ge=0, le=MAX_VALUES)] = DEFAULT_VALUES


class CountRequest(Request):
    """Which documents to count; all without a filter."""

    filters: Filter | None = None


class CountReply(Reply):
    """How many documents match."""

    generation: int
    documents: int


class ListRequest(Request):
    """Which documents to list, and the id that the page goes on after."""

    filters: Filter | None = None
    after: Annotated[str, Field(min_length=1, max_length=MAX_DOC_ID_CHARACTERS)] | None = None
    limit: Annotated[int, Field(ge=1, le=MAX_PAGE)] = 100


@router.get("")
async def list_collections(state: State, grant: SearchGrant) -> CollectionList:
    """List the collections this key may ask, by name, and those of which nothing is published yet."""

    def summaries() -> list[CollectionSummary]:
        return [
            _visible(state.collections.summarise(name), grant)
            for name in state.collections.listed()
            if grant.reaches(name)
        ]

    found = await state.search_threads.run(summaries)
    has_target = grant.collections is None or any(each.status == "empty" for each in found)
    return CollectionList(collections=found, is_writable=has_target and may_write(state, grant))


@router.get("/{name}")
async def describe_collection(asked: Searched) -> CollectionDescription:
    """Say what a collection holds and how it may be asked."""
    return await asked.read_served(lambda served: _describe(served, asked))


@router.get("/{name}/columns", response_model=ColumnSummaries)
async def list_columns(asked: Searched) -> Response:
    """Say which columns there are, with their most frequent values and their range, of what this key may see.

    Columns whose values mostly differ, such as ids, are without values.
    """
    found = await asked.read(summarise_columns, restriction=asked.restriction)
    return json_response({"columns": json_value([asdict(each) for each in found])})


@router.post("/{name}/facets", response_model=ColumnSummaries)
async def count_values(request: FacetsRequest, asked: Searched) -> Response:
    """Count the values of columns over the documents that match a filter."""
    within = request.columns, plain(request.filters), request.num_values, asked.restriction
    found = await asked.read(summarise_columns, *within)
    return json_response({"columns": json_value([asdict(each) for each in found])})


@router.post("/{name}/count")
async def count_documents(request: CountRequest, asked: Searched) -> CountReply:
    """Count the documents that match a filter."""
    within = asked.restriction, plain(request.filters)
    generation, positions = await asked.read(contents.visible_documents, *within)
    return CountReply(generation=generation.number, documents=len(positions))


@router.post("/{name}/documents/list", response_model=DocumentPage)
async def list_documents(request: ListRequest, asked: Searched) -> Response:
    """Give all documents that match a filter, page by page in the order of their ids, without their texts."""
    within = plain(request.filters), request.after, request.limit, asked.restriction
    page = await asked.read(list_matches, *within)
    return json_response(cast("dict[str, Any]", json_value(asdict(page))))


@router.get("/{name}/documents/{doc_id:doc_id}", response_model=DocumentReply)
async def read_document(
    doc_id: DocId,
    asked: Searched,
    start_char: Annotated[int, Query(ge=0, le=MAX_OFFSET, description="First character to give.")] = 0,
    max_characters: Annotated[int, Query(ge=1, le=MAX_DOCUMENT_CHARACTERS)] = DEFAULT_DOCUMENT_CHARACTERS,
) -> Response:
    """Give a document by its id, or a stretch of its text."""
    document = await asked.read(contents.read_document, doc_id, asked.restriction)
    if document is None:
        raise Kind.UNKNOWN_DOCUMENT()
    text = document.text[start_char : start_char + max_characters]
    first = min(start_char, len(document.text))
    span = {"num_characters": len(document.text), "start_char": first, "end_char": first + len(text)}
    return json_response({**json_value(asdict(document)), **span, "text": text})


@router.get("/{name}/lineage/{doc_id:doc_id}")
async def read_lineage(doc_id: DocId, asked: Searched) -> Lineage:
    """Say where a document came from, and what its vectors were made with."""
    found = await asked.read(contents.read_lineage, doc_id, asked.restriction)
    if found is None:
        raise Kind.UNKNOWN_DOCUMENT()
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
async def log_click(click: ClickRequest, asked: Searched) -> ClickReply:
    """Note in the feedback log, where the server keeps one, that a hit of a query was opened.

    A document that is not there, or that the key does not see, is refused and not logged.
    """
    await asked.served()
    feedback = asked.state.feedback
    if feedback is not None:
        if await asked.read(contents.read_document, click.doc_id, asked.restriction) is None:
            raise Kind.UNKNOWN_DOCUMENT()
        feedback.clicked(asked.name, click.query, click.doc_id, click.rank)
    return ClickReply(logged=feedback is not None)


def _visible(summary: CollectionSummary, grant: ApiKey) -> CollectionSummary:
    """Leave out counts that tell a key about documents it may not see."""
    if grant.restriction is None:
        return summary
    return replace(summary, documents=None, chunks=None)


def _describe(served: ServedCollection, asked: Asked) -> CollectionDescription:
    searcher = served.searcher
    generation = searcher.generation
    manifest = generation.manifest
    return CollectionDescription(
        name=served.name,
        generation=generation.number,
        created_at=manifest.created_at,
        documents=searcher.reading(contents.count_documents, asked.restriction),
        chunks=manifest.chunks if asked.restriction is None else None,
        vector_dim=manifest.vector_dim,
        landmark_interval=manifest.encoder.landmark_interval,
        context_documents=manifest.context_documents if asked.restriction is None else None,
        uses_context=manifest.encoder.use_context,
        reranks=asked.state.reranker is not None,
        is_writable=may_write(asked.state, asked.grant),
        filter_columns=[
            FilterColumn(name=name, type=str(data_type))
            for name, data_type in filterable_columns(generation.document_schema).items()
        ],
        is_outdated=searcher.is_outdated,
    )
