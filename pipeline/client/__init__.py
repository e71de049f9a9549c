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
    from cairn.pipeline.client.clients import AsyncCairnClient as AsyncCairnClient
    from cairn.pipeline.client.clients import AsyncRemoteCollection as AsyncRemoteCollection
    from cairn.pipeline.client.clients import CairnClient as CairnClient
    from cairn.pipeline.client.clients import RemoteCollection as RemoteCollection


def __getattr__(name: str) -> Any:
    # httpx2 is an extra: the errors and records are there without it.
    if name in ("AsyncCairnClient", "AsyncRemoteCollection", "CairnClient", "RemoteCollection"):
        return getattr(import_module("cairn.pipeline.client.clients"), name)
    raise AttributeError(f"module 'cairn.pipeline.client' has no attribute {name!r}")
