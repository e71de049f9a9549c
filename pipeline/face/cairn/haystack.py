"""Cairn in Haystack: a retriever."""

from cairn.pipeline.frameworks.haystack_retriever import CairnRetriever

__all__ = ["CairnRetriever"]
