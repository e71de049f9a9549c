"""What routes share: the server's state, a grant of the needed scope, and a search from options to JSON.

A search may turn the pages of one ranking. A cursor holds a hash of the generation, the offset and a hash of
the request. It is a small JSON object in base64, not signed. A forged one can only name another place in the
same ranking, since filters come with the request and the key, never with the cursor. The generation is that
of one collection: a name that was switched to another one has no further page, even where the numbers are the
same.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Annotated, Any, Concatenate, Final, ParamSpec, TypeVar, cast, get_origin

import numpy as np
from cairn.pipeline.client.errors import FieldProblem
from cairn.pipeline.errors import (
    CairnError,
    CollectionNotFoundError,
    FingerprintMismatchError,
    IntegrityError,
)
from cairn.pipeline.search.rerank import reranked, widened
from cairn.pipeline.search.searcher import check_queries
from cairn.pipeline.search.served import Served
from cairn.pipeline.search_options import MAX_TOP_K, SearchKeywords, SearchOptions
from cairn.pipeline.serve.collections import Collections, ServedCollection
from cairn.pipeline.serve.corpus_map import MapCache
from cairn.pipeline.serve.feedback_log import FeedbackLog
from cairn.pipeline.serve.file_ingestion import FileIngestion
from cairn.pipeline.serve.keys import Grant, Keyring
from cairn.pipeline.serve.metrics import Metrics, stage
from cairn.pipeline.serve.middleware import GRANT
from cairn.pipeline.serve.problems import (
    CURSOR_EXPIRED,
    INVALID_CURSOR,
    INVALID_REQUEST,
    READ_ONLY,
    RERANKER_FAILED,
    SCOPE_MISSING,
    ProblemError,
    contract,
    invalid_request,
    search_problem,
    unknown_collection,
    unknown_names,
)
from cairn.pipeline.serve.schemas import (
    MAX_ANSWER_TOKENS,
    MAX_RERANK_PAIRS,
    MAX_TOLD,
    START_CURSOR,
    CollectionName,
    SearchReplies,
    SearchReply,
    SearchRequest,
    answer_tokens,
    rerank_pairs,
    search_keywords,
)
from cairn.pipeline.serve.settings import ServeSettings
from cairn.pipeline.serve.uploads import Uploads
from cairn.pipeline.serve.writers import Writers
from cairn.pipeline.types import Hit, Reranker, SearchResult, json_value
from fastapi import APIRouter, Depends, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic_core import to_json

_Result = TypeVar("_Result")


@dataclass(slots=True)
class SearchThreads:
    """Threads for the blocking work of requests, reading and ranking, never encoding; calls are timed."""

    pool: ThreadPoolExecutor
    num_threads: int
    observe_seconds: Callable[[float], None]
    _num_asked: int = 0

    @property
    def is_busy(self) -> bool:
        """Tell whether calls wait for a thread."""
        return self._num_asked > self.num_threads

    async def run(self, call: Callable[[], _Result]) -> _Result:
        """Await a blocking call; used from one event loop."""

        def timed() -> _Result:
            started_seconds = time.perf_counter()
            try:
                return call()
            finally:
                self.observe_seconds(time.perf_counter() - started_seconds)

        self._num_asked += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.pool, timed)
        finally:
            self._num_asked -= 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerState:
    """Everything the routes of one server share."""

    settings: ServeSettings
    keyring: Keyring
    collections: Collections
    metrics: Metrics
    search_threads: SearchThreads
    rerank_pool: ThreadPoolExecutor
    reranker: Reranker | None
    maps: MapCache
    feedback: FeedbackLog | None
    writers: Writers
    uploads: Uploads
    ingestion: FileIngestion


async def _state(request: Request) -> ServerState:
    return cast(ServerState, request.app.state.server)


def _scope(name: str) -> Callable[[Request], Any]:
    async def require(request: Request) -> Grant:
        grant = cast(Grant, request.scope[GRANT])
        if name not in grant.scopes:
            raise ProblemError(SCOPE_MISSING, f"this address needs a key with the scope {name}")
        return grant

    return require


async def _require_whole_server(request: Request) -> Grant:
    """Return a grant of the scope admin for all collections and documents, as figures are of all."""
    grant = await _scope("admin")(request)
    if grant.collections is not None or grant.restriction is not None:
        raise ProblemError(
            SCOPE_MISSING,
            "the server's figures are of all collections: they need a key without a filter and for all "
            "of them",
        )
    return grant


async def _require_writable(request: Request) -> Grant:
    """Return a grant of the scope write, where the server takes writes."""
    grant = await _scope("write")(request)
    if grant.restriction is not None:
        raise ProblemError(SCOPE_MISSING, "writes are for all documents: send no X-Cairn-Principal")
    if not cast(ServerState, request.app.state.server).settings.writable:
        raise ProblemError(READ_ONLY, "start it with --writable")
    return grant


def may_write(state: ServerState, grant: Grant) -> bool:
    """Tell whether a grant may write here."""
    return state.settings.writable and "write" in grant.scopes and grant.restriction is None


State = Annotated[ServerState, Depends(_state)]
SearchGrant = Annotated[Grant, Depends(_scope("search"))]
EmbedGrant = Annotated[Grant, Depends(_scope("embed"))]
WriteGrant = Annotated[Grant, Depends(_require_writable)]
AdminGrant = Annotated[Grant, Depends(_require_whole_server)]


async def reachable(state: ServerState, grant: Grant, name: str) -> ServedCollection:
    """Return an opened collection that the grant is for; others look unknown."""
    if not grant.reaches(name):
        raise unknown_collection()
    return await state.collections.get(name)


async def refuse_unknown_parameters(request: Request) -> None:
    """Refuse query parameters that the route does not declare, or that come twice."""
    if not request.scope["query_string"]:
        return
    taken = dict(_query_parameters(cast(APIRoute, request.scope["route"]).dependant))
    advice = f"this address takes {', '.join(taken)}" if taken else "this address takes none"
    if request.method == "POST" and not taken:
        advice += ": what is asked goes into the body"
    sent = Counter(name for name, _ in request.query_params.multi_items())
    wrong = unknown_names("query", [name for name in sent if name not in taken][:MAX_TOLD], advice)
    wrong += [
        FieldProblem(pointer=f"query/{name}", detail="there must be one of it")
        for name, count in sent.items()
        if count > 1 and taken.get(name) is False
    ]
    if wrong:
        raise invalid_request(*wrong)


def _query_parameters(dependant: Dependant) -> Iterator[tuple[str, bool]]:
    """Give the name of each parameter, and whether it may come more than once."""
    for field in dependant.query_params:
        yield field.alias, get_origin(field.field_info.annotation) is list
    for each in dependant.dependencies:
        yield from _query_parameters(each)


log = logging.getLogger(__name__)

_Reply = TypeVar("_Reply")
_Arguments = ParamSpec("_Arguments")


async def search(
    state: ServerState,
    grant: Grant,
    name: str,
    queries: Sequence[str],
    options: SearchKeywords,
    *,
    rerank: bool = False,
    vector: Sequence[float] | None = None,
) -> list[SearchResult]:
    """Answer queries from one generation within the grant's restriction; ``vector`` is a single query's."""
    reranker = _reranker(state) if rerank else None
    served = await reachable(state, grant, name)
    try:
        keywords: SearchKeywords = {
            **options,
            "restriction": grant.restriction,
            "hide_word_statistics": state.settings.hide_word_statistics,
        }
        asked = SearchOptions(**keywords)
        check_queries(queries)
        chosen = asked if reranker is None else widened(asked)
    except CairnError as error:
        raise search_problem(error) from None

    async def attempt(opened: ServedCollection) -> list[SearchResult]:
        encoded = None if vector is None else np.array([vector])
        if encoded is None:
            with stage("search.encode"):
                encoded = await opened.encoder.encode(queries, "search")
        with stage("search.rank"):
            return await state.search_threads.run(
                lambda: opened.searcher.answer(queries, chosen, encoded=encoded)
            )

    with stage("search", collection=name, queries=len(queries)):
        results = await with_collection(state, served, attempt)
    state.metrics.generation.labels(name).set(results[0].generation)
    if reranker is not None:
        with stage("search.rerank"):
            results = await _reranked(state, reranker, results, asked)
    if state.feedback is not None and asked.offset == 0:  # a further page is no other query
        state.feedback.searched(name, results)
    return results


async def read_from(
    state: ServerState, grant: Grant, name: str, read: Callable[[ServedCollection], _Reply]
) -> _Reply:
    """Return what a search thread reads of a collection that the grant reaches."""

    async def attempt(opened: ServedCollection) -> _Reply:
        return await state.search_threads.run(lambda: read(opened))

    return await with_collection(state, await reachable(state, grant, name), attempt)


async def read_generation(
    state: ServerState,
    grant: Grant,
    name: str,
    read: Callable[Concatenate[Served, _Arguments], _Reply],
    *args: _Arguments.args,
    **keywords: _Arguments.kwargs,
) -> _Reply:
    """Return what a search thread reads of the generation that answers."""
    return await read_from(
        state, grant, name, lambda served: served.searcher.reading(read, *args, **keywords)
    )


def _reranker(state: ServerState) -> Reranker:
    if state.reranker is None:
        field = FieldProblem(pointer="#/rerank", detail="this server has no cross-encoder; leave it out")
        raise invalid_request(field)
    return state.reranker


async def _reranked(
    state: ServerState, reranker: Reranker, results: Sequence[SearchResult], asked: SearchOptions
) -> list[SearchResult]:
    """Judge answers again, on the thread of the cross-encoder, one after another."""
    found: list[SearchResult] = []
    for result in results:
        try:
            found.append(
                await asyncio.get_running_loop().run_in_executor(
                    state.rerank_pool, reranked, result, reranker, asked
                )
            )
        except CairnError as error:
            log.error("serve.reranker_failed error=%s", type(error).__name__)  # noqa: TRY400 - its message may hold text
            raise ProblemError(
                RERANKER_FAILED, "the model gave no score; the server's log says more"
            ) from None
    return found


async def with_collection(
    state: ServerState, served: ServedCollection, attempt: Callable[[ServedCollection], Awaitable[_Reply]]
) -> _Reply:
    """Await ``attempt(collection)``; errors become problems.

    Where another encoder has made the newest generation, the collection is opened and asked once more; where
    no generation is whole, it is mended and asked again.
    """
    try:
        try:
            reply = await attempt(served)
        except FingerprintMismatchError:
            reply = await attempt(await state.collections.reopen(served))
        except IntegrityError:
            if not await state.collections.is_healed(served.name):
                raise
            reply = await attempt(served)
    except CollectionNotFoundError as error:
        state.collections.forget(served)
        raise search_problem(error) from None
    except CairnError as error:
        problem = search_problem(error)
        if problem.kind.status >= 500:
            log.error(  # noqa: TRY400 - the sentence says it
                "serve.read_failed collection=%s error=%s sentence=%s",
                served.name,
                type(error).__name__,
                contract(error),
            )
        raise problem from error
    state.collections.heal_outdated(served)
    return reply


def json_response(reply: Mapping[str, Any]) -> Response:
    """Return fields of a schema, in its order, as JSON: to make its objects first takes twice as long."""
    return Response(to_json(reply, inf_nan_mode="null"), media_type="application/json")


def hit_reply(hit: Hit, *, include_text: bool) -> Hit:
    """Return a hit as a :class:`HitReply` has it."""
    without_text = [] if include_text else [replace(each, text=cast("str", None)) for each in hit.passages]
    metadata = {name: json_value(value) for name, value in hit.metadata.items()}
    return replace(hit, metadata=metadata, passages=without_text or hit.passages)


router = APIRouter(tags=["search"])


@router.post("/v1/collections/{name}/search", response_model=SearchReply | SearchReplies)
async def search_collection(
    name: CollectionName, request: SearchRequest, state: State, grant: SearchGrant
) -> Response:
    """Rank the collection's documents for a query, each with its best passages.

    A list of queries gives a list of answers, all from one generation, encoded in one pass.
    """
    vector, cursor, is_list = request.query_vector, request.cursor, isinstance(request.query, list)
    if answer_tokens(request) > MAX_ANSWER_TOKENS:
        told = f"queries, top_k, passages and chunk_tokens may ask for {MAX_ANSWER_TOKENS:,} tokens together"
        raise ProblemError(INVALID_REQUEST, told)
    if rerank_pairs(request) > MAX_RERANK_PAIRS:
        told = f"queries, top_k and passages may ask to rerank {MAX_RERANK_PAIRS:,} passages together"
        raise ProblemError(INVALID_REQUEST, told)
    if vector is not None and (is_list or cursor is not None):
        told = "a query_vector is of a single query and one page; leave the others out"
        raise ProblemError(INVALID_REQUEST, told)
    if cursor is not None and (is_list or request.rerank or request.max_characters is not None):
        told = "pages are of a single query, not reranked and without max_characters; leave the cursor out"
        raise ProblemError(INVALID_CURSOR, told)
    options = search_keywords(request)
    if cursor is None:
        queries = request.query if isinstance(request.query, list) else [request.query]
        found = await search(state, grant, name, queries, options, rerank=request.rerank, vector=vector)
        answers = [_reply(result, request) for result in found]
        many = {"generation": found[0].generation, "answers": answers}
        return json_response(many if is_list else answers[0])
    assert isinstance(request.query, str), "a list of queries has no pages"
    page = Page.of(cursor, request.query, options)
    served = await reachable(state, grant, name)
    (result,) = await search(state, grant, name, [request.query], page.options(options, request.top_k))
    if await reachable(state, grant, name) is not served:  # which of the two answered cannot be told
        raise ProblemError(CURSOR_EXPIRED, "start again with the first page")
    return json_response(_reply(result, request, page.next_cursor(result, served, request.top_k)))


def _reply(result: SearchResult, request: SearchRequest, next_cursor: str | None = None) -> dict[str, Any]:
    """Return the fields of a :class:`SearchReply`."""
    return {
        "query": result.query,
        "generation": result.generation,
        "hits": [hit_reply(hit, include_text=request.include_text) for hit in result.hits],
        "warnings": result.warnings,
        "next_cursor": next_cursor,
    }


MAX_DEPTH: Final = MAX_TOP_K
"""Documents that all pages together may hold; the ranking looks that far from the first page on."""
_DIGEST_CHARACTERS: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """A page of a request's ranking; ``generation`` is the hash of one, None on the first page."""

    request: str
    offset: int
    generation: str | None

    @classmethod
    def of(cls, cursor: str, query: str, options: Mapping[str, Any]) -> Page:
        """Read a cursor; one of another query or other options raises :class:`ProblemError`."""
        request = _digest(query, options)
        if cursor == START_CURSOR:
            return cls(request=request, offset=0, generation=None)
        try:
            content = json.loads(base64.b64decode(cursor, altchars=b"-_", validate=True))
            generation, offset, digest = content["g"], content["o"], content["r"]
        except (ValueError, KeyError, TypeError, binascii.Error, RecursionError):
            raise _invalid() from None
        is_valid = (
            type(generation) is str and type(offset) is int and 0 < offset < MAX_DEPTH and digest == request
        )
        if not is_valid:
            raise _invalid()
        return cls(request=request, offset=offset, generation=generation)

    def options(self, options: SearchKeywords, top_k: int) -> SearchKeywords:
        """Return the options that answer this page: a ranking of one depth, whatever the page's size."""
        top_k = min(top_k, MAX_DEPTH - self.offset)
        return {**options, "top_k": top_k, "offset": self.offset, "max_candidates": MAX_DEPTH}

    def next_cursor(self, result: SearchResult, served: ServedCollection, top_k: int) -> str | None:
        """Return the next page's cursor, None at the end; one of another generation has expired."""
        run = served.searcher.generation.manifest.run_id  # a collection made anew counts from 1 again
        generation = _hash([served.name, run, result.generation])
        if self.generation not in (None, generation):
            raise ProblemError(CURSOR_EXPIRED, "start again with the first page")
        offset = self.offset + len(result.hits)
        most = min(MAX_DEPTH, served.searcher.generation.num_documents)
        if len(result.hits) < top_k or offset >= most:
            return None
        content = json.dumps({"g": generation, "o": offset, "r": self.request}, separators=(",", ":"))
        return base64.urlsafe_b64encode(content.encode()).decode("ascii")


def _digest(query: str, options: Mapping[str, Any]) -> str:
    """Hash what must be the same on every page; the size of a page and its text may differ."""
    kept = {
        name: value for name, value in options.items() if name not in ("top_k", "passages", "chunk_tokens")
    }
    return _hash([query, kept])


def _hash(values: Sequence[Any]) -> str:
    content = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode(errors="replace")).hexdigest()[:_DIGEST_CHARACTERS]


def _invalid() -> ProblemError:
    return ProblemError(
        INVALID_CURSOR, "a cursor goes with the query and the options of the page that gave it out"
    )
