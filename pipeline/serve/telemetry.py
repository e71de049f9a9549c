"""OpenTelemetry for a server: off unless the extra ``otel`` and an endpoint to export to are there.

FastAPI makes the span and the metrics of a request, and sets exporters up from OpenTelemetry's own variables.
The stages of a search are added by ``answers``, the figures of threads by ``metrics``. Neither holds a query
or a text. OpenTelemetry's logs are left out, because they would hold messages of errors.
"""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Final

from fastapi.telemetry import TelemetryConfig
from opentelemetry import trace

log = logging.getLogger(__name__)

ENDPOINTS: Final = (
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
)
_TRACER: Final = trace.get_tracer("cairn")


def telemetry_config() -> TelemetryConfig:
    """Return FastAPI's settings: whether spans and metrics are made, and exported where the variables say."""
    is_on = any(os.environ.get(name) for name in ENDPOINTS)
    if is_on:
        try:
            import_module("opentelemetry.exporter.otlp.proto.http")
        except ModuleNotFoundError:
            log.warning("serve.telemetry_off reason=the extra otel of cairn-index is not installed")
            is_on = False
    return {
        "tracing": is_on,
        "metrics": is_on,
        "logs": False,
        "operation_spans": False,
        "auto_configure": is_on,
    }


def stage(name: str, **attributes: str | int) -> AbstractContextManager[object]:
    """Return a context that is a span of the request's trace."""
    return _TRACER.start_as_current_span(
        name, attributes={f"cairn.{key}": value for key, value in attributes.items()}
    )
