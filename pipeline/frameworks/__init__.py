"""Adapters for other frameworks: a collection as their retriever, on this machine or behind the search API.

    open_collection("handbook")           ─┐            ┌─▶ LangChain   langchain
    CairnClient(…).collection("handbook") ─┴─▶ passages ┼─▶ LlamaIndex  llama_index
                                                        ├─▶ Haystack    haystack
                                                        └─▶ MCP         mcp_server, run by `cairn mcp`

Each module needs the extra of its framework and imports no other one. The first three have a store that
writes, too.
"""
