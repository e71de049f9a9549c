"""Vectors searched by inner product, in FAISS files.

    stream of vectors ─▶ faiss_build ─▶ one FAISS file, or two ─▶ faiss_index ─▶ scores, positions

Knows no collection: ``pipeline/index/segments`` says which files there are, and checks them.
"""

from typing import Final

REFINE_SUFFIX: Final = ".refine"
"""Beside ``x.faiss``, ``x.faiss.refine`` holds the 8-bit codes that re-score RaBitQ's candidates."""
