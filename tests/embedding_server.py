"""A stand-in for a server of models on loopback, with faults to order.

Embeddings in OpenAI's shape and Voyage's, and chat completions.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

Fault = Callable[[list[str], list[np.ndarray]], tuple[int, dict[str, str], bytes] | list[Any] | None]
"""From the texts and vectors of a request to the reply, or the embeddings, to send in their place."""


def vector_of(text: str, seed: str, width: int) -> np.ndarray:
    """A vector that has something of each word of a text, so that similar texts are near."""
    rows = [
        np.random.default_rng(list(hashlib.sha256((seed + word).encode()).digest()[:8])).standard_normal(
            width
        )
        for word in text.lower().split() or ["."]
    ]
    return np.mean(rows, axis=0).astype(np.float32)


class EmbeddingServer:
    """Counts how often each text was embedded; ``faults`` are taken one a request."""

    def __init__(self, *, width: int = 16, latency_seconds: float = 0.0, most_texts: int = 2_048) -> None:
        self.width, self.seed = width, "model-a"
        self.latency_seconds, self.most_texts = latency_seconds, most_texts
        self.embedded: Counter[str] = Counter()
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.faults: list[Fault | None] = []
        self.gives_base64 = True
        self.questions: Counter[str] = Counter()
        """How often each was answered by the language model."""
        self.answer: Callable[[str], Any] = lambda question: f"A line on {len(question)}."
        """From a question to a line, a choice, or a whole reply."""
        self._lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"owner": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    @property
    def host(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"

    @property
    def model(self) -> str:
        """What ``--model`` is given."""
        return f"{self.host}/v1/embeddings#tiny"

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def reply(self, path: str, asked: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        if path.endswith("chat/completions"):
            return self._chat(asked)
        is_contextual = path.endswith("contextualizedembeddings")
        groups = asked["inputs"] if is_contextual else [[text] for text in asked["input"]]
        texts = [text for group in groups for text in group]
        with self._lock:
            self.requests.append(asked)
            fault = self.faults.pop(0) if self.faults else None
        time.sleep(self.latency_seconds)
        if len(texts) > self.most_texts:
            told = {"error": {"message": f"batch size {len(texts)} > maximum {self.most_texts}"}}
            return 413, {}, json.dumps(told).encode()
        width = asked.get("dimensions") or asked.get("output_dimension") or self.width
        found: list[Any] = [vector_of(text, self.seed, width) for text in texts]
        if is_contextual:  # each chunk has something of its document
            rows = iter(found)
            found = []
            for group in groups:
                own = [next(rows) for _ in group]
                found += [row + np.mean(own, axis=0) for row in own]
        if fault is not None:
            changed = fault(texts, found)
            if isinstance(changed, tuple):
                return changed
            found = found if changed is None else changed
        with self._lock:
            self.embedded.update(texts)
        entries = [{"embedding": self._written(row)} for row in found]
        data: list[Any] = [{**entry, "index": place} for place, entry in enumerate(entries)]
        if is_contextual:
            left = iter(entries)
            data = [
                {"index": g, "data": [{**next(left), "index": k} for k in range(len(group))]}
                for g, group in enumerate(groups)
            ]
        content = json.dumps({"data": data[::-1], "usage": {"total_tokens": sum(map(len, texts))}})
        return 200, {}, content.encode()

    def _chat(self, asked: dict[str, Any]) -> tuple[int, dict[str, str], bytes]:
        question = asked["messages"][0]["content"]
        with self._lock:
            self.requests.append(asked)
        answer = self.answer(question)
        if isinstance(answer, tuple):
            return answer
        with self._lock:
            self.questions[question] += 1
        if not isinstance(answer, dict):
            answer = {"message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
        return 200, {}, json.dumps({"choices": [{"index": 0, **answer}]}).encode()

    def _written(self, row: np.ndarray) -> Any:
        if self.gives_base64:
            return base64.b64encode(np.asarray(row, "<f4").tobytes()).decode()
        return [float(number) for number in row]


class _Handler(BaseHTTPRequestHandler):
    owner: EmbeddingServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["content-length"]))
        self.owner.headers.append(dict(self.headers))
        status, headers, reply = self.owner.reply(self.path, json.loads(content))
        try:
            self.send_response(status)
            for name, value in {"content-type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)
        except OSError:
            pass  # who asked has gone

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def embedding_server() -> Iterator[EmbeddingServer]:
    """Start a server, and stop it at the end."""
    server = EmbeddingServer()
    yield server
    server.stop()
