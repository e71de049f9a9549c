"""FAISS, or one sentence where neither of its packages is installed.

They are extras, because both install the same module, and pip cannot leave one out for the other: see
``docs/design/decisions/faiss-extra.md``. Import ``faiss`` from here.
"""

from __future__ import annotations

from cairn.pipeline.errors import extra_missing

try:
    import faiss
except ModuleNotFoundError as error:
    raise extra_missing(
        error, what="an index", module="faiss", package="faiss-cpu or faiss-gpu", extra="cpu"
    ) from None

__all__ = ["faiss"]
