"""Decide whether to retry a call, and how long to wait: Retry-After, or exponential backoff with jitter.

Every call only reads, so it can be sent twice. Failed or broken connections and the statuses 429, 502, 503
and 504 are retried. A problem of Cairn's own without a Retry-After is not, since a damaged collection stays
damaged. Timeouts are not retried.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final

from cairn.pipeline.client.errors import (
    BLANK_TYPE,
    ApiError,
    ServerUnreachableError,
    UnavailableError,
    api_error,
)
from cairn.pipeline.errors import ConfigError

FIRST_SECONDS: Final = 0.25
LONGEST_SECONDS: Final = 30.0
"""Beyond which waiting is the caller's business: the error is raised at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How often a call is tried again."""

    max_retries: int = 3

    def __post_init__(self) -> None:
        if type(self.max_retries) is not int or not 0 <= self.max_retries <= 100:
            raise ConfigError(
                f"max_retries must be a whole number from 0 to 100, got {str(self.max_retries)[:80]}"
            )


class Attempts:
    """The attempts of one call.

    Asked after each that failed, it says how long to wait, or raises what the caller has to know.
    """

    def __init__(self, policy: RetryPolicy) -> None:
        self._left = policy.max_retries
        self._seconds = FIRST_SECONDS

    def after_break(self, base_url: str, error: Exception, *, is_slow: bool) -> float:
        """Return the seconds to wait after an attempt without an answer."""
        if self._left == 0 or is_slow:
            why = "no answer came in time" if is_slow else str(error) or type(error).__name__
            raise ServerUnreachableError(
                f"the server at {base_url} must answer, got: {why}; is `cairn serve` running?"
            ) from error
        return self._next(None)

    def after_response(self, status: int, problem: Any, headers: Mapping[str, str]) -> float:
        """Return the seconds to wait after an answer that is a problem."""
        error = api_error(status, problem)
        wait = retry_after_seconds(headers.get("retry-after"))
        if self._left == 0 or not _may_pass(error, wait) or (wait or 0.0) > LONGEST_SECONDS:
            raise error
        return self._next(wait)

    def _next(self, wait: float | None) -> float:
        self._left -= 1
        longest, self._seconds = self._seconds, min(2 * self._seconds, LONGEST_SECONDS)
        chance = random.uniform(0.5, 1.0)  # noqa: S311 - so that clients turned away together do not come back together
        return longest * chance if wait is None else wait + FIRST_SECONDS * chance


def _may_pass(error: ApiError, wait: float | None) -> bool:
    return isinstance(error, UnavailableError) and (wait is not None or error.type == BLANK_TYPE)


def retry_after_seconds(header: str | None) -> float | None:
    """Read Retry-After, seconds or a date; None where there is none that can be read."""
    if header is None:
        return None
    if header.strip().isdecimal():
        return float(header)
    try:
        return max(0.0, (parsedate_to_datetime(header) - dt.datetime.now(dt.UTC)).total_seconds())
    except (TypeError, ValueError):
        return None
