"""The errors that a call to the search API raises.

    CairnError
    ├── ApiError                     the server answered with a problem: status, type, title, detail, errors
    │   ├── InvalidRequestError          400, 405, 408, 413, 415, 421, 422: change the request (a UsageError)
    │   ├── AccessError                  401, 403: the key is missing, unknown, or may not do this
    │   ├── NotFoundError                404: no such collection, or none for this key
    │   ├── ConflictError                409, 412: what is there is not what the request goes with
    │   ├── CursorExpiredError           410: the collection has changed since the first page
    │   ├── UnavailableError             429, 502, 503, 504, 507: not now (a TryAgainError)
    │   └── ServerFailedError            anything else
    ├── UsageError (ValueError)      an argument that cannot be sent, such as a query that is not a string
    │   └── ConfigError                  an address, key or timeout that no client can use
    └── ServerUnreachableError       no connection, or no answer in time (a TryAgainError)

``type`` is the server's stable name of the problem, such as ``urn:problem-type:cairn:unknown-collection``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Self, cast

from cairn.pipeline.errors import CairnError, TryAgainError, UsageError

BLANK_TYPE: Final = "about:blank"
"""The type of a problem without a name (RFC 9457 §4.2.1): who answered stands between here and the server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FieldProblem:
    """A part of the request that must be changed.

    ``pointer`` is a JSON pointer into the body, or ``query/name`` or ``path/name``.
    """

    pointer: str
    detail: str


class ApiError(CairnError):
    """The server answered with a problem (RFC 9457).

    ``retry_after_seconds`` is what the server asks to wait, None where it does not say.
    """

    def __init__(self, status: int, problem: Any = None, retry_after_seconds: float | None = None) -> None:
        """Take the JSON body of a response, which may be anything."""
        told = cast("dict[str, Any]", problem) if isinstance(problem, dict) else {}
        fields = told.get("errors") if isinstance(told.get("errors"), list) else []
        self.status = status
        self.type = str(told.get("type", BLANK_TYPE))
        self.title = str(told.get("title", f"the server answered with status {status}"))
        self.detail = str(told.get("detail", ""))
        self.errors = tuple(
            FieldProblem(pointer=str(each.get("pointer", "")), detail=str(each.get("detail", "")))
            for each in cast("list[Any]", fields)
            if isinstance(each, dict)
        )
        self.retry_after_seconds = retry_after_seconds
        self._answered = status, problem, retry_after_seconds
        what = f"{self.title}: {self.detail}" if self.detail else self.title
        super().__init__("; ".join([what, *(f"{each.pointer} {each.detail}" for each in self.errors)]))

    def __reduce__(self) -> tuple[type[Self], tuple[Any, ...]]:
        """Copy what was answered: another process may raise it again."""
        return type(self), self._answered


class InvalidRequestError(ApiError, UsageError):
    """The request does not follow the schema or does not fit the collection."""


class AccessError(ApiError):
    """The key is missing, unknown or revoked, or may not do this."""


class NotFoundError(ApiError):
    """No such collection, or none that this key may ask."""


class ConflictError(ApiError):
    """A collection or a document is not as the request needs it, or another process writes it."""


class CursorExpiredError(ApiError):
    """The collection has changed since the cursor was given out: begin with the first page again."""


class UnavailableError(ApiError, TryAgainError):
    """The server cannot answer now: it is busy, starting, or the collection is being built or damaged."""


class ServerFailedError(ApiError):
    """The server failed, or what answered is no search API of Cairn's."""


class ServerUnreachableError(TryAgainError):
    """No answer came."""


_BY_STATUS: Final[Mapping[int, type[ApiError]]] = {
    **dict.fromkeys((400, 405, 408, 413, 415, 421, 422), InvalidRequestError),
    **dict.fromkeys((401, 403), AccessError),
    404: NotFoundError,
    **dict.fromkeys((409, 412), ConflictError),
    410: CursorExpiredError,
    **dict.fromkeys((429, 502, 503, 504, 507), UnavailableError),
}


def api_error(status: int, problem: Any, retry_after_seconds: float | None = None) -> ApiError:
    """Return the error of a response by its status; ``problem`` is its JSON body, None where it is none."""
    return _BY_STATUS.get(status, ServerFailedError)(status, problem, retry_after_seconds)
