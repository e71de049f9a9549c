"""The name that Cairn is installed and imported by: ``import cairn`` gives the public names.

It lies in a folder of its own, which the wheel and an editable install put beside ``pipeline`` and ``jobs``
(``[tool.hatch.build]`` in pyproject.toml). These two are loaded from there, and not by the search path: a
``pipeline.py`` or ``jobs`` in the working folder is not taken for them.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jobs.collection import Collection, open_collection
    from pipeline.client import AsyncCairnClient, CairnClient
    from pipeline.encode.text_encoder import TextEncoder, load_encoder
    from pipeline.errors import CairnError
    from pipeline.index.maintenance import DeleteReport
    from pipeline.types import Document, Hit, IngestReport, Passage, SearchResult
    from pipeline.version import installed_version

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
]

_HOMES = {
    "AsyncCairnClient": "pipeline.client",
    "CairnClient": "pipeline.client",
    "CairnError": "pipeline.errors",
    "Collection": "jobs.collection",
    "DeleteReport": "pipeline.index.maintenance",
    "Document": "pipeline.types",
    "Hit": "pipeline.types",
    "IngestReport": "pipeline.types",
    "Passage": "pipeline.types",
    "SearchResult": "pipeline.types",
    "TextEncoder": "pipeline.encode.text_encoder",
    "load_encoder": "pipeline.encode.text_encoder",
    "open_collection": "jobs.collection",
}


def _load_own_packages() -> None:
    """Load ``pipeline`` and ``jobs`` from beside this package; another module of that name is an error."""
    beside = Path(__file__).resolve().parents[1]
    home = beside if (beside / "pipeline").is_dir() else beside.parents[1]
    for name in ("pipeline", "jobs"):
        loaded = sys.modules.get(name)
        if loaded is None:
            spec = PathFinder.find_spec(name, [str(home)])
            if spec is None and name == "jobs":  # the client alone is installed
                return
            assert spec is not None, f"{name} is installed with cairn"
            assert spec.loader is not None, f"{name} is a package"
            loaded = sys.modules[name] = module_from_spec(spec)
            spec.loader.exec_module(loaded)
        elif loaded.__file__ is None or home not in Path(loaded.__file__).resolve().parents:
            found = loaded.__file__ or next(iter(loaded.__path__))
            raise ImportError(
                f"cairn must find its own package {name}, got {found}; import cairn first, or rename that "
                "module"
            )


_load_own_packages()


def __dir__() -> list[str]:
    return [*globals(), *__all__]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from pipeline.version import installed_version

        return installed_version()
    if name in _HOMES:  # looked up when asked for, so that importing Cairn loads no model library
        try:
            return getattr(import_module(_HOMES[name]), name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in ("pipeline", "jobs"):
                raise
            raise ImportError(
                f"cairn.{name} must have all of Cairn, got cairn-client alone; install cairn-retrieval in "
                "its place"
            ) from None
    raise AttributeError(f"module 'cairn' has no attribute {name!r}")
