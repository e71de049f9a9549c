"""Run moto's S3-compatible server on a free loopback port, with faults on demand.

It writes its address on stdout. ``PUT /-/faults`` takes a list of rules. Each has a method (empty: any), a
pattern of paths, the access key it is for (empty: any), a fault, how many requests it applies to, seconds,
and which share of requests fail, one in ``every``:

    refuse        answer 503
    forbid        answer 403
    lose-reply    do what is asked, but do not answer
    stall         answer after so many seconds

Writes are made one at a time, because moto checks a condition and writes in two steps. This server cannot
show the latency, the throughput and the clock of a real store, nor how long a real one answers 503.
"""

import json
import re
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


class FaultyStore:
    def __init__(self) -> None:
        self._store: Any = DomainDispatcherApplication(create_backend_app)
        self._rules: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._writing = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/-/faults":
            body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            with self._lock:
                self._rules = json.loads(body)
            start_response("200 OK", [])
            return [b"{}"]
        credential = re.search(r"Credential=([^/]+)/", environ.get("HTTP_AUTHORIZATION", ""))
        access_key = credential.group(1) if credential else ""
        rule = self._rule(environ["REQUEST_METHOD"], environ["PATH_INFO"], access_key)
        fault = rule["fault"]
        if fault == "refuse":
            start_response("503 Service Unavailable", [("Content-Type", "application/xml")])
            return [b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"]
        if fault == "forbid":
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"]
        if environ["REQUEST_METHOD"] == "PUT":
            with self._writing:
                answer = list(self._store(environ, start_response))
        else:
            answer = list(self._store(environ, start_response))
        if fault == "lose-reply":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        if fault == "stall":
            time.sleep(rule["seconds"])
        return answer

    def _rule(self, method: str, path: str, access_key: str) -> dict[str, Any]:
        with self._lock:
            for rule in self._rules:
                is_meant = rule["method"] in ("", method) and rule["access_key"] in ("", access_key)
                if rule["times"] > 0 and is_meant and re.search(rule["path"], path):
                    rule["times"] -= 1
                    if rule["times"] % rule["every"] == 0:
                        return rule
        return {"fault": None}


class Silent(WSGIRequestHandler):
    def log(self, *message: Any) -> None: ...

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None: ...


if __name__ == "__main__":
    server = make_server("127.0.0.1", 0, FaultyStore(), threaded=True, request_handler=Silent)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
