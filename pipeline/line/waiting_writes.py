"""Writes that were acknowledged and wait to be published, in one order, and the idempotency keys of the last.

There is a bounded number of both. Keys stand in the log of the writes, each with what was answered in the
record of its write, and outlive a kill with it.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import pyarrow as pa
from cairn.pipeline.errors import KeyReusedError, WritesWaitingError
from cairn.pipeline.types import IngestReport

MAX_WAITING_DOCUMENTS: Final = 10_000
MAX_WAITING_BYTES: Final = 64 << 20
PUBLICATION_BYTES: Final = 512 << 10
"""About 130,000 tokens, some 15 s on two cores: what may delay the writes behind them."""

KEPT_KEYS: Final = 1_000
KEPT_DOCUMENTS: Final = 20_000
"""That the answers name, all together: some 4 MB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of a write; ``generation`` is the one that has it, ``fault`` says why none ever will.

    ``report`` is of an ingested source.
    """

    state: Literal["waiting", "searchable", "failed"]
    generation: int | None = None
    fault: str | None = None
    report: IngestReport | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Write:
    """Rows, ids to delete, or a source; ``position`` is its place in the log."""

    number: int
    position: int
    num_bytes: int
    rows: pa.RecordBatch | None = None
    deleted: Sequence[str] = ()
    source: str | None = None
    published: Future[Outcome] = field(default_factory=Future[Outcome])

    @property
    def num_documents(self) -> int:
        """One at least, so that no number of writes is without bound."""
        return max(1, (0 if self.rows is None else self.rows.num_rows) + len(self.deleted))


class WaitingWrites:
    """The writes, oldest first; ``newest`` has the last write of an id and its row, None if it deletes it."""

    def __init__(self) -> None:
        self._writes: deque[Write] = deque()
        self._num_documents = self._num_bytes = 0
        self.newest: dict[str, tuple[Write, int | None]] = {}

    def __len__(self) -> int:
        return len(self._writes)

    def add(self, write: Write) -> None:
        """Let a write wait behind the others."""
        doc_ids = [] if write.rows is None else write.rows.column("doc_id").to_pylist()
        self.newest.update({doc_id: (write, row) for row, doc_id in enumerate(doc_ids)})
        self.newest.update(dict.fromkeys(write.deleted, (write, None)))
        self._writes.append(write)
        self._num_documents += write.num_documents
        self._num_bytes += write.num_bytes

    def require_room(self) -> None:
        """Raise :class:`WritesWaitingError` where no more may wait."""
        if self._num_documents >= MAX_WAITING_DOCUMENTS or self._num_bytes > MAX_WAITING_BYTES:
            raise WritesWaitingError(
                f"at most {MAX_WAITING_DOCUMENTS:,} documents may wait to be published, got more; try again"
            )

    def all(self) -> list[Write]:
        """Return all of them."""
        return list(self._writes)

    def first(self) -> list[Write]:
        """Return what one publication takes: a source, or small writes together."""
        taken: list[Write] = []
        num_bytes = 0
        for write in self._writes:
            num_bytes += write.num_bytes
            if taken and (write.source or taken[0].source or num_bytes > PUBLICATION_BYTES):
                break
            taken.append(write)
        return taken

    def drop(self, writes: Sequence[Write]) -> None:
        """Let go of the oldest writes."""
        for write in writes:
            self._writes.popleft()
            self._num_documents -= write.num_documents
            self._num_bytes -= write.num_bytes
        last = writes[-1].number
        self.newest = {doc_id: newest for doc_id, newest in self.newest.items() if newest[0].number > last}

    def published(self, number: int) -> Future[Outcome] | None:
        """Return what resolves to the outcome of a write, None where it does not wait."""
        return next((write.published for write in self._writes if write.number == number), None)

    @property
    def position(self) -> int | None:
        """Where in the log the oldest is, None where nothing waits."""
        return self._writes[0].position if self._writes else None


class KeptKeys:
    """The last keys, oldest first: ``answers`` has the digest of a request, its write and the answer."""

    def __init__(self) -> None:
        self.answers: OrderedDict[str, tuple[str, int, Mapping[str, Any]]] = OrderedDict()
        self._num_documents = 0

    def add(self, keys: Mapping[str, Sequence[Any]]) -> None:
        """Keep what came with these keys, and of older ones as many as there is room for."""
        for key, (digest, number, answer) in keys.items():
            if key not in self.answers:
                self.answers[key] = digest, number, answer
                self._num_documents += _num_named(answer)
        while len(self.answers) > KEPT_KEYS or (
            self._num_documents > KEPT_DOCUMENTS and len(self.answers) > 1
        ):
            _, (_, _, answer) = self.answers.popitem(last=False)
            self._num_documents -= _num_named(answer)

    def find(self, key: str, digest: str) -> tuple[int, Mapping[str, Any]] | None:
        """Return the write that came with a key, and its answer; None of a key that is not known.

        Raises :class:`KeyReusedError` where it came with another request.
        """
        if key not in self.answers:
            return None
        known, number, answer = self.answers[key]
        if known != digest:
            raise KeyReusedError(
                "an idempotency key must come with one request, got another one; choose a new key"
            )
        return number, answer


def digest_of(asked: Any) -> str:
    """Return what tells a request from others."""
    content = json.dumps(asked, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _num_named(answer: Mapping[str, Any]) -> int:
    return len(answer.get("documents", ())) + len(answer.get("missing", ()))
