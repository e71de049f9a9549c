"""Writes over HTTP: collections, their documents and sources, where the server was started with --writable.

request ─▶ LiveWriter.write ─▶ 202 durable
                 └─ published, taken up ─▶ 200 searchable, for ?wait=searchable
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path as FolderPath
from typing import Annotated, Any, Final, Literal

from cairn.pipeline.collection import Collection
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.line.live import LiveWriter, Receipt
from cairn.pipeline.line.waiting_writes import Outcome
from cairn.pipeline.line.written_rows import Stored
from cairn.pipeline.model.folders.names import MODEL_NAMES
from cairn.pipeline.serve.answers import Asked, State, WriteGrant, granted
from cairn.pipeline.serve.collection_routes import DocId
from cairn.pipeline.serve.middleware import REQUEST_ENDS
from cairn.pipeline.serve.problems import Kind
from cairn.pipeline.serve.schemas import (
    MAX_DOC_ID_CHARACTERS,
    CollectionName,
    Filter,
    Reply,
    Request,
    plain,
)
from cairn.pipeline.types import CollectionSummary, IngestedSource, WriteReport, WrittenDocument
from fastapi import APIRouter, Depends, Header, Query, Response
from fastapi import Request as HttpRequest
from pydantic import Field, JsonValue, model_validator

router = APIRouter(prefix="/v1/collections", tags=["writes"], redirect_slashes=False)

MAX_DOCUMENTS: Final = 1_000
MAX_KEY_CHARACTERS: Final = 255
WAITING_SHARE: Final = 0.8
"""Of a request's time, what it waits to be searchable; after that it is answered as durable."""


class NewCollection(Request):
    """A collection to be made."""

    name: CollectionName
    model: str | None = Field(default=None, description="Name of a packaged model; null: the default.")
    settings: dict[str, dict[str, JsonValue]] = Field(
        default_factory=dict[str, dict[str, JsonValue]],
        description="Settings of an ingest by stage: encoder, cluster, context, index, corpus.",
    )


class NewDocument(Request):
    """A document, as GET gives it; one of the same id is replaced."""

    doc_id: Annotated[
        str,
        Field(
            min_length=1,
            max_length=MAX_DOC_ID_CHARACTERS,
            description="Any text but `.` and `..`, which clients take out of an address.",
        ),
    ]
    text: str
    title: str | None = None
    metadata: dict[str, JsonValue] = Field(
        default_factory=dict[str, JsonValue],
        description="Values to filter by and to show; a new name is a new column, null elsewhere.",
    )


class NewDocuments(Request):
    """Documents to add or replace."""

    documents: Annotated[list[NewDocument], Field(min_length=1, max_length=MAX_DOCUMENTS)]
    types: dict[str, str] = Field(
        default_factory=dict[str, str],
        description="Columns with the types that their values are read as, in Arrow's words, such as "
        "`date32[day]`, `timestamp[us, tz=UTC]`, `decimal128(10, 2)` or `list[int8]`.",
    )


class Changes(Request):
    """Metadata to change."""

    metadata: Annotated[dict[str, JsonValue], Field(min_length=1, description="Null takes a value away.")]


class Deletion(Request):
    """Documents to delete: by their ids, or by a filter."""

    doc_ids: list[Annotated[str, Field(min_length=1)]] | None = Field(
        default=None, min_length=1, max_length=MAX_DOCUMENTS
    )
    filters: Filter | None = None

    @model_validator(mode="after")
    def _require_one(self) -> Deletion:
        if (self.doc_ids is None) == (self.filters is None):
            raise ValueError("there must be doc_ids or filters, and not both")
        return self


class NewSource(Request):
    """A source to ingest."""

    source: Annotated[
        str, Field(min_length=1, max_length=4_096, description="Path, glob or URI, as `ingest` takes it.")
    ]


class WriteState(Reply):
    """What became of a write."""

    write: int
    status: Literal["waiting", "searchable", "failed"]
    generation: int | None
    detail: str | None = Field(description="Why it failed.")
    warnings: list[str] = Field(description="Of a source, where the server has not restarted.")
    ingested: IngestedSource | None = Field(description="Of a source, where the server has not restarted.")


class DroppedCollection(Reply):
    """A collection that is gone."""

    name: str
    deleted: Literal[True]


Wait = Annotated[
    Literal["durable", "searchable"],
    Query(description="Answer once it outlives a kill, or once the next search sees it."),
]
IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=MAX_KEY_CHARACTERS,
        description="The same key with the same request is one write; the last 1,000 are known.",
    ),
]
IfMatch = Annotated[
    str | None,
    Header(
        description="`content_sha256` that the document must have, in quotes or not; several with commas "
        "between them, `*` for any."
    ),
]
IfNoneMatch = Annotated[
    Literal["*"] | None, Header(description="The document must be new; one that is there stays as it is.")
]


@dataclass(frozen=True, slots=True)
class AskedWrite(Asked):
    """A collection that a request writes, and how it is answered."""

    response: Response = field(default_factory=Response)
    wait: Literal["durable", "searchable"] = "durable"
    key: str | None = None
    ends: asyncio.Timeout | None = None

    def layout(self, *, is_written: bool = True) -> CollectionLayout:
        """Return where it is; one that is not there looks as one out of reach.

        Where the name answers from another one, a write is refused: searches by this name would not see it.
        """
        if not self.grant.reaches(self.name) or not self.state.collections.serves(self.name):
            raise Kind.UNKNOWN_COLLECTION()
        if is_written and self.state.collections.target(self.name) != self.name:
            raise Kind.COLLECTION_SWITCHED(
                "write to that one by its own name, or let this name answer from its own"
            )
        try:
            layout = CollectionLayout.at(self.state.settings.root, self.name)
        except ConfigError:
            raise Kind.UNKNOWN_COLLECTION() from None
        if not layout.is_begun():
            raise Kind.UNKNOWN_COLLECTION()
        return layout

    async def writer(self) -> tuple[LiveWriter, Stored]:
        """Return its writer, and what is published of it."""
        searcher = None
        if CollectionLayout.at(self.state.settings.root, self.name).exists():
            searcher = (await self.state.collections.own(self.name)).searcher
        writers = self.state.writers
        return await writers.opened(self.name), writers.stored(self.name, searcher)

    async def answered(
        self, write: Callable[[LiveWriter, Stored], Receipt | None], *, waits: bool = False
    ) -> WriteReport:
        """Answer a write once it is as durable or searchable as asked.

        ``waits`` says that it waits for those before it: others are then accepted meanwhile.
        """
        self.layout()
        writer, stored = await self.writer()
        until = None
        if self.ends is not None and (when := self.ends.when()) is not None:
            until = when - (1 - WAITING_SHARE) * self.state.settings.deadline_seconds
            self.ends.reschedule(None)  # what is in the log must be told, however long it took to get there
        run = self.state.writers.run if waits else partial(self.state.writers.accept, writer)
        receipt = await run(lambda: write(writer, stored))
        if receipt is None:
            raise Kind.UNKNOWN_DOCUMENT()
        outcome = None
        if self.wait == "searchable":
            outcome = await self.published(receipt, until=until)
        self.response.status_code = 202 if outcome is None else 200
        nothing: dict[str, Any] = {"documents": [], "deleted": 0, "missing": [], "warnings": []}
        answer = {**nothing, **receipt.answer, **_ingested(outcome)}
        answer["documents"] = [WrittenDocument(**each) for each in answer["documents"]]
        return WriteReport(
            write=receipt.number,
            status="durable" if outcome is None else "searchable",
            generation=outcome and outcome.generation,
            **answer,
        )

    async def published(self, *receipts: Receipt, until: float | None = None) -> Outcome | None:
        """Return what became of the last of some writes; None where they take longer than a request may wait.

        ``until`` is when the wait ends, by the clock of the loop; None: as long from now as a request may.
        Where one of them has failed, raises the problem of it.
        """
        waiting = [asyncio.wrap_future(receipt.published) for receipt in receipts]
        seconds = WAITING_SHARE * self.state.settings.deadline_seconds
        if until is not None:
            seconds = max(0.0, until - asyncio.get_running_loop().time())
        await asyncio.wait(waiting, timeout=seconds)
        outcomes = [each.result() for each in waiting if each.done()]
        failed = next((outcome for outcome in outcomes if outcome.state == "failed"), None)
        if failed is not None:
            raise Kind.WRITE_FAILED(_fault(failed))
        return outcomes[-1] if len(outcomes) == len(waiting) else None


async def _asked(
    name: CollectionName,
    request: HttpRequest,
    response: Response,
    wait: Wait = "durable",
    idempotency_key: IdempotencyKey = None,
) -> AskedWrite:
    state, ends = request.app.state.server, request.scope[REQUEST_ENDS]
    return AskedWrite(state, granted(request, "write"), name, response, wait, idempotency_key, ends)


Writing = Annotated[AskedWrite, Depends(_asked)]
"""Not the class itself: FastAPI calls that on another thread, and each hand-over waits for searches."""


@router.post("", status_code=201)
async def create_collection(
    request: NewCollection, state: State, grant: WriteGrant, idempotency_key: IdempotencyKey = None
) -> CollectionSummary:
    """Make a collection without documents; its first documents draw its clusters and its context."""
    name, asked = request.name, request.model_dump()
    if not grant.reaches(name) or not state.collections.serves(name):
        raise Kind.UNKNOWN_COLLECTION()
    encoder = request.settings.get("encoder", {})
    if encoder.get("sparse_model") or request.settings.get("corpus", {}).get("vector_column"):
        raise Kind.INVALID_REQUEST("sparse_model and vector_column are for `ingest`; leave them out here")
    if any(model not in (None, *MODEL_NAMES) for model in (request.model, encoder.get("model"))):
        raise Kind.INVALID_REQUEST("a model must be named by a packaged name here; `ingest` takes folders")
    layout = CollectionLayout.at(state.settings.root, name)
    if layout.is_begun():
        if idempotency_key is not None:
            writer = await state.writers.opened(name)
            if await state.writers.run(lambda: writer.was_created_by(asked, idempotency_key)):
                return CollectionSummary(name=name, status="empty")
        raise Kind.COLLECTION_EXISTS("write to it, or delete it first")
    make = partial(Collection.create, name, root=state.settings.root, model=request.model)
    created = await state.writers.run(lambda: make(settings=request.settings))
    writer = await state.writers.opened(name, makes=True)
    await state.writers.run(lambda: writer.create(created.settings, asked, idempotency_key))
    return CollectionSummary(name=name, status="empty")


@router.delete("/{name}")
async def delete_collection(
    name: CollectionName, state: State, grant: WriteGrant, idempotency_key: IdempotencyKey = None
) -> DroppedCollection:
    """Remove a collection with all it holds."""
    if grant.reaches(name) and state.writers.was_removed_by(name, idempotency_key):
        return DroppedCollection(name=name, deleted=True)
    layout = AskedWrite(state, grant, name).layout()
    await state.writers.drop(layout)
    state.writers.note_removed(name, idempotency_key)
    await state.writers.run(lambda: state.uploads.forget(layout.name))
    return DroppedCollection(name=name, deleted=True)


@router.post("/{name}/documents")
async def write_documents(
    request: NewDocuments,
    asked: Writing,
    if_match: IfMatch = None,
    if_none_match: IfNoneMatch = None,
) -> WriteReport:
    """Add documents, or replace those of the same ids: all of them, or none where one cannot be stored."""
    wanted = _hashes(if_match) if if_none_match is None else []
    if (wanted is not None and len(request.documents) > 1) or (if_match and if_none_match):
        raise Kind.INVALID_REQUEST("one of If-Match and If-None-Match goes with one document")
    rows = [document.model_dump() for document in request.documents]
    return await asked.answered(
        lambda writer, stored: writer.write(rows, stored, types=request.types, if_match=wanted, key=asked.key)
    )


@router.post("/{name}/documents/delete")
async def delete_documents(request: Deletion, asked: Writing) -> WriteReport:
    """Delete documents by their ids, or all that match a filter once the writes before are published."""
    timeout = WAITING_SHARE * asked.state.settings.deadline_seconds

    def delete(writer: LiveWriter, stored: Stored) -> Receipt:
        if request.filters is not None:
            filters = plain(request.filters)
            return writer.delete_matching(filters, stored, timeout, key=asked.key)
        return writer.delete(request.doc_ids or (), stored, key=asked.key)

    return await asked.answered(delete, waits=request.filters is not None)


@router.patch("/{name}/documents/{doc_id:doc_id}")
async def change_document(
    doc_id: DocId, request: Changes, asked: Writing, if_match: IfMatch = None
) -> WriteReport:
    """Change metadata of a document. It is encoded again only where the collection has partitions."""
    return await asked.answered(
        lambda writer, stored: writer.patch(
            doc_id, request.metadata, stored, if_match=_hashes(if_match), key=asked.key
        )
    )


@router.delete("/{name}/documents/{doc_id:doc_id}")
async def delete_document(doc_id: DocId, asked: Writing, if_match: IfMatch = None) -> WriteReport:
    """Delete a document."""
    return await asked.answered(
        lambda writer, stored: delete_one(writer, stored, doc_id, if_match=_hashes(if_match), key=asked.key)
    )


@router.post("/{name}/sources")
async def ingest_source(request: NewSource, asked: Writing) -> WriteReport:
    """Ingest a source that the server may read, after the writes before it."""
    if not _is_allowed(request.source, asked.state.settings.allowed_sources):
        raise Kind.SOURCE_REFUSED("the server names those it reads with --allowed-source")
    return await asked.answered(lambda writer, _: writer.ingest(request.source, key=asked.key))


@router.get("/{name}/writes/{number}")
async def read_write(name: CollectionName, number: int, state: State, grant: WriteGrant) -> WriteState:
    """Say what became of a write; the last 10,000 are known, of those before a restart without generation."""
    AskedWrite(state, grant, name).layout(is_written=False)
    outcome = (await state.writers.opened(name)).outcome(number)
    if outcome is None:
        raise Kind.UNKNOWN_WRITE("it was never acknowledged, or long ago")
    told: dict[str, Any] = {"warnings": [], **_ingested(outcome)}
    return WriteState(
        write=number,
        status=outcome.state,
        generation=outcome.generation,
        detail=_fault(outcome),
        **told,
    )


def delete_one(
    writer: LiveWriter,
    stored: Stored,
    doc_id: str,
    *,
    if_match: Sequence[str] | None = None,
    key: str | None = None,
) -> Receipt | None:
    """Delete a document; None where there is none."""
    receipt = writer.delete([doc_id], stored, if_match=if_match, key=key)
    return None if receipt.answer["missing"] else receipt


def _ingested(outcome: Outcome | None) -> dict[str, Any]:
    """Return what an answer says of an ingested source."""
    report = None if outcome is None else outcome.report
    if report is None:
        return {"ingested": None}
    counts = {name: getattr(report, name) for name in IngestedSource.__slots__}
    return {"ingested": IngestedSource(**counts), "warnings": list(report.warnings)}


def _fault(outcome: Outcome) -> str | None:
    return None if outcome.fault is None else outcome.fault.partition(", got ")[0]


def _hashes(if_match: str | None) -> list[str] | None:
    return None if if_match is None else [each.strip().strip('"') for each in if_match.split(",")]


def _is_allowed(source: str, allowed: Sequence[str]) -> bool:
    """Tell whether a source lies below one of those that the server was started with."""
    if "://" in source:
        below = (source == each or source.startswith(each.rstrip("/") + "/") for each in allowed)
        return ".." not in source.split("/") and any(below)
    folders = [FolderPath(each).resolve() for each in allowed if "://" not in each]
    return any(FolderPath(source).resolve().is_relative_to(folder) for folder in folders)
