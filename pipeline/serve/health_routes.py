"""Whether the server lives, whether it serves, and its figures."""

from __future__ import annotations

from cairn.pipeline.serve.access import AdminGrant, State
from cairn.pipeline.serve.metrics import MEDIA_TYPE
from cairn.pipeline.serve.problems import NOT_READY, ProblemError
from cairn.pipeline.serve.schemas import Health
from fastapi import APIRouter, Response

router = APIRouter(tags=["server"])


@router.get("/healthz", response_model_exclude_none=True)
async def live() -> Health:
    """Say that the server lives."""
    return Health(status="ok")


@router.get("/readyz", response_model_exclude_none=True)
async def ready(state: State) -> Health:
    """Say that collections are open: all the server was started for, else at least one if any is published.

    One that is published later is opened when it is first asked for.
    """
    if not state.keyring.is_readable:
        raise ProblemError(NOT_READY, "the server's keeper has to restore the file of keys")
    reason = state.collections.readiness()
    if reason is not None:
        raise ProblemError(NOT_READY, reason)
    degraded = state.collections.degraded()
    return Health(status="ready") if degraded is None else Health(status="degraded", reason=degraded)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def figures(state: State, grant: AdminGrant) -> Response:  # noqa: ARG001 - the grant is what lets the request in
    """Give the server's figures for Prometheus."""
    return Response(state.metrics.text(), media_type=MEDIA_TYPE)
