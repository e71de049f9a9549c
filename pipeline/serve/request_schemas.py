"""What requests may hold: the strict base of their schemas, and filters."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, cast

from cairn.pipeline.search.filter_values import MAX_STRING_BYTES
from cairn.pipeline.search.filters import MAX_LIST_VALUES, MAX_NODES, TREE_FIELDS
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

MAX_TOLD: Final = 10
"""Parts of a request that a problem speaks of; a caller who has mended those may hear of others."""
UNKNOWN_FIELD: Final = "unknown_field"
"""The type of the error that names fields a schema does not have."""


class Request(BaseModel):
    """Base of what is taken."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, sent: Any) -> Any:
        """Say which fields are not known, and which are; pydantic says the former only."""
        if isinstance(sent, dict):
            names = [name for name in cast("dict[str, Any]", sent) if name not in cls.model_fields]
            if names:
                told = {"names": names[:MAX_TOLD], "fields": list(cls.model_fields)}
                raise PydanticCustomError(
                    UNKNOWN_FIELD, "There are fields here that the schema does not have", told
                )
        return cast("Any", sent)


FilterValue = Annotated[str, Field(max_length=MAX_STRING_BYTES)] | bool | int | float
FilterValues = Annotated[list[FilterValue], Field(min_length=1, max_length=MAX_LIST_VALUES)]
Key = Annotated[
    str,
    Field(
        min_length=1,
        max_length=MAX_STRING_BYTES,
        description="A column of the collection.",
        examples=["year"],
    ),
]


class Comparison(Request):
    """A column compared with a value; `contains` asks for a part of a text or an element of a list.

    A null matches no comparison.
    """

    type: Literal["eq", "ne", "gt", "gte", "lt", "lte", "contains"]
    key: Key
    value: FilterValue


class Membership(Request):
    """A column compared with a list of values; one of lists may hold any of them, or none."""

    type: Literal["in", "nin"]
    key: Key
    value: FilterValues


class NullTest(Request):
    """A column that has no value, or has one."""

    type: Literal["is_null", "is_not_null"]
    key: Key


class Combination(Request):
    """Filters of which all or any must match; at most 8 levels and 256 nodes."""

    type: Literal["and", "or"]
    filters: Annotated[list[Filter], Field(min_length=1, max_length=MAX_NODES)]


FilterNode = Annotated[Comparison | Membership | NullTest | Combination, Field(discriminator="type")]
FilterColumns = Annotated[
    dict[Key, FilterValue | FilterValues | None],
    Field(
        min_length=1,
        max_length=MAX_NODES,
        description="Columns with a value, several of which any may match, or null.",
        examples=[{"kind": "module"}],
        json_schema_extra={"propertyNames": {"not": {"enum": [*sorted(TREE_FIELDS)]}}},
    ),
]


def _filter_shape(sent: Any) -> str:
    return "columns" if isinstance(sent, dict) and not TREE_FIELDS & sent.keys() else "node"


Filter = Annotated[
    Annotated[FilterNode, Tag("node")] | Annotated[FilterColumns, Tag("columns")],
    Discriminator(_filter_shape),
]
