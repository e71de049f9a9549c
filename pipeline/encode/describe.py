"""A line by a language model that situates each chunk in its document, asked of any OpenAI-compatible server.

    <document> … </document>   alike for the chunks of a document, so that a server's prefix cache serves it
    <passage> … </passage>     ─▶ /v1/chat/completions ─▶ one line, before the chunk in its vector and in BM25

A document beyond ``describe_characters`` is cut around the chunk: its opening, a sixth, then a window that
begins at a multiple of half its length, so that neighbouring chunks share one. The chunk stands a quarter of
the window from either end, where the document has so much.

A refusal, an empty answer and an overlong one cost their chunk its line; a model that gives none to a small
question is asked for no more. An answer is kept by the hash of what was asked before the next is waited for.
Nothing is shown of a line, and no offset counts it.

Source: Anthropic, Contextual Retrieval (2024). Differs: one sentence instead of 50 to 100 tokens; the title
stands with the document.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from cairn.pipeline.config import EncoderConfig, is_encodable
from cairn.pipeline.encode.endpoint_requests import (
    CLOSE_SECONDS,
    INGEST,
    Address,
    Patience,
    RefusedRequestError,
    Server,
)
from cairn.pipeline.encode.paid import PaidAnswers
from cairn.pipeline.errors import ConfigError
from jaxtyping import Int64

log = logging.getLogger(__name__)

DESCRIBE_KEY_VARIABLE: Final = "CAIRN_DESCRIBE_KEY"
DESCRIBE_VERSION: Final = 1
"""Raised when the same settings begin to ask for other lines."""
OPENING_SHARE: Final = 6
"""What of a long document is its opening: one part in so many."""
MOST_CHARACTERS: Final = 400
"""A longer answer is no line: the sentence that is asked for has half of it."""
TYPICAL_LINE_TOKENS: Final = 40
LIMITS: Final[Sequence[Mapping[str, int]]] = (
    {"max_tokens": 160, "temperature": 0},
    {"max_completion_tokens": 2_000},
)
"""How an answer is bounded: as most servers take it, and as models that think before they answer."""

_THOUGHTS: Final = re.compile(r"\A\s*<think>.*?(</think>|\Z)", re.DOTALL)
"""What some servers leave of a model's thinking in front of its answer."""

_QUESTION: Final = (
    "\n\nThis passage is from the document above:\n<passage>\n{}\n</passage>\n\n"
    "Write one sentence of at most 30 words that situates the passage in the document, so that a search "
    "finds it: what it is about, and what it leaves unsaid because the document says it elsewhere. Write in "
    "the document's language. Answer with the sentence alone."
)


@dataclass(frozen=True, slots=True)
class _Passage:
    """A chunk of a document, by its characters."""

    title: str
    text: str
    start: int
    end: int

    def question(self, budget: int) -> str:
        """Return what is asked about it: the document, at most ``budget`` characters of it, comes first."""
        title = f"{self.title}\n\n" if self.title else ""
        around = document_around(self.text, self.start, self.end, budget)
        passage = self.text[self.start : self.end].strip()
        return f"<document>\n{title}{around}\n</document>{_QUESTION.format(passage)}"


def _passages(
    texts: Sequence[str],
    titles: Sequence[str],
    chunk_offsets: Int64[np.ndarray, " N1"],
    start_char: Int64[np.ndarray, " M"],
    end_char: Int64[np.ndarray, " M"],
) -> Iterator[_Passage]:
    owners = np.repeat(np.arange(len(texts)), np.diff(chunk_offsets)).tolist()
    for owner, start, end in zip(owners, start_char.tolist(), end_char.tolist(), strict=True):
        yield _Passage(titles[owner], texts[owner], start, end)


def document_around(text: str, start: int, end: int, budget: int) -> str:
    """Return a document, or its opening and a window around some of its characters where it is too long."""
    if len(text) <= budget:
        return text
    opening = budget // OPENING_SHARE
    step = (budget - opening) // 2
    first = max(0, round((start + end) / 2 / step) - 1) * step
    window = text[max(first, opening) : first + 2 * step]
    gap = "\n[…]\n" if first > opening else ""
    more = "\n[…]" if first + 2 * step < len(text) else ""
    return f"{text[:opening]}{gap}{window}{more}"


def require_describer(config: EncoderConfig) -> Address | None:
    """Return where lines are asked for, None where none are; another address raises ConfigError."""
    if not config.describe:
        return None
    return Address.of(f"{config.describe}#{config.describe_model}", "chat/completions", DESCRIBE_KEY_VARIABLE)


def described_by(config: EncoderConfig) -> dict[str, Any]:
    """Return what a fingerprint has of lines: how they are asked for and of what model, not where it runs."""
    if not config.describe:
        return {}
    return {"described": [DESCRIBE_VERSION, config.describe_model, config.describe_characters]}


class Describer:
    """Asks for lines; nothing is opened before the first."""

    def __init__(self, config: EncoderConfig, patience: Patience | None = None) -> None:
        address = require_describer(config)
        assert address is not None, "settings without describe"
        self._address, self._config = address, config
        self._patience = patience or INGEST
        self._server: Server | None = None
        self._limit: Mapping[str, int] | None = None
        self._lock = threading.Lock()
        self._paid = PaidAnswers()

    @classmethod
    def of(cls, config: EncoderConfig, patience: Patience | None = None) -> Describer | None:
        """Return what describes the chunks of an encoder, None where nothing does."""
        return cls(config, patience) if config.describe else None

    def lines(
        self,
        texts: Sequence[str],
        titles: Sequence[str | None] | None,
        chunk_offsets: Int64[np.ndarray, " N1"],
        start_char: Int64[np.ndarray, " M"],
        end_char: Int64[np.ndarray, " M"],
    ) -> list[str]:
        """Return a line for each chunk, "" for one that has none."""
        heads = [""] * len(texts) if titles is None else [(title or "").strip() for title in titles]
        passages = list(_passages(texts, heads, chunk_offsets, start_char, end_char))
        keys = [self._key(passage) for passage in passages]
        of_key = dict(zip(keys, passages, strict=True))
        found = self._paid.answers(
            keys, lambda missing: self._ask_all({key: of_key[key] for key in missing}), bytes.decode
        )
        return [found[key] for key in keys]

    def _ask_all(self, missing: Mapping[bytes, _Passage]) -> dict[bytes, str]:
        server = self._open()  # before all threads find out what the server refuses
        started = time.monotonic()
        found = server.side_by_side({key: partial(self._ask, key, each) for key, each in missing.items()})
        without = sum(not line for line in found.values())
        seconds = time.monotonic() - started
        log.info("describe.asked chunks=%d without=%d seconds=%.1f", len(found), without, seconds)
        return found

    def question_characters(
        self,
        texts: Sequence[str],
        chunk_offsets: Int64[np.ndarray, " N1"],
        start_char: Int64[np.ndarray, " M"],
        end_char: Int64[np.ndarray, " M"],
    ) -> int:
        """Count the characters of all questions about chunks of documents, without titles."""
        passages = _passages(texts, [""] * len(texts), chunk_offsets, start_char, end_char)
        return sum(len(passage.question(self._config.describe_characters)) for passage in passages)

    def seconds_a_line(self, characters: int) -> float:
        """Time a request of so many characters, of words that stand in no document."""
        words = ("harbour ", "bearing ", "table ", "ferry ", "limit ", "price ")
        text = "".join(words[place * 7 % 6] for place in range(characters // 7))
        server = self._open()
        started = time.monotonic()
        server.run(self._ask(b"", _Passage("", text, 0, 200)))
        return (time.monotonic() - started) / self._config.endpoint_requests

    def keep_paid(self, path: Path | None) -> None:
        """Keep every answer in a file from here on, and ask for nothing that it holds; None ends that."""
        self._paid.close()
        self._paid = PaidAnswers(path)

    def keep_known(self, title: str | None, text: str, chunks: Sequence[Mapping[str, Any]]) -> None:
        """Keep the lines of a document's chunks, which have ``start_char``, ``end_char`` and ``line``."""
        head = (title or "").strip()
        known = {
            self._key(_Passage(head, text, chunk["start_char"], chunk["end_char"])): chunk["line"].encode()
            for chunk in chunks
            if chunk["line"]
        }
        self._paid.keep(known)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Keep the lines that are answered within so many seconds, and close connections and files."""
        if self._server is not None:
            self._server.close(seconds)
        self.keep_paid(None)

    def _open(self) -> Server:
        """Connect, and find out by a small question under which bound the server gives a line."""
        with self._lock:
            server = self._server = self._server or Server(
                self._address,
                num_requests=self._config.endpoint_requests,
                gives="a chat completion in JSON",
                key_variable=DESCRIBE_KEY_VARIABLE,
            )
            if self._limit is not None:
                return server
            refused, is_silent = "", False
            small = _Passage("", "The ferry stays in the harbour.", 0, 31)
            for limit in LIMITS:
                try:
                    line = server.run(self._ask_once(limit, small))
                except RefusedRequestError as error:
                    refused = refused or str(error)
                else:
                    if line:
                        self._limit = limit
                        return server
                    is_silent = True
            server.close()
            self._server = None
            if is_silent:
                raise ConfigError(
                    f"the language model {self._address.describe()} must answer a small question with one "
                    "sentence, got none; switch the model's thinking off, or choose another"
                )
            raise ConfigError(refused)

    async def _ask(self, key: bytes, passage: _Passage) -> str:
        """Ask for a line and keep it; "" where the server refuses this chunk."""
        assert self._limit is not None, "lines open it"
        line = ""
        with suppress(RefusedRequestError):
            line = await self._ask_once(self._limit, passage)
        self._paid.keep({key: line.encode()})
        return line

    async def _ask_once(self, limit: Mapping[str, int], passage: _Passage) -> str:
        assert self._server is not None, "lines open it"
        question = passage.question(self._config.describe_characters)
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": question}], **limit}
        if self._address.name:
            asked["model"] = self._address.name
        return await self._server.ask(asked, _line_of, self._patience)

    def _key(self, passage: _Passage) -> bytes:
        question = passage.question(self._config.describe_characters)
        return hashlib.sha256(f"{self._address.name}\n{question}".encode()).digest()


def _line_of(reply: Any) -> str:
    """Read the line of an answer, "" where it is none; another answer raises ValueError and the like."""
    choice = reply["choices"][0]
    content = choice["message"].get("content") or ""
    if not isinstance(content, str):
        raise ValueError("no text")  # noqa: TRY004 - it is the server's fault, told in one sentence
    line = " ".join(_THOUGHTS.sub("", content).split())
    is_cut = choice.get("finish_reason") in ("length", "content_filter")
    is_refused = is_cut or bool(choice["message"].get("refusal"))
    return "" if is_refused or len(line) > MOST_CHARACTERS or not is_encodable(line) else line
