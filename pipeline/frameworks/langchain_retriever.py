"""A retriever for LangChain: passages of a collection as documents, with span, metadata and score.

    CairnRetriever(collection=open_collection("handbook"), k=4).invoke("how do I reset a password")

Over the API: ``collection=CairnClient(…).collection("handbook")``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cairn.pipeline.client.calls import SearchParameters
from cairn.pipeline.errors import ConfigError, extra_missing
from cairn.pipeline.frameworks.source import FoundPassage, find_passages
from typing_extensions import override

try:
    from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables import run_in_executor
except ModuleNotFoundError as error:
    raise extra_missing(
        error,
        what="LangChain's retriever",
        module="langchain_core",
        package="langchain-core",
        extra="langchain",
    ) from None


class CairnRetriever(BaseRetriever):
    """Retrieves passages; ``k``, ``filters`` and ``parameters`` may be given to ``invoke`` as well.

    ``collection`` is what ``open_collection`` or ``CairnClient.collection`` returns. ``filters`` is Cairn's
    filter tree; ``parameters`` are more keywords of a search, such as ``{"max_characters": 2000}`` or
    ``{"granularity": "chunk", "passages": 1}``.
    """

    collection: Any
    k: int = 4
    filters: Mapping[str, Any] | None = None
    parameters: Mapping[str, Any] = {}

    @override
    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **asked: Any
    ) -> list[Document]:
        return self._find(query, asked)

    @override
    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **asked: Any
    ) -> list[Document]:
        return await run_in_executor(None, self._find, query, asked)

    def _find(self, query: str, asked: Mapping[str, Any]) -> list[Document]:
        unknown = set(asked) - {"k", "filters", "parameters"}
        if unknown:
            raise ConfigError(
                f"a retriever takes k, filters and parameters, got {', '.join(sorted(unknown))}"
            )
        chosen = {
            **self.parameters,
            "filters": asked.get("filters", self.filters),
            **asked.get("parameters", {}),
        }
        found = find_passages(self.collection, query, asked.get("k", self.k), cast(SearchParameters, chosen))
        return [as_document(passage) for passage in found]


def as_document(passage: FoundPassage) -> Document:
    """Return a passage as LangChain has documents."""
    return Document(id=passage.passage_id, page_content=passage.text, metadata=dict(passage.metadata))
