"""A retriever for Haystack: passages of a collection as documents. Pipelines with it can be saved as YAML.

    pipeline.add_component("retriever", CairnRetriever("handbook", url="http://127.0.0.1:8400"))
    Pipeline.loads(written, allowed_modules=["cairn.pipeline.frameworks.haystack_retriever"])

Filters may be Haystack's (``{"field": "meta.year", "operator": ">=", "value": 2020}``) or Cairn's (``{"type":
"gte", …}``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from cairn.pipeline.client.calls import SearchParameters
from cairn.pipeline.errors import FilterError, extra_missing
from cairn.pipeline.frameworks.source import Searchable, find_passages, open_source

try:
    from haystack import Document, component
    from haystack.utils import Secret
except ModuleNotFoundError as error:
    raise extra_missing(
        error, what="Haystack's retriever", module="haystack", package="haystack-ai", extra="haystack"
    ) from None

_COMPARISONS: Final = {
    "==": "eq",
    "!=": "ne",
    ">": "gt",
    ">=": "gte",
    "<": "lt",
    "<=": "lte",
    "in": "in",
    "not in": "nin",
}
_COMBINATIONS: Final = {"AND": "and", "OR": "or"}
_NULLS: Final = {"eq": "is_null", "ne": "is_not_null"}


@component
class CairnRetriever:
    """Retrieves passages of a collection: behind the API at ``url``, else under ``root`` on this machine.

    ``parameters`` are more keywords of a search, such as ``{"max_characters": 2000}``. Haystack writes the
    arguments to YAML, the key by its variable's name only. The collection is opened at the first run, or by
    ``warm_up``.
    """

    def __init__(
        self,
        collection: str,
        *,
        url: str | None = None,
        root: str | None = None,
        api_key: Secret = Secret.from_env_var("CAIRN_API_KEY", strict=False),  # noqa: B008 - Haystack's way to name a variable
        top_k: int = 10,
        filters: dict[str, Any] | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        self.collection = collection
        self.url = url
        self.root = root
        self.api_key = api_key
        self.top_k = top_k
        self.filters = filters
        self.parameters = parameters or {}
        self._source: Searchable | None = None

    def warm_up(self) -> None:
        """Open the collection."""
        if self._source is None:
            root = None if self.root is None else Path(self.root)
            self._source = open_source(
                self.collection, root=root, url=self.url, api_key=self.api_key.resolve_value()
            )

    @component.output_types(documents=list[Document])
    def run(
        self, query: str, filters: dict[str, Any] | None = None, top_k: int | None = None
    ) -> dict[str, list[Document]]:
        """Return the best passages.

        ``filters`` and ``top_k`` take the place of those the component was made with.
        """
        self.warm_up()
        assert self._source is not None
        chosen = cairn_filter(filters if filters is not None else self.filters)
        parameters = cast(SearchParameters, {**self.parameters, "filters": chosen})
        found = find_passages(self._source, query, self.top_k if top_k is None else top_k, parameters)
        documents = [
            Document(id=each.passage_id, content=each.text, score=each.score, meta=dict(each.metadata))
            for each in found
        ]
        return {"documents": documents}


def cairn_filter(filters: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a filter in Cairn's grammar; one without an operator is in it already and stays as it is.

    NOT has no counterpart and is refused.
    """
    if not filters:
        return None
    if "operator" not in filters:
        return dict(filters)
    operator = filters.get("operator")
    if operator in _COMBINATIONS:
        return {
            "type": _COMBINATIONS[operator],
            "filters": [cairn_filter(condition) for condition in filters.get("conditions", [])],
        }
    if operator not in _COMPARISONS or not isinstance(filters.get("field"), str):
        known = ", ".join([*_COMBINATIONS, *_COMPARISONS])
        raise FilterError(
            f"a filter must have a field and one of the operators {known}, got {str(operator)[:20]!r}; "
            "say != or not in for NOT"
        )
    kind, key, value = _COMPARISONS[operator], filters["field"].removeprefix("meta."), filters.get("value")
    if value is None and kind in _NULLS:
        return {"type": _NULLS[kind], "key": key}
    return {"type": kind, "key": key, "value": value}
