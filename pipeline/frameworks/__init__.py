"""Cairn inside other people's frameworks: what each asks of a retriever, over a collection on this machine or behind the search API.

    open_collection("handbook")            ─┐                      ┌─▶ LangChain    langchain_retriever, langchain_embeddings
    CairnClient(…).collection("handbook")  ─┴─▶ passages, ranked ──┼─▶ LlamaIndex   llama_retriever
                                                                   ├─▶ Haystack     haystack_retriever
                                                                   └─▶ MCP          mcp_server, run by `cairn mcp`

Each module needs the extra of its framework and imports no other one. LangChain's vector store, which writes,
is in ``jobs/langchain_store.py``.
"""
