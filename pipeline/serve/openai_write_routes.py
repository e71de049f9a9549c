"""OpenAI's files and vector stores, as they are written, where the server was started with --writable.

    POST /v1/files ─▶ kept ─▶ POST /v1/vector_stores/{id}/files ─▶ in_progress ─▶ completed or failed

A file that is a document has the id of the file as its document id; rows of a table keep theirs.
"""

from __future__ import annotations

import re
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal

import numpy as np
from cairn.pipeline.errors import DocumentsRefusedError
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.line.live import Receipt
from cairn.pipeline.manifest import COLLECTION_NAME
from cairn.pipeline.serve.answers import ServerState, State, WriteGrant
from cairn.pipeline.serve.collection_routes import DocId
from cairn.pipeline.serve.keys import Grant
from cairn.pipeline.serve.openai_routes import (
    Pages,
    attached_file,
    files_page,
    page_of,
    retrieve_vector_store,
)
from cairn.pipeline.serve.openai_schemas import (
    Attributes,
    Deleted,
    FileBatch,
    FileChanges,
    FileCounts,
    NewFileBatch,
    NewVectorStore,
    NewVectorStoreFile,
    Purpose,
    StoredFile,
    StoredFiles,
    VectorStore,
    VectorStoreChanges,
    VectorStoreFile,
    VectorStoreFiles,
)
from cairn.pipeline.serve.problems import (
    BODY_SLOW,
    BODY_TOO_LARGE,
    INVALID_FORM,
    UNKNOWN_DOCUMENT,
    UNKNOWN_FILE,
    ProblemError,
    invalid_request,
    unknown_document,
)
from cairn.pipeline.serve.schemas import CollectionName, InvalidField
from cairn.pipeline.serve.settings import MAX_FILE_BYTES
from cairn.pipeline.serve.uploads import Attachment, Store, UploadedFile
from cairn.pipeline.serve.write_routes import (
    NewCollection,
    create_collection,
    delete_collection,
    open_writer,
    published,
    reached,
)
from cairn.pipeline.types import RESERVED_COLUMNS
from fastapi import APIRouter, Path, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

router = APIRouter(prefix="/v1", tags=["files"], redirect_slashes=False)

SentFileId = Annotated[str, Path(min_length=1, max_length=64, description="As POST /v1/files gives it.")]
BatchId = Annotated[str, Path(min_length=1, max_length=64)]
MIN_SECONDS: Final = 3_600
MAX_SECONDS: Final = 30 * 24 * 3_600
_NOT_IN_IDS: Final = re.compile(r"[^a-z0-9_-]+")
_PURPOSES: Final = Purpose.__args__  # type: ignore[attr-defined]
_FORM: Final[dict[str, Any]] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": list(_PURPOSES)},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": MIN_SECONDS,
                            "maximum": MAX_SECONDS,
                        },
                    },
                }
            }
        },
    }
}


@router.post("/files", openapi_extra=_FORM)
async def send_file(request: Request, state: State, grant: WriteGrant) -> StoredFile:
    """Keep a file, to be put into collections by its id; half of one is not kept."""
    try:
        form = await request.form(max_files=1, max_fields=8, max_part_size=1_024)
    except ClientDisconnect:
        raise ProblemError(BODY_SLOW, "the connection ended before it was whole") from None
    except HTTPException:
        raise ProblemError(INVALID_FORM, "send multipart/form-data with one file and its purpose") from None
    try:
        return await _kept(form, state, grant)
    finally:
        await form.close()


async def _kept(form: FormData, state: ServerState, grant: Grant) -> StoredFile:
    sent, purpose = form.get("file"), form.get("purpose")
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    wrong: list[InvalidField] = []
    if not isinstance(sent, UploadFile):
        wrong.append(InvalidField(pointer="#/file", detail="there must be a file, sent to its end"))
    elif not sent.size:
        wrong.append(InvalidField(pointer="#/file", detail="the file is empty"))
    if purpose not in _PURPOSES:
        wrong.append(InvalidField(pointer="#/purpose", detail=f"it must be one of {', '.join(_PURPOSES)}"))
    is_kept = anchor is None and seconds is None
    if not is_kept and not (anchor == "created_at" and _is_span(seconds)):
        told = f"the anchor must be created_at, and the seconds from {MIN_SECONDS:,} to {MAX_SECONDS:,}"
        wrong.append(InvalidField(pointer="#/expires_after", detail=told))
    if wrong:
        raise invalid_request(*wrong)
    assert isinstance(sent, UploadFile)
    if any("\ud800" <= character <= "\udfff" for character in sent.filename or ""):
        raise ProblemError(INVALID_FORM, "the name of the file must be text in UTF-8")
    if (sent.size or 0) > MAX_FILE_BYTES:
        raise ProblemError(BODY_TOO_LARGE, f"a file may have {MAX_FILE_BYTES:,} bytes")
    keep = partial(
        state.uploads.add, sent.file, sent.filename or "", purpose=str(purpose), owner=grant.key_id
    )
    return _stored_file(
        await state.writers.run(lambda: keep(seconds=None if seconds is None else int(str(seconds))))
    )


def _is_span(seconds: object) -> bool:
    is_number = isinstance(seconds, str) and seconds.isdecimal() and seconds.isascii() and len(seconds) < 10
    return is_number and MIN_SECONDS <= int(str(seconds)) <= MAX_SECONDS


@router.get("/files")
async def list_sent_files(
    state: State,
    grant: WriteGrant,
    paging: Pages,
    purpose: Annotated[str | None, Query(max_length=64, description="Give files of this purpose.")] = None,
) -> StoredFiles:
    """List the files that this key can use."""
    found = await state.writers.run(state.uploads.files)
    found = [file for file in found if _is_own(file, grant) and purpose in (None, file.purpose)]
    places = {file.id: place for place, file in enumerate(found)}
    chosen, has_more = paging.page(np.arange(len(found)), places.get)
    return page_of(StoredFiles, [_stored_file(found[place]) for place in chosen], has_more)


@router.get("/files/{file_id}")
async def retrieve_sent_file(file_id: SentFileId, state: State, grant: WriteGrant) -> StoredFile:
    """Describe a file."""
    return _stored_file(await _own_file(state, grant, file_id))


@router.get(
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
        raise _unknown_file() from None
    media_type = "application/octet-stream"
    return FileResponse(path, stat_result=found, filename=file.filename, media_type=media_type)


@router.delete("/files/{file_id}")
async def delete_sent_file(file_id: SentFileId, state: State, grant: WriteGrant) -> Deleted:
    """Remove a file, and its documents from the collections that the key reaches."""
    await _own_file(state, grant, file_id)
    for attachment in await state.writers.run(lambda: state.uploads.of_file(file_id)):
        if grant.reaches(attachment.collection):
            await _take_out(state, attachment)
    await state.writers.run(lambda: state.uploads.remove(file_id))
    return Deleted(id=file_id, object="file")


@router.post("/vector_stores")
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
    if files:
        await _attach(state, grant, store_id, files, None)
    return await retrieve_vector_store(store_id, state, grant)


@router.post("/vector_stores/{vector_store_id}")
async def change_vector_store(
    vector_store_id: CollectionName, request: VectorStoreChanges, state: State, grant: WriteGrant
) -> VectorStore:
    """Change the name that is shown, or the metadata; the id stays."""
    name = reached(state, grant, vector_store_id).name
    before = await retrieve_vector_store(vector_store_id, state, grant)
    is_said = "metadata" in request.model_fields_set
    said = Store(
        name=request.name or before.name,
        metadata=request.metadata if is_said else before.metadata,
        created_at=before.created_at,
    )
    await state.writers.run(lambda: state.uploads.name_store(name, said))
    return await retrieve_vector_store(vector_store_id, state, grant)


@router.delete("/vector_stores/{vector_store_id}")
async def delete_vector_store(vector_store_id: CollectionName, state: State, grant: WriteGrant) -> Deleted:
    """Remove a collection with all it holds; files that were sent stay."""
    await delete_collection(vector_store_id, state, grant)
    return Deleted(id=vector_store_id, object="vector_store.deleted")


@router.post("/vector_stores/{vector_store_id}/files")
async def attach_file(
    vector_store_id: CollectionName, request: NewVectorStoreFile, state: State, grant: WriteGrant
) -> VectorStoreFile:
    """Put a file into a collection; it is read in the background."""
    (attachment,) = await _attach(state, grant, vector_store_id, [request], None)
    return attached_file(vector_store_id, attachment)


@router.post("/vector_stores/{vector_store_id}/files/{file_id:doc_id}")
async def change_file(
    vector_store_id: CollectionName, file_id: DocId, request: FileChanges, state: State, grant: WriteGrant
) -> VectorStoreFile:
    """Change the attributes of a file that is completed; a document by its id has others as well."""
    _check_attributes(request.attributes)
    name = reached(state, grant, vector_store_id).name
    writer, stored = await open_writer(state, name)
    attachment = await state.writers.run(lambda: state.uploads.attachment(name, file_id))
    if attachment is not None and attachment.status != "completed":
        raise ProblemError(UNKNOWN_DOCUMENT, "the file has no documents: it is being read, or was refused")
    before = {} if attachment is None else attachment.attributes
    changed = {**dict.fromkeys(before), **request.attributes}
    doc_ids = [file_id] if attachment is None else attachment.doc_ids

    def change() -> list[Receipt]:
        receipts = [writer.patch(doc_id, changed, stored) for doc_id in doc_ids if changed]
        if attachment is not None:
            state.uploads.change(attachment, request.attributes)
        return [receipt for receipt in receipts if receipt is not None]

    receipts = await state.writers.run(change)
    if changed and not receipts:
        raise unknown_document()
    try:
        is_found = not receipts or await published(state, *receipts) is not None
    except ProblemError:
        if attachment is not None:
            await state.writers.run(lambda: state.uploads.change(attachment, before))
        raise
    if attachment is None:
        answer = VectorStoreFile(
            id=file_id,
            vector_store_id=vector_store_id,
            created_at=int(time.time()),
            usage_bytes=0,
            attributes=request.attributes,
        )
    else:
        now = await state.writers.run(lambda: state.uploads.attachment(name, file_id))
        answer = attached_file(vector_store_id, now or attachment)
    return answer if is_found else answer.model_copy(update={"status": "in_progress"})


@router.delete("/vector_stores/{vector_store_id}/files/{file_id:doc_id}")
async def detach_file(
    vector_store_id: CollectionName, file_id: DocId, state: State, grant: WriteGrant
) -> Deleted:
    """Take the documents of a file out of a collection, or a document by its id; the file stays."""
    name = reached(state, grant, vector_store_id).name
    attachment = await state.writers.run(lambda: state.uploads.attachment(name, file_id))
    if attachment is not None:
        await _take_out(state, attachment)
    elif not await _delete(state, name, [file_id]):
        raise unknown_document()
    return Deleted(id=file_id, object="vector_store.file.deleted")


@router.post("/vector_stores/{vector_store_id}/file_batches")
async def attach_files(
    vector_store_id: CollectionName, request: NewFileBatch, state: State, grant: WriteGrant
) -> FileBatch:
    """Put files into a collection, all of them or none where there is no such file."""
    common = [
        NewVectorStoreFile(file_id=file_id, attributes=request.attributes)
        for file_id in request.file_ids or ()
    ]
    batch_id = f"vsfb-{secrets.token_hex(12)}"
    await _attach(state, grant, vector_store_id, request.files or common, batch_id)
    return await retrieve_batch(vector_store_id, batch_id, state, grant)


@router.get("/vector_stores/{vector_store_id}/file_batches/{batch_id}")
async def retrieve_batch(
    vector_store_id: CollectionName, batch_id: BatchId, state: State, grant: WriteGrant
) -> FileBatch:
    """Say how far a batch is."""
    created_at, files = await _batch(state, grant, vector_store_id, batch_id)
    counts = Counter(each.status for each in files)
    is_cancelled = counts["cancelled"] and not counts["in_progress"]
    return FileBatch(
        id=batch_id,
        created_at=created_at,
        vector_store_id=vector_store_id,
        status="in_progress" if counts["in_progress"] else "cancelled" if is_cancelled else "completed",
        file_counts=FileCounts(**{"completed": 0, **counts}, total=len(files)),
    )


@router.post("/vector_stores/{vector_store_id}/file_batches/{batch_id}/cancel")
async def cancel_batch(
    vector_store_id: CollectionName, batch_id: BatchId, state: State, grant: WriteGrant
) -> FileBatch:
    """Leave out the files of a batch that nothing was written of yet."""
    async with state.ingestion.order:
        _, files = await _batch(state, grant, vector_store_id, batch_id)
        for each in files:
            if each.status == "in_progress" and not each.doc_ids:
                await state.writers.run(partial(state.uploads.settle, each, "cancelled"))
    return await retrieve_batch(vector_store_id, batch_id, state, grant)


@router.get("/vector_stores/{vector_store_id}/file_batches/{batch_id}/files")
async def list_batch_files(
    vector_store_id: CollectionName,
    batch_id: BatchId,
    state: State,
    grant: WriteGrant,
    paging: Pages,
    filter: Literal["in_progress", "completed", "failed", "cancelled"] | None = None,  # noqa: A002 - OpenAI's name
) -> VectorStoreFiles:
    """List the files of a batch."""
    _, files = await _batch(state, grant, vector_store_id, batch_id)
    return files_page(vector_store_id, [each for each in files if filter in (None, each.status)], paging)


async def _attach(
    state: ServerState, grant: Grant, name: str, files: Sequence[NewVectorStoreFile], batch_id: str | None
) -> list[Attachment]:
    target = reached(state, grant, name).name
    for each in files:
        _check_attributes(each.attributes or {})
        await _own_file(state, grant, each.file_id)
    try:
        attached = await state.writers.run(lambda: state.uploads.attach(target, files, batch_id))
    except DocumentsRefusedError:  # removed since it was looked for
        raise _unknown_file() from None
    state.ingestion.begin(attached)
    return attached


def _check_attributes(attributes: Attributes) -> None:
    reserved = sorted(RESERVED_COLUMNS & attributes.keys())
    if reserved:
        told = f"attributes must not have Cairn's own name {reserved[0]}"
        field = InvalidField(pointer="#/attributes", detail=told)
        raise invalid_request(field)


async def _take_out(state: ServerState, attachment: Attachment) -> None:
    """Delete the documents of a file; where that fails, its entry stays, and the next try goes on.

    Other files with some of these documents are read again.
    """
    async with state.ingestion.order:
        doc_ids, others = await state.writers.run(lambda: state.uploads.cancel(attachment))
    try:
        if doc_ids and CollectionLayout.at(state.settings.root, attachment.collection).is_begun():
            await _delete(state, attachment.collection, doc_ids)
    finally:
        state.ingestion.begin(others)
    await state.writers.run(lambda: state.uploads.detach(attachment))


async def _delete(state: ServerState, name: str, doc_ids: Sequence[str]) -> int:
    """Delete documents; searches do not find them any more, unless that takes longer than a request may."""
    writer, stored = await open_writer(state, name)
    receipt = await state.writers.run(lambda: writer.delete(doc_ids, stored))
    await published(state, receipt)
    return receipt.answer["deleted"]


async def _batch(state: ServerState, grant: Grant, name: str, batch_id: str) -> tuple[int, list[Attachment]]:
    target = reached(state, grant, name).name
    found = await state.writers.run(lambda: state.uploads.batch(target, batch_id))
    if found is None:
        raise ProblemError(UNKNOWN_FILE, "there is no batch of this id in the collection")
    return found


async def _own_file(state: ServerState, grant: Grant, file_id: str) -> UploadedFile:
    """Return a file; one that another key has sent, and that this one may not use, looks unknown."""
    file = await state.writers.run(lambda: state.uploads.file(file_id))
    if file is None or not _is_own(file, grant):
        raise _unknown_file()
    return file


def _unknown_file() -> ProblemError:
    return ProblemError(UNKNOWN_FILE, "ids are those that POST /v1/files gives")


def _is_own(file: UploadedFile, grant: Grant) -> bool:
    return grant.collections is None or file.owner == grant.key_id


def _stored_file(file: UploadedFile) -> StoredFile:
    return StoredFile(
        id=file.id,
        bytes=file.num_bytes,
        created_at=file.created_at,
        expires_at=file.expires_at,
        filename=file.filename,
        purpose=file.purpose,
        status="processed" if file.refusal is None else "error",
        status_details=file.refusal,
    )
