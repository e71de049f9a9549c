"""Cairn in Haystack: a retriever and a document store."""

from cairn.pipeline.frameworks.haystack import CairnDocumentStore, CairnRetriever

__all__ = ["CairnDocumentStore", "CairnRetriever"]
