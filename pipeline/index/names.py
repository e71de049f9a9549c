"""Names of the files of a generation, and which of them are small and stored twice.

``stored_files`` tells what second copies are for, and who reads and mends them.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Final

from cairn.pipeline.manifest import MANIFEST_NAME
from cairn.pipeline.token_vectors.projection import LATE_NAME

DOCUMENTS_FAISS: Final = "documents.faiss"
CHUNKS_FAISS: Final = "chunks.faiss"
DOCUMENTS_ARROW: Final = "documents.arrow"
CHUNKS_ARROW: Final = "chunks.arrow"
PASSAGES_ARROW: Final = "passages.arrow"
TITLES_ARROW: Final = "titles.arrow"
LENGTHS_ARROW: Final = "lengths.arrow"
DELETED_BITS: Final = "deleted.bits"
TOKENS_ARROW: Final = "tokens.arrow"

CONTEXT_ARROW: Final = "context.arrow"
CLUSTERS_ARROW: Final = "clusters.arrow"
LANCE_FILES: Final = "lance_files.json"
SIDE_FILES: Final = (CONTEXT_ARROW, CLUSTERS_ARROW, LATE_NAME)
"""What a generation carries unchanged from the stages before; a collection may have none of them."""

COPIES: Final = "copies"
"""The folder of the second copies, in a generation's own."""
SMALL_FOLDERS: Final = frozenset({"_versions", "_deletions"})
"""Of a table: all that a version consists of, but for its rows."""


def is_copied(name: str) -> bool:
    """Tell whether a file of a generation has a second copy."""
    return name in (MANIFEST_NAME, LANCE_FILES, *SIDE_FILES) or name.endswith(DELETED_BITS)


def copied_name(path: str) -> str | None:
    """Return the name below ``copies/`` of a file by its path in the collection, None without a copy."""
    top, *rest = PurePath(path).parts
    if top == "lance":
        return "/".join(rest) if rest[1] in SMALL_FOLDERS else None
    return rest[-1] if is_copied(rest[-1]) else None
