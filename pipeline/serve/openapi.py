"""The OpenAPI description: FastAPI's own, with the problems that each route can answer with."""

from __future__ import annotations

from typing import Any, Final

from cairn.pipeline.serve.guard import OPEN_PATHS
from cairn.pipeline.serve.problems import (
    BODY_SLOW,
    BODY_TOO_LARGE,
    INVALID_JSON,
    MEDIA_TYPE,
    MEDIA_TYPE_REFUSED,
    PROBLEM_TYPES,
    TYPE_PREFIX,
    Problem,
)
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_STATUSES: Final = sorted({kind.status for kind in PROBLEM_TYPES.values()})
_OF_A_BODY: Final = {kind.status for kind in (INVALID_JSON, BODY_SLOW, BODY_TOO_LARGE, MEDIA_TYPE_REFUSED)}


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the description of an app's routes, made once."""
    if app.openapi_schema is None:
        found = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        schemas = found.setdefault("components", {}).setdefault("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        reference = "#/components/schemas/{model}"
        problem = Problem.model_json_schema(ref_template=reference, mode="serialization")
        schemas.update(problem.pop("$defs", {}))
        schemas["Problem"] = problem
        found["components"]["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer", "description": "From `cairn keys create`."}
        }
        found["components"]["responses"] = {f"Problem{status}": _response(status) for status in _STATUSES}
        for path, operations in found["paths"].items():
            for operation in operations.values():
                _refer_to_problems(operation, is_open=path in OPEN_PATHS)
        app.openapi_schema = found
    return app.openapi_schema


def _response(status: int) -> dict[str, Any]:
    kinds = [kind for kind in PROBLEM_TYPES.values() if kind.status == status]
    return {
        "description": "; ".join(f"`{TYPE_PREFIX}{kind.name}`: {kind.title}" for kind in kinds),
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
    }


def _refer_to_problems(operation: dict[str, Any], *, is_open: bool) -> None:
    operation["responses"] = {
        code: reply for code, reply in operation["responses"].items() if code.startswith("2")
    }
    if not is_open:
        operation["security"] = [{"key": []}, {}]  # none is needed before the first is made
    for status in _STATUSES:
        if "requestBody" in operation or status not in _OF_A_BODY:
            operation["responses"][str(status)] = {"$ref": f"#/components/responses/Problem{status}"}
