"""Cairn in LangChain: a retriever, a vector store and the embeddings of a collection's model."""

from cairn.pipeline.frameworks.langchain_embeddings import CairnEmbeddings
from cairn.pipeline.frameworks.langchain_retriever import CairnRetriever
from cairn.pipeline.frameworks.langchain_store import CairnVectorStore

__all__ = ["CairnEmbeddings", "CairnRetriever", "CairnVectorStore"]
