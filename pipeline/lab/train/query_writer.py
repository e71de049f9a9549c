"""Queries that a language model writes behind an OpenAI-compatible address: one a section of a document.

    title, section ─▶ POST /v1/chat/completions ─▶ {"query": "…"} ─▶ written_queries.jsonl of the run

Nothing is asked unless an address is given. A refusal, an answer without a query and an address that does not
answer in time cost one pair each; what came of each section is kept in the run's folder, so that the same
command asks for nothing twice and goes on with the same pairs. A wrong key or model, and several sections in
a row without an answer, end the run.

Source: NV-Embed §4.3, synthetic examples by a language model. Differs: one query for a passage that is
there, instead of tasks, queries and passages all made up.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx2
from cairn.pipeline.client.clients import Connection, retry_after_seconds
from cairn.pipeline.errors import ConfigError, TryAgainError
from cairn.pipeline.lab.train.log import TrainingLog, read_log
from cairn.pipeline.options import About, check_options, option

KEY_VARIABLE: Final = "CAIRN_QUERY_WRITER_KEY"
FILE_NAME: Final = "written_queries.jsonl"

PROMPT: Final = (
    "You write search queries. Write one query that a reader would type who needs the passage below and has "
    "not seen it. Do not mention the passage. Answer with JSON alone: "
)
_FORM: Final = '{"query": "…"}'

MAX_ATTEMPTS: Final = 3
FIRST_WAIT_SECONDS: Final = 0.5
LONGEST_WAIT_SECONDS: Final = 30.0
MAX_SILENT: Final = 3
"""Sections in a row without an answer, after which the address is taken to be down."""

MAX_ANSWER_BYTES: Final = 1 << 18
MAX_ANSWER_TOKENS: Final = 256
MAX_QUERY_CHARACTERS: Final = 300
NO_ANSWER: Final = "query writer gave no answer"
_OK: Final = 200
_NOT_ALLOWED: Final = frozenset({401, 403, 404, 405})
"""Statuses that another section would get, too."""
_TOO_MANY_REQUESTS: Final = 429
_SERVER_FAULT: Final = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class QueryWriterConfig:
    """Who writes queries for ``--documents``; the key is read from ``CAIRN_QUERY_WRITER_KEY``."""

    query_writer: str | None = option(
        None,
        About(
            "Address of an OpenAI-compatible server whose model writes the queries of --documents.",
            default_text="none: queries are cut from the documents",
        ),
    )
    query_writer_model: str | None = option(None, About("Name of that model.", default_text="none"))
    query_writer_timeout_seconds: float = option(
        60.0, About("Wait so long for an answer.", above=0, high=3_600)
    )

    def __post_init__(self) -> None:
        check_options(self)
        if (self.query_writer is None) != (self.query_writer_model is None):
            raise ConfigError(
                "query_writer and query_writer_model must be given together, got one alone; give both"
            )


class QueryWriter:
    """Asks for queries, and keeps what came in ``folder``; made for one run, not shared between threads."""

    def __init__(self, config: QueryWriterConfig, folder: Path) -> None:
        assert config.query_writer is not None
        assert config.query_writer_model is not None
        key = os.environ.get(KEY_VARIABLE) or None
        if key is not None and not (key.isascii() and key.isprintable() and key.strip()):
            raise ConfigError(f"{KEY_VARIABLE} must be one line of printable ASCII, got something else")
        self._connection = Connection(
            base_url=config.query_writer, timeout_seconds=config.query_writer_timeout_seconds, api_key=key
        )
        self._model = config.query_writer_model
        path = folder / FILE_NAME
        self._kept = {item["key"]: (item["query"], item["reason"]) for item in read_log(path)}
        # A line that a kill cut off is asked for again.
        self._log = TrainingLog(path, path.read_bytes().rfind(b"\n") + 1 if path.is_file() else 0)
        self._silent: list[str] = []

    def write(self, title: str, section: str) -> tuple[str, str] | str:
        """Return a query and the section, or why there is none.

        A server that refuses the key or the address raises :class:`ConfigError`. One that does not answer for
        three sections in a row raises :class:`TryAgainError`, and the same call asks for them again.
        """
        key = hashlib.sha256(json.dumps([PROMPT, self._model, title, section]).encode()).hexdigest()
        if key not in self._kept:
            answer = self._ask(title, section, key)
            if answer is None:
                return NO_ANSWER
            self.finish()
            self._keep(key, *parse_query(answer))
        query, reason = self._kept[key]
        return (query, section) if query else reason

    def finish(self) -> None:
        """Keep of sections without an answer that they have none: the server is not down."""
        for key in self._silent:
            self._keep(key, "", NO_ANSWER)
        self._silent = []

    def _keep(self, key: str, query: str, reason: str) -> None:
        self._kept[key] = (query, reason)
        self._log.append({"key": key, "query": query, "reason": reason})

    def _ask(self, title: str, section: str, key: str) -> Any:
        """Return the body of an answer, None where none came; what is no JSON is {}."""
        passage = f"Title: {title}\n\n{section}" if title else section
        request = {
            "model": self._model,
            "messages": [
                {"role": "system", "content": PROMPT + _FORM},
                {"role": "user", "content": passage},
            ],
            "temperature": 0,
            "max_tokens": MAX_ANSWER_TOKENS,
        }
        wait, why = FIRST_WAIT_SECONDS, ""
        with httpx2.Client(**self._connection.settings()) as client:
            for attempt in range(MAX_ATTEMPTS):
                if attempt:
                    time.sleep(min(wait, LONGEST_WAIT_SECONDS))
                try:
                    status, headers, body = _post(client, request, self._connection.timeout_seconds)
                except httpx2.HTTPError as error:
                    why, wait = str(error) or type(error).__name__, 2 * wait
                    continue
                if status == _OK:
                    return body
                if status in _NOT_ALLOWED:
                    raise ConfigError(
                        f"the query writer must take the request, got status {status} from "
                        f"{self._connection.shown_url}; check its address, --query-writer-model and "
                        f"{KEY_VARIABLE}"
                    )
                why = f"status {status}"
                if status != _TOO_MANY_REQUESTS and status < _SERVER_FAULT:
                    break
                asked = retry_after_seconds(headers.get("retry-after"))
                wait = 2 * wait if asked is None else asked
        self._silent.append(key)
        if len(self._silent) == MAX_SILENT:
            raise TryAgainError(
                f"the query writer at {self._connection.shown_url} gave no answer for {MAX_SILENT} sections "
                f"in a row ({why}); check --query-writer-model, and run the same command again"
            )
        return None


def _post(
    client: httpx2.Client, request: dict[str, Any], timeout_seconds: float
) -> tuple[int, httpx2.Headers, Any]:
    """Return status, headers and the JSON of an answer, {} for another; it is read up to a bound."""
    with client.stream("POST", "/v1/chat/completions", json=request) as response:
        content, started = b"", time.monotonic()
        for piece in response.iter_bytes():
            content += piece
            if time.monotonic() - started > timeout_seconds:
                raise httpx2.ReadTimeout("its answer took too long")
            if len(content) > MAX_ANSWER_BYTES:
                return response.status_code, response.headers, {}
    try:
        return response.status_code, response.headers, json.loads(content)
    except (ValueError, RecursionError):
        return response.status_code, response.headers, {}


def parse_query(body: Any) -> tuple[str, str]:
    """Return the query of a chat completion and "", else "" and why there is none."""
    try:
        choice = body["choices"][0]
        content = choice["message"]["content"]
        if choice["message"].get("refusal") or choice.get("finish_reason") == "content_filter":
            return "", "query writer refused"
        found = json.loads(content.strip().removeprefix("```json").strip("`"))["query"]
        query = " ".join(found.split())
        query.encode()
    except (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError):
        return "", "query writer answered without a query"
    if not query or len(query) > MAX_QUERY_CHARACTERS:
        return "", "query writer answered without a query"
    return query, ""
