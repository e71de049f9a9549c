"""The version that is installed: of all of Cairn, or of the client alone."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed_version() -> str:
    """Return Cairn's version."""
    try:
        return version("cairn-index")
    except PackageNotFoundError:
        return version("cairn-index-client")
