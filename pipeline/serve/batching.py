"""Texts of concurrent requests meet here and go through the encoder together, on a thread of its own.

    request ─▶ [ text text ] ─┐                      ┌─▶ vectors ─▶ request
    request ─▶ [ text ]       ├─▶ one pass (bytes) ──┤
    request ─▶ [ text … ]     ┘   a text of each     └─▶ vectors ─▶ request
                                  in turn

A pass takes the texts that arrived while the last one ran, so a single query is encoded at once. It takes one
text of each request in turn, so a long list does not delay other requests. The queue is bounded in bytes. A
request that does not fit is refused, and one whose client has disconnected is dropped. A text that the
encoder fails on fails alone.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

import numpy as np
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import EndpointDownError, FingerprintMismatchError
from cairn.pipeline.search.searcher import Vectors, encode_for_search
from cairn.pipeline.serve.problems import Kind, ProblemError, search_problem
from cairn.pipeline.types import EncodedQueries, QueryEncoder
from jaxtyping import Float32

log = logging.getLogger(__name__)

MAX_PASS_BYTES: Final = 16 << 10
"""About 4,000 tokens, some 0.4 s on two cores.

How long a query may have to wait for the pass before its own.
"""
MAX_WAITING_BYTES: Final = 512 << 10
"""About 130,000 tokens: more than is encoded within any deadline."""
MAX_REQUEST_BYTES: Final = 128 << 10
"""About 32,000 tokens, some 3 s on two cores: what one request may have encoded within its deadline."""
STOP_SECONDS: Final = 5.0

TextKind = Literal["query", "document", "search"]
"""A search takes a query with its tokens, where the encoder shows them: :class:`EncodedQueries`."""


class TextVectors(QueryEncoder, Protocol):
    """What the API needs of an encoder: queries, documents, and what they count in tokens."""

    @property
    def config(self) -> EncoderConfig:
        """Return the settings: whether documents bring their vectors, and which model reads queries."""
        ...

    @property
    def vector_dim(self) -> int:
        """Return V."""
        ...

    def encode_documents(self, texts: Sequence[str]) -> Float32[np.ndarray, "N V"]:
        """Embed documents, L2-normalised, in the order given."""
        ...

    def count_tokens(self, texts: Sequence[str]) -> int:
        """Count the texts' own tokens."""
        ...


Observer = Callable[[int, float], None]
"""Hears of each pass: how many texts, how many seconds."""


@dataclass(eq=False, slots=True)
class _Job:
    """The texts of one request, and the vectors it has so far."""

    texts: Sequence[str]
    sizes: Sequence[int]
    kind: TextKind
    future: Future[Any] = field(default_factory=Future[Any])
    rows: list[Vectors] = field(default_factory=list[Vectors])
    num_taken: int = 0
    is_over: bool = False


class EncoderQueue:
    """One encoder behind one thread."""

    def __init__(
        self,
        encoder: TextVectors,
        *,
        on_start: Callable[[], None] | None = None,
        observe: Observer = lambda *_: None,
    ) -> None:
        self.encoder = encoder
        self._on_start = on_start
        self._observe = observe
        self._jobs: deque[_Job] = deque()
        self._waiting_bytes = 0
        self._is_stopping = False
        self._is_retired = False
        self._condition = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="cairn-encoder", daemon=True)
        self._thread.start()

    @property
    def outage(self) -> str | None:
        """Why an endpoint cannot be asked, None of an encoder that runs here."""
        return getattr(self.encoder, "outage", None)

    def check(self) -> None:
        """Ask an endpoint whether it answers, before the first query does."""
        check = getattr(self.encoder, "check_endpoint", None)
        if check is not None:
            check()

    async def encode(self, texts: Sequence[str], kind: TextKind = "query") -> Any:
        """Await what :meth:`submit` returns."""
        return await asyncio.wrap_future(self.submit(texts, kind))

    def submit(self, texts: Sequence[str], kind: TextKind = "query") -> Future[Any]:
        """Let the texts wait for the next pass; return what resolves to their vectors in their order.

        Too much text, a full queue, a failing encoder or a stop raises :class:`ProblemError`, here or from
        the future. Texts that no request waits for any more are not encoded.
        """
        sizes = [len(text.encode(errors="replace")) for text in texts]
        if sum(sizes) > MAX_REQUEST_BYTES:
            raise Kind.INVALID_REQUEST(
                f"its texts may have {MAX_REQUEST_BYTES:,} bytes together; send several requests"
            )
        job = _Job(texts, sizes, kind)
        with self._condition:
            if self._is_stopping:
                raise Kind.STOPPING()
            # What is larger than the queue is let in where nothing waits, or it never would be.
            if self._waiting_bytes and self._waiting_bytes + sum(sizes) > MAX_WAITING_BYTES:
                raise Kind.OVERLOADED("the encoder's queue is full")
            self._waiting_bytes += sum(sizes)
            self._jobs.append(job)
            self._condition.notify()
        return job.future

    def stop(self) -> None:
        """End the thread after its pass; what still waits fails as stopping."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify()
        self._thread.join(STOP_SECONDS)

    def retire(self) -> None:
        """End the thread, and let go of the encoder, once everything that waits is done."""
        with self._condition:
            self._is_retired = True
            self._condition.notify()

    def _work(self) -> None:
        if self._on_start is not None:
            self._on_start()
        while taken := self._wait():
            self._encode(taken)
        while self._jobs:
            self._finish(self._jobs.popleft(), Kind.STOPPING())

    def _wait(self) -> list[tuple[_Job, str]]:
        """Return the texts of the next pass, nothing when the queue stops."""
        with self._condition:
            while not self._is_stopping:
                if (taken := self._take()) or self._is_retired:
                    return taken
                self._condition.wait()
        return []

    def _take(self) -> list[tuple[_Job, str]]:
        """Take a text of each request of one kind in turn, until the pass is full; one at least."""
        taken: list[tuple[_Job, str]] = []
        left: list[_Job] = []
        kind, num_bytes = None, 0
        while self._jobs:
            job = self._jobs.popleft()
            if job.is_over or job.future.cancelled():
                self._waiting_bytes -= sum(job.sizes[job.num_taken :])
                continue
            size = job.sizes[job.num_taken]
            if taken and (job.kind != kind or num_bytes + size > MAX_PASS_BYTES):
                left.append(job)
                continue
            taken.append((job, job.texts[job.num_taken]))
            kind = job.kind
            num_bytes += size
            self._waiting_bytes -= size
            job.num_taken += 1
            if job.num_taken < len(job.texts):
                self._jobs.append(job)
        self._jobs.extend(left)
        return taken

    def _encode(self, taken: Sequence[tuple[_Job, str]]) -> None:
        started_seconds = time.perf_counter()
        outcomes = self._outcomes([text for _, text in taken], taken[0][0].kind)
        self._observe(len(taken), time.perf_counter() - started_seconds)
        for (job, _), outcome in zip(taken, outcomes, strict=True):
            if not job.is_over and not isinstance(outcome, ProblemError):
                job.rows.append(outcome)
                outcome = _joined(job.rows) if len(job.rows) == len(job.texts) else None
            if not job.is_over and outcome is not None:
                self._finish(job, outcome)

    def _outcomes(self, texts: Sequence[str], kind: TextKind) -> Sequence[Vectors | ProblemError]:
        """Return each text's vectors or problem; where the encoder fails in any way, each is tried alone."""
        try:
            encoded = self._encoded(list(texts), kind)
            vectors = encoded.vectors_QV if isinstance(encoded, EncodedQueries) else encoded
            if vectors.shape == (len(texts), self.encoder.vector_dim) and np.isfinite(vectors).all():
                return list(encoded) if isinstance(encoded, np.ndarray) else encoded.split()
            fault = "vectors-not-finite"
        except (EndpointDownError, FingerprintMismatchError) as error:
            log.error("serve.endpoint_failed texts=%d sentence=%s", len(texts), error)  # noqa: TRY400 - it says it
            return [search_problem(error)] * len(texts)
        except BaseException as error:  # noqa: BLE001 - a model may raise anything, a tokenizer's panic too
            fault = type(error).__name__  # its message may hold text
        log.error("serve.encoder_failed texts=%d error=%s", len(texts), fault)
        if len(texts) > 1:
            return [self._outcomes([text], kind)[0] for text in texts]
        return [Kind.ENCODER_FAILED("the model gave no vector; the server's log says more")]

    def _encoded(self, texts: list[str], kind: TextKind) -> Vectors:
        if kind == "search":
            return encode_for_search(self.encoder, texts)
        return self.encoder.encode_queries(texts) if kind == "query" else self.encoder.encode_documents(texts)

    def _finish(self, job: _Job, outcome: Vectors | ProblemError) -> None:
        job.is_over = True
        if not job.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, ProblemError):
            job.future.set_exception(outcome)
        else:
            job.future.set_result(outcome)


def _joined(rows: Sequence[Vectors]) -> Vectors:
    """Return the vectors of a request's texts, of which there is one each."""
    parts = [row for row in rows if isinstance(row, EncodedQueries)]
    if parts:
        return EncodedQueries.joined(parts)
    return np.stack([row for row in rows if isinstance(row, np.ndarray)])
