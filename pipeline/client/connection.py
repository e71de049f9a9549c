"""How a client reaches the server: address, key, timeout.

The part of httpx2's settings that both clients set alike.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Any, Final

from cairn.pipeline.errors import ConfigError, UsageError, extra_missing
from cairn.pipeline.version import installed_version

try:
    import httpx2
except ModuleNotFoundError as error:
    raise extra_missing(error, what="the client", module="httpx2", package="httpx2", extra="client") from None

DEFAULT_URL: Final = "http://127.0.0.1:8400"
DEFAULT_TIMEOUT_SECONDS: Final = 30.0
_MAX_PORT: Final = 65_535
KEY_VARIABLE: Final = "CAIRN_API_KEY"


@dataclass(frozen=True, kw_only=True, slots=True)
class Connection:
    """A server's address, and what is sent with every request; the key is never shown."""

    base_url: str = field(repr=False)
    timeout_seconds: float
    api_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_address(self.base_url)
        if not is_number(self.timeout_seconds) or not 0.0 < self.timeout_seconds <= 3_600.0:
            raise ConfigError(
                "timeout_seconds must be a number above 0 and at most 3,600, got "
                f"{str(self.timeout_seconds)[:80]}"
            )
        if self.api_key is not None and not isinstance(self.api_key, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"api_key must be a text, got a value of type {type(self.api_key).__name__}")
        if self.api_key is not None and not (
            self.api_key.isascii() and self.api_key.isprintable() and self.api_key.strip()
        ):
            raise ConfigError(
                "api_key must be one line of printable ASCII, got something else; `cairn keys create` "
                "shows one"
            )

    @property
    def shown_url(self) -> str:
        """The address without a name and password that it may hold."""
        return re.sub(r"//[^/]*@", "//", self.base_url)

    def settings(self) -> dict[str, Any]:
        """Return what httpx2's clients are made with.

        Redirects are not followed, so the key goes nowhere else.
        """
        headers = {"Accept": "application/json", "User-Agent": f"cairn/{installed_version()}"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key.strip()}"
        return {
            "base_url": self.base_url.rstrip("/").removesuffix("/v1"),  # as OpenAI's clients have it
            "headers": headers,
            "timeout": httpx2.Timeout(self.timeout_seconds),
            "follow_redirects": False,
        }


def connection_to(base_url: str, api_key: str | None, timeout_seconds: float) -> Connection:
    """Return a connection; without a key ``CAIRN_API_KEY`` is taken, where it is set."""
    return Connection(
        base_url=base_url,
        timeout_seconds=timeout_seconds,
        api_key=api_key or os.environ.get(KEY_VARIABLE) or None,
    )


def require_open(client: httpx2.Client | httpx2.AsyncClient) -> None:
    """Refuse a client that was closed; httpx2 itself raises a RuntimeError."""
    if client.is_closed:
        raise UsageError("the client is closed; make a new one")


def is_number(value: Any) -> bool:
    """Tell whether a value is a whole or a broken number, whatever its caller's types say."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_address(url: Any) -> None:
    if not isinstance(url, str) or not url.startswith(("http://", "https://")):
        raise ConfigError(f"base_url must begin with http:// or https://, got {str(url)[:80]!r}")
    try:
        found = httpx2.URL(url)
        found.host.encode("idna")  # as the resolver will
    except (httpx2.InvalidURL, UnicodeError) as error:
        raise ConfigError(f"base_url must be an address, got {url[:80]!r}: {error}") from None
    if not found.host or "%" in found.host or (found.port or 0) > _MAX_PORT:
        raise ConfigError(f"base_url must name a host, and a port up to {_MAX_PORT:,}, got {url[:80]!r}")


def json_of(response: httpx2.Response) -> Any:
    """Return a response's JSON, None where it is none."""
    try:
        return response.json()
    except (ValueError, RecursionError):
        return None


def is_slow(error: httpx2.RequestError) -> bool:
    """Tell whether a request was sent and its answer did not come in time."""
    return isinstance(error, httpx2.ReadTimeout | httpx2.WriteTimeout)
