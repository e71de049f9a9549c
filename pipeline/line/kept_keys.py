"""Idempotency keys of writes, and what was answered to them: the last ones, in a bounded space.

They stand in the log of the writes, each in the record of its write, and outlive a kill with it.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from cairn.pipeline.errors import KeyReusedError

KEPT_KEYS: Final = 1_000
KEPT_DOCUMENTS: Final = 20_000
"""That the answers name, all together: some 4 MB."""


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
