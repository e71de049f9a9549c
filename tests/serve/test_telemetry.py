"""OpenTelemetry, received by a collector on loopback."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from cairn.pipeline.serve.middleware import ENDPOINTS, telemetry_config
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

ROOT = Path(__file__).parents[2]
QUERY = "granite-canary"
SEARCH_ONCE = f"""
import sys
from pathlib import Path
from starlette.testclient import TestClient
from cairn.pipeline.serve.app import create_app
from cairn.pipeline.serve.settings import ServeSettings
settings = ServeSettings(root=Path(sys.argv[1]), collections=("pebbles",), deadline_seconds=300.0)
with TestClient(create_app(settings), base_url="http://127.0.0.1:8400") as client:
    client.post("/v1/collections/pebbles/search", json={{"query": {QUERY!r}}}).raise_for_status()
"""


class Collector(BaseHTTPRequestHandler):
    """Keeps what is sent to it, by path."""

    received: list[tuple[str, bytes]]

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.received.append((self.path, body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args):
        """Keep quiet."""


@pytest.fixture
def collector(monkeypatch):
    """Give the port of a collector; what it receives is kept in its class."""
    monkeypatch.setattr(Collector, "received", [], raising=False)
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_search_is_a_trace_of_its_stages_without_its_text(collector, served_root):
    """In a process of its own: a process sets its exporters up once."""
    endpoint = f"http://127.0.0.1:{collector}"
    subprocess.run(
        [sys.executable, "-c", SEARCH_ONCE, str(served_root)],
        cwd=ROOT,
        env={**os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint},
        check=True,
    )
    spans: list[Span] = []
    names: set[str] = set()
    for path, body in Collector.received:
        assert QUERY.encode() not in body
        if path == "/v1/traces":
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans += [span for scope in resource.scope_spans for span in scope.spans]
        else:
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                names |= {metric.name for scope in resource.scope_metrics for metric in scope.metrics}
    by_name = {span.name: span for span in spans}
    request = by_name["POST /v1/collections/{name}/search"]
    search = by_name["search"]
    assert search.parent_span_id == request.span_id
    for stage in ("encode", "rank"):
        assert by_name[f"search.{stage}"].parent_span_id == search.span_id
    assert {"http.server.request.duration", "cairn.encoder.pass.duration", "cairn.search.duration"} <= names


@pytest.mark.parametrize("is_installed", [True, False])
def test_telemetry_is_off_without_an_endpoint_or_the_extra(monkeypatch, is_installed):
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    if not is_installed:
        monkeypatch.setenv(ENDPOINTS[0], "http://127.0.0.1:4318")
        monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    config = telemetry_config()
    assert not any(config.values())
