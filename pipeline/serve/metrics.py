"""What the server counts and traces: for Prometheus, and for OpenTelemetry where it is on.

Labels are routes and names of this server's own, never what a caller sent. OpenTelemetry is off unless the
extra ``otel`` and an endpoint to export to are there. FastAPI makes the span and the metrics of a request,
and sets exporters up from OpenTelemetry's own variables. Neither holds a query or a text. OpenTelemetry's
logs are left out, because they would hold messages of errors.
"""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from typing import Final

from fastapi.telemetry import TelemetryConfig
from opentelemetry import metrics, trace
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

MEDIA_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24)
_TEXTS: Final = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """The figures of one server."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.requests = counter("cairn_http_requests", "Requests answered.", ["method", "route", "status"])
        self.request_seconds = histogram(
            "cairn_http_request_seconds", "Seconds to an answer.", ["route"], buckets=_SECONDS
        )
        self.requests_in_flight = gauge("cairn_http_requests_in_flight", "Requests being answered.")
        self.problems = counter("cairn_problems", "Requests that ended with a problem.", ["type"])
        self.pass_texts = histogram("cairn_encoder_pass_texts", "Texts of an encoder pass.", buckets=_TEXTS)
        self.pass_seconds = histogram(
            "cairn_encoder_pass_seconds", "Seconds of an encoder pass.", buckets=_SECONDS
        )
        self.search_seconds = histogram(
            "cairn_search_seconds",
            "Seconds of work on a search thread, after the vectors are there.",
            buckets=_SECONDS,
        )
        self.generation = gauge("cairn_generation", "Generation of the last answer.", ["collection"])

        meter = metrics.get_meter("cairn")  # does nothing where no exporter is set up
        self._exported_pass_seconds = meter.create_histogram(
            "cairn.encoder.pass.duration", unit="s", description="Duration of an encoder pass."
        )
        self._exported_search_seconds = meter.create_histogram(
            "cairn.search.duration", unit="s", description="Duration of work on a search thread."
        )

    def observe_pass(self, num_texts: int, seconds: float) -> None:
        """Count a pass of an encoder."""
        self.pass_texts.observe(num_texts)
        self.pass_seconds.observe(seconds)
        self._exported_pass_seconds.record(seconds)

    def observe_search(self, seconds: float) -> None:
        """Count a piece of work of a search thread."""
        self.search_seconds.observe(seconds)
        self._exported_search_seconds.record(seconds)

    def text(self) -> bytes:
        """Return all figures in Prometheus' text format."""
        return generate_latest(self._registry)


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
