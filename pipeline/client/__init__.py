"""A client of the search API, with the methods of a collection in Python that HTTP has too.

    CairnClient ──▶ collection("handbook") ──▶ search, search_pages, read_document, encode_queries
      retries, timeouts, key                   the records that Python's own search returns

``AsyncCairnClient`` is the same with ``await``. Nothing here loads a model or opens a collection. Public
names: :class:`CairnClient`, :class:`AsyncCairnClient`, and the errors of :mod:`cairn.pipeline.client.errors`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cairn.pipeline.client.async_client import AsyncCairnClient, AsyncRemoteCollection
    from cairn.pipeline.client.sync_client import CairnClient, RemoteCollection

__all__ = ["AsyncCairnClient", "AsyncRemoteCollection", "CairnClient", "RemoteCollection"]

_HOMES = {
    "AsyncCairnClient": "cairn.pipeline.client.async_client",
    "AsyncRemoteCollection": "cairn.pipeline.client.async_client",
    "CairnClient": "cairn.pipeline.client.sync_client",
    "RemoteCollection": "cairn.pipeline.client.sync_client",
}


def __getattr__(name: str) -> Any:
    # httpx2 is an extra: the errors and records are there without it.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'cairn.pipeline.client' has no attribute {name!r}")
