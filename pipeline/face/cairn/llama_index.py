"""Cairn in LlamaIndex: a retriever and a vector store."""

from cairn.pipeline.frameworks.llama_index import CairnRetriever, CairnVectorStore, LeaveUnembedded

__all__ = ["CairnRetriever", "CairnVectorStore", "LeaveUnembedded"]
