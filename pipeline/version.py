"""The version that is installed: of all of Cairn, or of the client alone."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache  # the package's metadata take milliseconds to read, and every write asks for them
def installed_version() -> str:
    """Return Cairn's version."""
    try:
        return version("cairn-index")
    except PackageNotFoundError:
        return version("cairn-index-client")
