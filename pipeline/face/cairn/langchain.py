"""Cairn in LangChain: a retriever, a vector store and the embeddings of a collection's model."""

from cairn.pipeline.frameworks.langchain import CairnEmbeddings, CairnRetriever, CairnVectorStore

__all__ = ["CairnEmbeddings", "CairnRetriever", "CairnVectorStore"]
