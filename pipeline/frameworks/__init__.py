"""Adapters for other frameworks: a collection as their retriever, on this machine or behind the search API.

    open_collection("handbook")           ─┐            ┌─▶ LangChain   langchain_retriever, _embeddings
    CairnClient(…).collection("handbook") ─┴─▶ passages ┼─▶ LlamaIndex  llama_retriever
                                                        ├─▶ Haystack    haystack_retriever
                                                        └─▶ MCP         mcp_server, run by `cairn mcp`

Each module needs the extra of its framework and imports no other one. LangChain's vector store, which writes,
is in ``pipeline/frameworks/langchain_store.py``.
"""
