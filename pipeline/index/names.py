"""TODO."""

from __future__ import annotations

from pathlib import PurePath
from typing import Final

from cairn.pipeline.manifest import MANIFEST_NAME
from cairn.pipeline.token_vectors.projection import LATE_NAME

COPIES: Final = "copies"
"""The folder of the second copies, in a generation's own."""
CONTEXT_ARROW: Final = "context.arrow"
CLUSTERS_ARROW: Final = "clusters.arrow"
LANCE_FILES: Final = "lance_files.json"
SIDE_FILES: Final = (CONTEXT_ARROW, CLUSTERS_ARROW, LATE_NAME)
"""What a generation carries unchanged from the stages before; a collection may have none of them."""
COPIED_FILES: Final = (LANCE_FILES, *SIDE_FILES)
SMALL_FOLDERS: Final = frozenset({"_versions", "_deletions"})
"""Of a table: all that a version consists of, but for its rows and indexes."""


def copied_name(path: str) -> str | None:
    """Return the name below ``copies/`` of a file by its path in the collection, None without a copy."""
    top, *rest = PurePath(path).parts
    if top == "lance":
        return "/".join(rest) if rest[1] in SMALL_FOLDERS else None
    return rest[-1] if rest[-1] in (MANIFEST_NAME, *COPIED_FILES) else None
