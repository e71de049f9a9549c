"""Adapters for other frameworks: a collection as their retriever, on this machine or behind the search API.

    open_collection("handbook")           ─┐            ┌─▶ LangChain   langchain
    CairnClient(…).collection("handbook") ─┴─▶ passages ┼─▶ LlamaIndex  llama_retriever
                                                        ├─▶ Haystack    haystack_retriever
                                                        └─▶ MCP         mcp_server, run by `cairn mcp`

Each module needs the extra of its framework and imports no other one. Of LangChain there is a vector store,
too, which writes.
"""
