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
from enum import Enum
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
from typing_extensions import override

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


class Kind(Enum):
    """The kinds of problems, each of which makes the error that ends a request with it.

    They have a status, a title and a Retry-After in seconds, None where trying again does not help.
    """

    def __init__(self, status: int, title: str, retry_seconds: int | None = None) -> None:
        self.status, self.title, self.retry_seconds = status, title, retry_seconds
        self.code = self.name.lower().replace("_", "-")

    def __call__(
        self,
        detail: str | None = None,
        *,
        errors: Sequence[FieldProblem] = (),
        headers: Mapping[str, str] | None = None,
    ) -> ProblemError:
        """Return a problem of this kind; ``detail`` must hold nothing that came with the request."""
        told = _ADVICE.get(self, "the server's log says more") if detail is None else detail
        return ProblemError(self, told, tuple(errors), headers or {})

    INVALID_JSON = 400, "The body is not JSON as RFC 8259 has it"
    INVALID_FORM = 400, "The body is not a form with a file"
    BODY_AMBIGUOUS = 400, "The length of the body is given in two ways"
    BODY_UNEXPECTED = 400, "This method takes no body"
    KEY_MISSING = 401, "An API key is required"
    KEY_UNKNOWN = 401, "The API key is not known"
    PRINCIPAL_MISSING = 403, "The request does not say for whom it asks, or may not"
    SCOPE_MISSING = 403, "The request may not ask for this"
    RESTRICTION_UNUSABLE = 403, "What the request may read does not fit this collection"
    READ_ONLY = 403, "This server takes no writes"
    SOURCE_REFUSED = 403, "The server may not read this source"
    ORIGIN_REFUSED = 403, "Pages of other sites may not call this server"
    NOT_FOUND = 404, "There is nothing at this address"
    UNKNOWN_COLLECTION = 404, "There is no such collection"
    UNKNOWN_DOCUMENT = 404, "The collection has no such document"
    UNKNOWN_FILE = 404, "There is no such file"
    UNKNOWN_WRITE = 404, "The server knows no such write"
    METHOD_REFUSED = 405, "This address does not take this method"
    BODY_SLOW = 408, "The body did not arrive in time"
    COLLECTION_EMPTY = 409, "The collection has no documents yet"
    COLLECTION_EXISTS = 409, "There is such a collection"
    COLLECTION_SWITCHED = 409, "A name answers from another collection"
    COLLECTION_BUSY = 409, "The collection is being written", 5
    CURSOR_EXPIRED = 410, "The collection has changed since the cursor was given out"
    DOCUMENT_CHANGED = 412, "The document is not as the request says it must be"
    BODY_TOO_LARGE = 413, "The body is too large"
    MEDIA_TYPE_REFUSED = 415, "The body is not of the media type that is read here"
    HOST_REFUSED = 421, "This server does not answer for this host"
    INVALID_REQUEST = 422, "The request does not follow the schema"
    INVALID_FILTER = 422, "The filter does not fit this collection"
    KEY_REUSED = 422, "The idempotency key came with another request before"
    WRITE_FAILED = 422, "The write was kept, and cannot be published"
    INVALID_CURSOR = 422, "The cursor does not belong to this request"
    WRITES_WAITING = 429, "As many writes wait to be published as are kept", 2
    INTERNAL_ERROR = 500, "The server failed"
    ENCODER_FAILED = 500, "The collection's encoder failed on this text"
    RERANKER_FAILED = 500, "The server's cross-encoder failed on this text"
    OVERLOADED = 503, "The server has as much to do as it accepts", 1
    NOT_READY = 503, "The server is not ready", 5
    COLLECTION_BUILDING = 503, "The collection is being built", 30
    COLLECTION_OPENING = 503, "The collection is being opened", 2
    COLLECTION_UNFINISHED = 503, "Nothing of the collection is published yet, and no ingest is running"
    COLLECTION_DAMAGED = 503, "The collection's files are damaged"
    PARTITIONS_MISSING = 503, "Partitions of the collection are missing"
    ENCODER_UNAVAILABLE = 503, "The collection's encoder cannot be loaded"
    ENCODER_MISMATCH = 503, "The collection was built by another encoder than is in its model's place"
    ENDPOINT_DOWN = 503, "The endpoint that embeds queries does not answer", 5
    STORAGE_FAILED = 503, "The storage refused a read", 5
    WRITES_REFUSED = 503, "The collection cannot be written", 5
    KEYS_UNREADABLE = 503, "The API keys cannot be read"
    STOPPING = 503, "The server is stopping", 5
    DISK_FULL = 507, "The server has no space left", 30
    DEADLINE = 504, "The answer was not ready in time", 1


@dataclass(eq=False)
class ProblemError(Exception):
    """Ends a request with a problem, which a :class:`Kind` makes."""

    kind: Kind
    detail: str
    errors: Sequence[FieldProblem]
    headers: Mapping[str, str]

    @override
    def __str__(self) -> str:
        return self.detail


def problem_response(problem: ProblemError, path: str = "") -> Response:
    """Return the response that tells of a problem; ``path`` is the request's."""
    kind = problem.kind
    body = Problem(
        type=TYPE_PREFIX + kind.code,
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
        code=problem.kind.code,
        param=problem.errors[0].pointer.removeprefix("#/") if problem.errors else None,
    )


def contract(error: CairnError) -> str:
    """Return what an error says must hold, without the value that came with the request."""
    return str(error).partition(", got ")[0]


_ADVICE: Final = {
    Kind.RESTRICTION_UNUSABLE: "the filter of its key, or its principals and --readers-column of the server, "
    "must fit the columns that this collection has and be no longer than a filter may",
    Kind.UNKNOWN_COLLECTION: "see GET /v1/collections for those that can be searched",
    Kind.UNKNOWN_DOCUMENT: "ids are those of the source's rows, or of files, as results give them",
    Kind.UNKNOWN_FILE: "ids are those that POST /v1/files gives",
    Kind.COLLECTION_DAMAGED: "what is stored is not what was written; its keeper has to verify and repair it",
    Kind.ENCODER_MISMATCH: "it was made by an encoder this server could not load; the server's log says more",
    Kind.ENCODER_UNAVAILABLE: "its model is not where it was, or does not fit; the server's log says more",
    Kind.ENDPOINT_DOWN: "its answer is waited for some seconds; try again",
    Kind.STORAGE_FAILED: "reading the collection failed; the server's log says more",
    Kind.STOPPING: "try again with the server that takes its place",
    Kind.DEADLINE: "the tables took too long; try again, or ask for less",
}
"""What a problem of a kind says where it is raised without more."""

_OF_ERRORS: Final[Mapping[type[CairnError], Kind]] = {
    CollectionNotFoundError: Kind.UNKNOWN_COLLECTION,
    RestrictionError: Kind.RESTRICTION_UNUSABLE,
    FilterError: Kind.INVALID_FILTER,
    ChangedDocumentError: Kind.DOCUMENT_CHANGED,
    KeyReusedError: Kind.KEY_REUSED,
    CollectionExistsError: Kind.COLLECTION_EXISTS,
    WritesWaitingError: Kind.WRITES_WAITING,
    CollectionBusyError: Kind.COLLECTION_BUSY,
    DiskFullError: Kind.DISK_FULL,
    FingerprintMismatchError: Kind.ENCODER_MISMATCH,
    UsageError: Kind.INVALID_REQUEST,
    PartitionsMissingError: Kind.PARTITIONS_MISSING,
    IntegrityError: Kind.COLLECTION_DAMAGED,
    EndpointDownError: Kind.ENDPOINT_DOWN,
    TryAgainError: Kind.DEADLINE,
    StorageError: Kind.STORAGE_FAILED,
    CairnError: Kind.INTERNAL_ERROR,
}
"""The kind of problem of each error, by the first class that fits."""


def search_problem(error: CairnError) -> ProblemError:
    """Return the problem of an error that a call of an opened collection raised."""
    kind = next(kind for of, kind in _OF_ERRORS.items() if isinstance(error, of))
    says_own = kind not in _ADVICE and kind is not Kind.INTERNAL_ERROR
    return kind(contract(error)) if says_own else kind()


def opening_problem(error: CairnError) -> ProblemError:
    """Return the problem of an error in opening, without its sentence, which speaks of this machine."""
    problem = search_problem(error)
    is_model = problem.kind in (Kind.INVALID_REQUEST, Kind.INTERNAL_ERROR)
    return Kind.ENCODER_UNAVAILABLE() if is_model else problem


def invalid_request(*errors: FieldProblem) -> ProblemError:
    """Return the problem of parts of a request."""
    return Kind.INVALID_REQUEST(
        f"{len(errors)} part(s) of the request must be changed", errors=errors[:MAX_TOLD]
    )


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
