"""Cairn in LlamaIndex: a retriever."""

from cairn.pipeline.frameworks.llama_retriever import CairnRetriever

__all__ = ["CairnRetriever"]
