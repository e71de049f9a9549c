"""What surrounds every route: an envelope around all, and a guard that lets only sound requests in.

    request ─▶ Envelope ─▶ Guard ─▶ route
               time, number, headers, log, problems

The envelope bounds concurrency and time, adds headers, counts, logs, and turns errors into problems. Health
checks and metrics pass the bound: they must answer when the server is full. HEAD runs as GET, and the body is
dropped here. The log holds the route but no content of the request. Of an unexpected error it holds type and
place, not the message, which may quote a text.

The guard refuses what is not for this server, not authorised, or not strict JSON of bounded size. A page on
another site must not reach a server on its reader's machine: the Host must be one this server answers for
(DNS rebinding), and an Origin must be the server's own, or a name that it was given. There is no CORS. The
whole body is read and checked: RFC 8259 has neither NaN nor lone surrogates, of a key that stands twice one
value would be lost, and the depth is bounded to protect parsers.

What is counted goes to Prometheus, and to OpenTelemetry where that is on. Labels are routes and names of this
server's own, never what a caller sent. OpenTelemetry is off unless the extra ``otel`` and an endpoint to
export to are there. FastAPI makes the span and the metrics of a request, and sets exporters up from
OpenTelemetry's own variables. Neither holds a query or a text. OpenTelemetry's logs are left out, because
they would hold messages of errors.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import os
import re
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, Final
from urllib.parse import unquote

from cairn.pipeline.errors import CairnError, is_panic
from cairn.pipeline.index.allocator import return_freed_memory
from cairn.pipeline.serve.keys import EVERYTHING, ApiKey, Keyring
from cairn.pipeline.serve.page_routes import PAGE_PATHS
from cairn.pipeline.serve.problems import Kind, ProblemError, problem_response
from cairn.pipeline.serve.settings import MAX_BODY_BYTES, MAX_FILE_BYTES, MAX_WRITE_BYTES, ServeSettings
from cairn.pipeline.types import once
from fastapi.telemetry import TelemetryConfig
from opentelemetry import metrics, trace
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

UPLOAD_PATH: Final = "/v1/files"
_CANCEL: Final = re.compile(r"/v1/vector_stores/[^/]+/file_batches/[^/]+/cancel")
"""Where OpenAI's clients send no body."""
UPLOAD_SECONDS: Final = 600.0
"""Within which a file must have arrived."""
REQUEST_ENDS: Final = "cairn.request_ends"
"""Where a scope has the :class:`asyncio.Timeout` that gives the request up."""
UNBOUNDED_PATHS: Final = frozenset({"/healthz", "/readyz", "/metrics"})

_HEADERS: Final = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"cache-control", b"no-store"),
)
"""Of every response that does not bring its own: no answer may be stored, framed or sniffed."""


HEAVY_ANSWER_BYTES: Final = 1 << 20
"""An answer from here on is made of a multiple in objects, whose memory is given back afterwards."""
GIVE_BACK_SECONDS: Final = 1.0
"""After the last but one heavy answer: giving back takes some milliseconds, once for many answers."""


class Envelope:
    """The one ASGI layer."""

    def __init__(self, app: ASGIApp, *, settings: ServeSettings, metrics: Metrics, keyring: Keyring) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        self._guard = Guard(settings, keyring)
        self._num_requests = 0
        self._giving_back: asyncio.TimerHandle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, whatever happens inside."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_seconds = time.perf_counter()
        status = num_bytes = 0
        method = scope["method"]
        is_head = method == "HEAD"
        if is_head:
            scope = {**scope, "method": "GET"}

        async def send_with_headers(message: Message) -> None:
            nonlocal status, num_bytes
            num_bytes += len(message.get("body", b""))
            if message["type"] == "http.response.start":
                status = message["status"]
                present = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *(pair for pair in _HEADERS if pair[0] not in present),
                ]
            elif is_head:
                message = {**message, "body": b""}
            await send(message)

        self._num_requests += 1
        self._metrics.requests_in_flight.set(self._num_requests)
        try:
            problem = await self._run(scope, receive, send_with_headers)
            if problem is not None:
                self._metrics.problems.labels(problem.kind.code).inc()
                if not status:
                    await problem_response(problem, scope["path"])(scope, receive, send_with_headers)
        finally:
            self._num_requests -= 1
            self._metrics.requests_in_flight.set(self._num_requests)
            if num_bytes >= HEAVY_ANSWER_BYTES and self._giving_back is None:
                self._giving_back = asyncio.get_running_loop().call_later(GIVE_BACK_SECONDS, self._give_back)
            self._record(method, scope, status, time.perf_counter() - started_seconds)

    def _give_back(self) -> None:
        self._giving_back = None
        asyncio.get_running_loop().run_in_executor(None, return_freed_memory)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> ProblemError | None:
        """Run the request; return the problem it ended with where none was answered inside."""
        if self._num_requests > self._settings.max_requests and scope["path"] not in UNBOUNDED_PATHS:
            return Kind.OVERLOADED("too many requests are in flight")
        is_upload = scope["path"] == UPLOAD_PATH and scope["method"] == "POST"
        deadline = asyncio.timeout(UPLOAD_SECONDS if is_upload else self._settings.deadline_seconds)
        try:
            async with deadline:
                scope[REQUEST_ENDS] = deadline
                await self._app(scope, await self._guard.admit(scope, receive), send)
        except ProblemError as problem:
            return problem
        except BaseException as error:
            if isinstance(error, TimeoutError) and deadline.expired():
                return Kind.DEADLINE("try again, or ask for less")
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            log_failure("serve.request_failed", error)
            return Kind.INTERNAL_ERROR()
        return None

    def _record(self, method: str, scope: Scope, status: int, seconds: float) -> None:
        method = method if method in ("GET", "POST", "PATCH", "DELETE", "HEAD", "OPTIONS") else "other"
        route = route_of(scope)
        self._metrics.requests.labels(method, route, str(status)).inc()
        self._metrics.request_seconds.labels(route).observe(seconds)
        log.info(
            "serve.request method=%s route=%s status=%d milliseconds=%.1f",
            method,
            route,
            status,
            1e3 * seconds,
        )


def route_of(scope: Scope) -> str:
    """Return the pattern a request was routed by."""
    route: Any = scope.get("route")
    return getattr(route, "path", None) or "none"


def log_failure(event: str, error: BaseException) -> None:
    """Log an unforeseen error by its type and its places in the code, without its message."""
    places = " < ".join(
        f"{frame.name}:{frame.lineno}" for frame in reversed(traceback.extract_tb(error.__traceback__)[-8:])
    )
    log.error("%s error=%s at=%s", event, type(error).__name__, places)


GRANT: Final = "cairn.grant"
"""Where a request's grant stands in its scope."""
OPEN_PATHS: Final = frozenset({"/healthz", "/readyz", "/openapi.json"}) | PAGE_PATHS
"""What anybody may ask: nothing there depends on a collection."""

PROBED_PATHS: Final = frozenset({"/healthz", "/readyz"})
"""Asked by orchestrators under any name."""
_LOCAL_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")
MAX_PRINCIPALS: Final = 256
"""Names of one request: a user and the groups it is in."""
_CLOSES: Final = {"Connection": "close"}
BODY_SECONDS: Final = 5.0
"""Within which a body must have arrived; of a file, the next part of it."""


class Guard:
    """Refuses what must not reach a route."""

    def __init__(self, settings: ServeSettings, keyring: Keyring) -> None:
        self._settings, self._keyring = settings, keyring
        self._named = frozenset(_without_port(host.lower()) for host in settings.allowed_hosts)
        self._own = frozenset({*_LOCAL_NAMES, settings.host.lower(), f"[{settings.host.lower()}]"})

    async def admit(self, scope: Scope, receive: Receive) -> Receive:
        """Check a request and note its grant; return what gives its body, which was read."""
        headers = Headers(scope=scope)
        self._check_addressee(headers, scope["path"])
        if (
            "transfer-encoding" in headers and "content-length" in headers
        ):  # a proxy may have gone by the other one (RFC 9112 §6.1)
            raise Kind.BODY_AMBIGUOUS("send Content-Length or Transfer-Encoding", headers=_CLOSES)
        if scope["path"] not in OPEN_PATHS:
            scope[GRANT] = self._within_rights(self._grant(headers), headers)
        has_body = scope["method"] in ("POST", "PATCH")
        if not has_body and "transfer-encoding" in headers:  # of any length
            raise Kind.BODY_UNEXPECTED("send none", headers=_CLOSES)
        if has_body and scope["path"] == UPLOAD_PATH:
            require_scope(scope[GRANT], "write", self._settings)  # before a large body is read
            bounded = _bounded(headers, receive, MAX_FILE_BYTES + MAX_BODY_BYTES, "multipart/form-data")
            return _without_pauses(bounded)
        if has_body and not _CANCEL.fullmatch(scope["path"]):
            is_write = self._settings.writable and scope["path"].endswith("/documents")
            limit = MAX_WRITE_BYTES if is_write else MAX_BODY_BYTES
            return replay(await _read_json(headers, receive, limit))
        return receive

    def _check_addressee(self, headers: Headers, path: str) -> None:
        host = headers.get("host", "").lower()
        if len(headers.getlist("host")) > 1:  # what stands in front may have gone by the other one
            raise Kind.HOST_REFUSED("send one Host")
        if path not in PROBED_PATHS and not self._answers_for(_without_port(host)):
            raise Kind.HOST_REFUSED("name it with --allowed-host where it is this server's")
        origin = headers.get("origin", "").lower().partition("://")[2]
        # A page of another site cannot add a header of its own: that needs a preflight, and gets none.
        addressed = (host, headers.get("x-forwarded-host", "").lower())
        is_own = bool(origin) and (origin in addressed or _without_port(origin) in self._named)
        if "origin" in headers and not is_own:
            raise Kind.ORIGIN_REFUSED(
                "call it from a page it serves itself, or from a program; behind a proxy under another name "
                "or port, give that name with --allowed-host"
            )

    def _answers_for(self, name: str) -> bool:
        """Tell whether the server may be called so: by its own names and those it was given.

        Only browsers are led here by a name of another site, and they always send it. Beyond loopback an
        address is the server's own, too, and without given names any name is: keys protect it, which a
        page of another site does not have.
        """
        if not name or name in self._own or name in self._named:
            return True
        return not self._settings.is_loopback and (not self._named or _is_address(name))

    def _within_rights(self, grant: ApiKey, headers: Headers) -> ApiKey:
        """Narrow a grant to what the request's principals, which its key must or must not name, may read."""
        must_name = grant is not EVERYTHING and "principal" in grant.scopes
        lines = headers.getlist("x-cairn-principal")
        if len(lines) > 1:  # a caller's own beside that of what stands in front
            raise Kind.PRINCIPAL_MISSING("send one X-Cairn-Principal, with commas between names")
        sent = lines[0] if lines else None
        if sent is None and not must_name:
            return grant
        named = [unquote(name.strip(), errors="replace") for name in (sent or "").split(",") if name.strip()]
        if self._settings.readers_column is None:
            raise Kind.PRINCIPAL_MISSING("the server has to be started with --readers-column")
        if "principal" not in grant.scopes:
            raise Kind.PRINCIPAL_MISSING("X-Cairn-Principal needs a key with the scope principal")
        if not 1 <= len(named) <= MAX_PRINCIPALS:
            raise Kind.PRINCIPAL_MISSING(
                f"send 1 to {MAX_PRINCIPALS} names in X-Cairn-Principal, with commas between them"
            )
        readable: dict[str, Any] = {"type": "in", "key": self._settings.readers_column, "value": named}
        own = grant.restriction
        return replace(
            grant, restriction=readable if own is None else {"type": "and", "filters": [own, readable]}
        )

    def _grant(self, headers: Headers) -> ApiKey:
        if not self._keyring.is_required:
            return EVERYTHING
        kind, _, token = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not token.strip():
            raise Kind.KEY_MISSING("send it as `Authorization: Bearer KEY`; `cairn keys create` makes one")
        try:
            grant = self._keyring.grant_of(token.strip())
        except CairnError:
            raise Kind.KEYS_UNREADABLE("the server's keeper has to restore the file of keys") from None
        if grant is None:
            raise Kind.KEY_UNKNOWN("it is mistyped, or was revoked")
        return grant


def require_scope(grant: ApiKey, scope: str, settings: ServeSettings) -> ApiKey:
    """Return a grant, which must have a scope; to write, also a server that takes writes."""
    if scope not in grant.scopes:
        raise Kind.SCOPE_MISSING(f"this address needs a key with the scope {scope}")
    if scope == "write" and grant.restriction is not None:
        raise Kind.SCOPE_MISSING("writes are for all documents: send no X-Cairn-Principal")
    if scope == "write" and not settings.writable:
        raise Kind.READ_ONLY("start it with --writable")
    if scope == "admin" and (grant.collections is not None or grant.restriction is not None):
        raise Kind.SCOPE_MISSING(
            "the server's figures are of all collections: they need a key without a filter and for all "
            "of them"
        )
    return grant


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0].removesuffix(".")  # of the root of all names


async def _read_json(headers: Headers, receive: Receive, limit: int) -> bytes:
    """Return the whole body, which is JSON; anything else ends as early as it shows."""
    receive, parts = _bounded(headers, receive, limit), list[bytes]()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while True:
                message = await receive()
                if message["type"] != "http.request":  # what came may be JSON all the same
                    raise Kind.INVALID_JSON("send all of it; the connection ended before the body did")
                parts.append(message.get("body", b""))
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        raise Kind.BODY_SLOW(f"it may take {BODY_SECONDS:.0f} seconds", headers=_CLOSES) from None
    body = b"".join(parts)
    try:
        from_json(body, allow_inf_nan=False, cache_strings="none")
    except ValueError:
        raise Kind.INVALID_JSON(
            "send UTF-8 JSON without a byte order mark, halves of surrogates, NaN, Infinity and numbers of "
            "thousands of digits, at most 200 deep"
        ) from None
    try:
        json.loads(body, object_pairs_hook=once)
    except ValueError:
        raise Kind.INVALID_JSON("send every key of an object once; one got two values") from None
    return body


def _bounded(headers: Headers, receive: Receive, limit: int, media_type: str = "application/json") -> Receive:
    """Return a receive of a body of this media type, of bounded size."""
    sent_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if sent_type != media_type or headers.get("content-encoding", "identity").lower() != "identity":
        raise Kind.MEDIA_TYPE_REFUSED(f"send `Content-Type: {media_type}`, not compressed")
    length = headers.get("content-length", "")
    num_bytes = int(length[:20]) if length.isdecimal() else 0
    if num_bytes > limit:
        raise _too_large(limit)
    num_bytes = 0

    async def bounded() -> Message:
        nonlocal num_bytes
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > limit:
            raise _too_large(limit)
        return message

    return bounded


def _too_large(limit: int) -> ProblemError:
    return Kind.BODY_TOO_LARGE(f"it may have {limit:,} bytes", headers=_CLOSES)


def _without_pauses(receive: Receive) -> Receive:
    """Return a receive of a file, which a route reads as it comes."""

    async def prompt() -> Message:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                return await receive()
        except TimeoutError:
            told = f"no more of it came for {BODY_SECONDS:.0f} seconds"
            raise Kind.BODY_SLOW(told, headers=_CLOSES) from None

    return prompt


def replay(body: bytes) -> Callable[[], Awaitable[Message]]:
    """Return a receive that gives the body once more, and then the end of the connection."""
    messages: list[Mapping[str, object]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return dict(messages.pop()) if messages else {"type": "http.disconnect"}

    return receive


METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
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
