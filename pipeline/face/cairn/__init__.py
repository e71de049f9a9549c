"""Cairn: contextual retrieval indexing. ``import cairn`` gives the public names.

Everything of Cairn is imported below this package: ``cairn.pipeline`` is the library, ``cairn.jobs`` what
needs Ray or a clock, ``cairn.cli`` the commands. A wheel has the three folders in this one. A checkout has
them at its top, and the path of this package names that folder, so that no other name of ours is importable.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not (Path(__file__).parent / "pipeline").is_dir():
    __path__ = [*__path__, str(Path(__file__).resolve().parents[3])]

if TYPE_CHECKING:
    from cairn.pipeline.client.clients import AsyncCairnClient, CairnClient
    from cairn.pipeline.collection import Collection, open_collection
    from cairn.pipeline.encode.text_encoder import TextEncoder, load_encoder
    from cairn.pipeline.errors import CairnError
    from cairn.pipeline.faiss_device import use_index_device
    from cairn.pipeline.index.maintenance import DeleteReport
    from cairn.pipeline.types import Document, Hit, IngestReport, Passage, SearchResult
    from cairn.pipeline.version import installed_version

    __version__ = installed_version()

__all__ = [
    "AsyncCairnClient",
    "CairnClient",
    "CairnError",
    "Collection",
    "DeleteReport",
    "Document",
    "Hit",
    "IngestReport",
    "Passage",
    "SearchResult",
    "TextEncoder",
    "__version__",
    "load_encoder",
    "open_collection",
    "use_index_device",
]

_HOMES = {
    "AsyncCairnClient": "cairn.pipeline.client.clients",
    "CairnClient": "cairn.pipeline.client.clients",
    "CairnError": "cairn.pipeline.errors",
    "Collection": "cairn.pipeline.collection",
    "DeleteReport": "cairn.pipeline.index.maintenance",
    "Document": "cairn.pipeline.types",
    "Hit": "cairn.pipeline.types",
    "IngestReport": "cairn.pipeline.types",
    "Passage": "cairn.pipeline.types",
    "SearchResult": "cairn.pipeline.types",
    "TextEncoder": "cairn.pipeline.encode.text_encoder",
    "load_encoder": "cairn.pipeline.encode.text_encoder",
    "open_collection": "cairn.pipeline.collection",
    "use_index_device": "cairn.pipeline.faiss_device",
}


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from cairn.pipeline.version import installed_version

        return installed_version()
    if name in _HOMES:  # looked up when asked for, so that importing Cairn loads no model library
        try:
            return getattr(import_module(_HOMES[name]), name)
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("cairn."):
                raise
            raise ImportError(
                f"cairn.{name} must have all of Cairn, got the client alone; install cairn-index in its place"
            ) from None
    raise AttributeError(f"module 'cairn' has no attribute {name!r}")
