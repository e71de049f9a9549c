"""Everything that can go wrong with a request, as problems (RFC 9457): stable ``type``, status, one sentence.

A problem never names a path of this machine and never repeats values of the request: sentences of Cairn's
errors are cut before their ``got …``. A place in the body is named where its name is one of the schema's. An
unknown field or parameter is named too, so that a typo can be found, but only if it is a short identifier,
which has no room for a key, a text, a line break or markup.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from cairn.pipeline.client.errors import FieldProblem
from cairn.pipeline.errors import (
    CairnError,
    ChangedDocumentError,
    CollectionBusyError,
    CollectionExistsError,
    CollectionNotFoundError,
    DiskFullError,
    EndpointDownError,
    FilterError,
    FingerprintMismatchError,
    IntegrityError,
    KeyReusedError,
    PartitionsMissingError,
    RestrictionError,
    StorageError,
    TryAgainError,
    UsageError,
    WritesWaitingError,
)
from cairn.pipeline.serve.schemas import MAX_TOLD, UNKNOWN_FIELD, Reply
from starlette.responses import Response

MEDIA_TYPE: Final = "application/problem+json"
OPENAI_PATHS: Final = ("/v1/vector_stores", "/v1/embeddings", "/v1/files", "/v1/models")
"""Where addresses of OpenAI's API begin."""
TYPE_PREFIX: Final = "urn:problem-type:cairn:"


class OpenAIError(Reply):
    """A problem as OpenAI's clients read it; ``code`` is the end of the problem's ``type``."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    code: str
    param: str | None = None


class Problem(Reply):
    """What went wrong (RFC 9457); ``type`` is stable, ``detail`` a sentence for a person.

    ``error`` says the same on the addresses of OpenAI's API.
    """

    type: str
    title: str
    status: int
    detail: str
    errors: list[FieldProblem] | None = None
    error: OpenAIError | None = None


@dataclass(frozen=True, slots=True)
class ProblemType:
    """One kind of problem; ``retry_seconds`` is its Retry-After, None where trying again does not help."""

    name: str
    status: int
    title: str
    retry_seconds: int | None = None


INVALID_JSON = ProblemType("invalid-json", 400, "The body is not JSON as RFC 8259 has it")
INVALID_FORM = ProblemType("invalid-form", 400, "The body is not a form with a file")
BODY_AMBIGUOUS = ProblemType("body-ambiguous", 400, "The length of the body is given in two ways")
BODY_UNEXPECTED = ProblemType("body-unexpected", 400, "This method takes no body")
KEY_MISSING = ProblemType("key-missing", 401, "An API key is required")
KEY_UNKNOWN = ProblemType("key-unknown", 401, "The API key is not known")
PRINCIPAL_MISSING = ProblemType(
    "principal-missing", 403, "The request does not say for whom it asks, or may not"
)
SCOPE_MISSING = ProblemType("scope-missing", 403, "The request may not ask for this")
RESTRICTION_UNUSABLE = ProblemType(
    "restriction-unusable", 403, "What the request may read does not fit this collection"
)
READ_ONLY = ProblemType("read-only", 403, "This server takes no writes")
SOURCE_REFUSED = ProblemType("source-refused", 403, "The server may not read this source")
ORIGIN_REFUSED = ProblemType("origin-refused", 403, "Pages of other sites may not call this server")
NOT_FOUND = ProblemType("not-found", 404, "There is nothing at this address")
UNKNOWN_COLLECTION = ProblemType("unknown-collection", 404, "There is no such collection")
UNKNOWN_DOCUMENT = ProblemType("unknown-document", 404, "The collection has no such document")
UNKNOWN_FILE = ProblemType("unknown-file", 404, "There is no such file")
UNKNOWN_WRITE = ProblemType("unknown-write", 404, "The server knows no such write")
METHOD_REFUSED = ProblemType("method-refused", 405, "This address does not take this method")
BODY_SLOW = ProblemType("body-slow", 408, "The body did not arrive in time")
COLLECTION_EMPTY = ProblemType("collection-empty", 409, "The collection has no documents yet")
COLLECTION_EXISTS = ProblemType("collection-exists", 409, "There is such a collection")
COLLECTION_SWITCHED = ProblemType("collection-switched", 409, "A name answers from another collection")
COLLECTION_BUSY = ProblemType("collection-busy", 409, "The collection is being written", retry_seconds=5)
CURSOR_EXPIRED = ProblemType(
    "cursor-expired", 410, "The collection has changed since the cursor was given out"
)
DOCUMENT_CHANGED = ProblemType("document-changed", 412, "The document is not as the request says it must be")
BODY_TOO_LARGE = ProblemType("body-too-large", 413, "The body is too large")
MEDIA_TYPE_REFUSED = ProblemType(
    "media-type-refused", 415, "The body is not of the media type that is read here"
)
HOST_REFUSED = ProblemType("host-refused", 421, "This server does not answer for this host")
INVALID_REQUEST = ProblemType("invalid-request", 422, "The request does not follow the schema")
INVALID_FILTER = ProblemType("invalid-filter", 422, "The filter does not fit this collection")
KEY_REUSED = ProblemType("key-reused", 422, "The idempotency key came with another request before")
WRITE_FAILED = ProblemType("write-failed", 422, "The write was kept, and cannot be published")
INVALID_CURSOR = ProblemType("invalid-cursor", 422, "The cursor does not belong to this request")
WRITES_WAITING = ProblemType(
    "writes-waiting", 429, "As many writes wait to be published as are kept", retry_seconds=2
)
INTERNAL_ERROR = ProblemType("internal-error", 500, "The server failed")
ENCODER_FAILED = ProblemType("encoder-failed", 500, "The collection's encoder failed on this text")
RERANKER_FAILED = ProblemType("reranker-failed", 500, "The server's cross-encoder failed on this text")
OVERLOADED = ProblemType("overloaded", 503, "The server has as much to do as it accepts", retry_seconds=1)
NOT_READY = ProblemType("not-ready", 503, "The server is not ready", retry_seconds=5)
COLLECTION_BUILDING = ProblemType(
    "collection-building", 503, "The collection is being built", retry_seconds=30
)
COLLECTION_OPENING = ProblemType("collection-opening", 503, "The collection is being opened", retry_seconds=2)
COLLECTION_UNFINISHED = ProblemType(
    "collection-unfinished", 503, "Nothing of the collection is published yet, and no ingest is running"
)
COLLECTION_DAMAGED = ProblemType("collection-damaged", 503, "The collection's files are damaged")
PARTITIONS_MISSING = ProblemType("partitions-missing", 503, "Partitions of the collection are missing")
ENCODER_UNAVAILABLE = ProblemType("encoder-unavailable", 503, "The collection's encoder cannot be loaded")
ENCODER_MISMATCH = ProblemType(
    "encoder-mismatch", 503, "The collection was built by another encoder than is in its model's place"
)
ENDPOINT_DOWN = ProblemType(
    "endpoint-down", 503, "The endpoint that embeds queries does not answer", retry_seconds=5
)
STORAGE_FAILED = ProblemType("storage-failed", 503, "The storage refused a read", retry_seconds=5)
WRITES_REFUSED = ProblemType("writes-refused", 503, "The collection cannot be written", retry_seconds=5)
KEYS_UNREADABLE = ProblemType("keys-unreadable", 503, "The API keys cannot be read")
STOPPING = ProblemType("stopping", 503, "The server is stopping", retry_seconds=5)
DISK_FULL = ProblemType("disk-full", 507, "The server has no space left", retry_seconds=30)
DEADLINE = ProblemType("deadline", 504, "The answer was not ready in time", retry_seconds=1)

PROBLEM_TYPES: Final = {kind.name: kind for kind in list(globals().values()) if isinstance(kind, ProblemType)}


class ProblemError(Exception):
    """Ends a request with a problem; ``detail`` must hold nothing that came with the request."""

    def __init__(
        self,
        kind: ProblemType,
        detail: str,
        *,
        errors: Sequence[FieldProblem] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.errors = tuple(errors)
        self.headers = dict(headers or {})


def problem_response(problem: ProblemError, path: str = "") -> Response:
    """Return the response that tells of a problem; ``path`` is the request's."""
    kind = problem.kind
    body = Problem(
        type=TYPE_PREFIX + kind.name,
        title=kind.title,
        status=kind.status,
        detail=problem.detail,
        errors=list(problem.errors) or None,
        error=_openai_error(problem) if path.startswith(OPENAI_PATHS) else None,
    )
    headers = problem.headers
    if kind.retry_seconds is not None:
        headers = {"Retry-After": str(kind.retry_seconds), **headers}
    if kind.status == 401:
        headers = {"WWW-Authenticate": 'Bearer realm="cairn"', **headers}
    return Response(
        body.model_dump_json(exclude_none=True),
        status_code=kind.status,
        media_type=MEDIA_TYPE,
        headers=headers,
    )


def _openai_error(problem: ProblemError) -> OpenAIError:
    """Return the member that OpenAI's clients read, and show to their user."""
    told = [f"{field.pointer}: {field.detail}" for field in problem.errors]
    return OpenAIError(
        message="; ".join([problem.kind.title, *(told or [problem.detail])]),
        type="invalid_request_error" if problem.kind.status < 500 else "server_error",
        code=problem.kind.name,
        param=problem.errors[0].pointer.removeprefix("#/") if problem.errors else None,
    )


def contract(error: CairnError) -> str:
    """Return what an error says must hold, without the value that came with the request."""
    return str(error).partition(", got ")[0]


_OWN_SENTENCE: Final = ""
_OF_ERRORS: Final[Sequence[tuple[type[CairnError], ProblemType, str]]] = (
    (CollectionNotFoundError, UNKNOWN_COLLECTION, "see GET /v1/collections for those that can be searched"),
    (
        RestrictionError,
        RESTRICTION_UNUSABLE,
        (
            "the filter of its key, or its principals and --readers-column of the server, must fit the "
            "columns that this collection has and be no longer than a filter may"
        ),
    ),
    (FilterError, INVALID_FILTER, _OWN_SENTENCE),
    (ChangedDocumentError, DOCUMENT_CHANGED, _OWN_SENTENCE),
    (KeyReusedError, KEY_REUSED, _OWN_SENTENCE),
    (CollectionExistsError, COLLECTION_EXISTS, _OWN_SENTENCE),
    (WritesWaitingError, WRITES_WAITING, _OWN_SENTENCE),
    (CollectionBusyError, COLLECTION_BUSY, _OWN_SENTENCE),
    (DiskFullError, DISK_FULL, _OWN_SENTENCE),
    (
        FingerprintMismatchError,
        ENCODER_MISMATCH,
        "it was made by an encoder this server could not load; the server's log says more",
    ),
    (UsageError, INVALID_REQUEST, _OWN_SENTENCE),
    (PartitionsMissingError, PARTITIONS_MISSING, _OWN_SENTENCE),
    (
        IntegrityError,
        COLLECTION_DAMAGED,
        "what is stored is not what was written; its keeper has to verify and repair it",
    ),
    (EndpointDownError, ENDPOINT_DOWN, "its answer is waited for some seconds; try again"),
    (TryAgainError, DEADLINE, "the tables took too long; try again, or ask for less"),
    (StorageError, STORAGE_FAILED, "reading the collection failed; the server's log says more"),
)
"""The problem of each error, by the first class that fits; its own sentence where nothing else is said."""


def search_problem(error: CairnError) -> ProblemError:
    """Return the problem of an error that a call of an opened collection raised."""
    for kind, problem, detail in _OF_ERRORS:
        if isinstance(error, kind):
            return ProblemError(problem, detail or contract(error))
    return ProblemError(INTERNAL_ERROR, "the server's log says more")


def opening_problem(error: CairnError) -> ProblemError:
    """Return the problem of an error in opening, without its sentence, which speaks of this machine."""
    problem = search_problem(error)
    if problem.kind in (INVALID_REQUEST, INTERNAL_ERROR):
        detail = "its model is not where it was, or does not fit; the server's log says more"
        return ProblemError(ENCODER_UNAVAILABLE, detail)
    return problem


def invalid_request(*errors: FieldProblem) -> ProblemError:
    """Return the problem of parts of a request."""
    return ProblemError(
        INVALID_REQUEST, f"{len(errors)} part(s) of the request must be changed", errors=errors[:MAX_TOLD]
    )


def unknown_document() -> ProblemError:
    """Return the problem of a document that is not there, or not for this key."""
    return ProblemError(
        UNKNOWN_DOCUMENT, "ids are those of the source's rows, or of files, as results give them"
    )


def unknown_collection() -> ProblemError:
    """Return the problem of a collection that is not there, or not for this key: which, is not said."""
    return search_problem(CollectionNotFoundError(""))


def schema_problem(errors: Sequence[Mapping[str, Any]], known_fields: frozenset[str]) -> ProblemError:
    """Return the problem of a misfit request; places are JSON pointers of known names and positions."""
    found: dict[str, dict[str, None]] = {}
    for error in errors:
        for field in _invalid_fields(error, known_fields):
            found.setdefault(field.pointer, {})[field.detail] = None
    above = {pointer[: slash.start()] for pointer in found for slash in re.finditer("/", pointer)}
    told = [
        FieldProblem(pointer=pointer, detail=_joined(details))
        for pointer, details in found.items()
        if pointer not in above or _of_type_sent(details)
    ]
    return invalid_request(*told)


def _of_type_sent(details: Iterable[str]) -> list[str]:
    """Of a field of several types keep the errors of the type that was sent."""
    return [detail for detail in details if not detail.startswith(_OTHER_TYPE)]


def _joined(details: Iterable[str]) -> str:
    first, *others = _of_type_sent(details) or details
    return " or ".join(
        [first, *(detail.removeprefix("Input should be ") for detail in others[: MAX_TOLD - 1])]
    )


_OTHER_TYPE: Final = "Input should be a valid "


def unknown_names(place: str, names: Iterable[str], advice: str) -> list[FieldProblem]:
    """Return one error for each unknown name; names that may hold a secret are not repeated."""
    return [
        FieldProblem(pointer=f"{place}/{name}", detail=f"there is no such name; {advice}")
        if _NAME.fullmatch(name)
        else FieldProblem(
            pointer=place, detail=f"a name here, which is not an identifier, is not known; {advice}"
        )
        for name in names
    ]


def _invalid_fields(error: Mapping[str, Any], known_fields: frozenset[str]) -> list[FieldProblem]:
    place, *steps = error["loc"] or ("body",)
    known = [str(step) for step in steps if isinstance(step, int) or step in known_fields]
    if error["type"] == UNKNOWN_FIELD:
        sent = error["ctx"]
        return unknown_names(
            _pointer(place, known), sent["names"], f"this object takes {', '.join(sent['fields'])}"
        )
    own = _OWN_WORDS.get(error["type"])
    if own is None:
        detail = str(error["msg"]).replace("Dictionary", "Object")  # JSON's word
    else:
        detail = own.format_map(error.get("ctx", {}))
    return [FieldProblem(pointer=_pointer(place, known), detail=detail)]


_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")
_OWN_WORDS: Final = {
    "model_attributes_type": "Input should be an object",
    "dict_type": "Input should be an object",
    "union_tag_invalid": "Input should have a type that is one of {expected_tags}",
    "union_tag_not_found": "Input should have a field `type`",
}
"""For errors whose own words repeat what was sent, or speak of something else than JSON.

In braces what an error knows of the schema.
"""


def _pointer(place: Any, steps: Sequence[str]) -> str:
    prefix = "#" if place == "body" else f"{place}"
    return "/".join([prefix, *steps])
