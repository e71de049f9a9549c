"""Clicks on hits, for the feedback log."""

from __future__ import annotations

from typing import Annotated

from cairn.pipeline.search_options import MAX_TOP_K
from cairn.pipeline.serve import answers
from cairn.pipeline.serve.access import SearchGrant, State, reachable
from cairn.pipeline.serve.problems import UNKNOWN_DOCUMENT, ProblemError
from cairn.pipeline.serve.request_schemas import Request
from cairn.pipeline.serve.schemas import MAX_DOC_ID_CHARACTERS, CollectionName, Query, Reply
from fastapi import APIRouter
from pydantic import Field

router = APIRouter(prefix="/v1/collections", tags=["feedback"])


class ClickRequest(Request):
    """A hit that was opened, or otherwise found good."""

    query: Query
    doc_id: Annotated[str, Field(min_length=1, max_length=MAX_DOC_ID_CHARACTERS)]
    rank: Annotated[int, Field(ge=1, le=MAX_TOP_K)] | None = Field(
        default=None, description="The hit's place in the answer, from 1."
    )


class ClickReply(Reply):
    """Whether the server keeps a feedback log."""

    logged: bool


@router.post("/{name}/clicks")
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
