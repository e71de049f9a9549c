"""The terms of texts, one by one, as the oracles of BM25 count them."""

from __future__ import annotations

from cairn.pipeline.lexical.tokenizer import pieces_of, runs_of, term_of


def terms_of(text: str, language: str = "en") -> list[str]:
    """Return the terms of a text, in order, repeats kept."""
    found = (term_of(piece, language) for run in runs_of(text) for piece in pieces_of(run))
    return [term for term in found if term]
