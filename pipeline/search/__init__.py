"""Stage 6: a query becomes a ranked list of documents with their best passages, all from one generation.

    query ─▶ encoder ─▶ documents index ─┐
                   └──▶ chunks index ────┤
    query ─▶ BM25 of documents ──────────┼─▶ candidates ─▶ exact scores ─▶ fusion ─▶ windows ─▶ passages
          └▶ BM25 of passages ───────────┘
    filter ─▶ allowed positions ─▶ all four

Public names: :class:`Searcher`, :class:`SearchOptions`, :func:`compile_filter`, :func:`parse_filter`.
"""

from cairn.pipeline.search.filters import compile_filter, parse_filter
from cairn.pipeline.search.searcher import Searcher
from cairn.pipeline.search_options import SearchOptions

__all__ = ["SearchOptions", "Searcher", "compile_filter", "parse_filter"]
