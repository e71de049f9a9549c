"""What routes share: the server's state, a grant of the needed scope, and a search from options to JSON.

A search may turn the pages of one ranking. A cursor holds a hash of the generation, the offset and a hash of
the request. It is not signed: a forged one can only name another place in the same ranking, since filters
come with the request and the key, never with the cursor. The generation is that of one collection: a name
that was switched to another one has no further page, even where the numbers are the same.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Concatenate, Final, ParamSpec, TypeVar, cast, get_origin

import numpy as np
from cairn.pipeline.client.errors import FieldProblem
from cairn.pipeline.errors import (
    CairnError,
    CollectionNotFoundError,
    FingerprintMismatchError,
    IntegrityError,
)
from cairn.pipeline.index.generation import OpenOne
from cairn.pipeline.index.names import resolve_root
from cairn.pipeline.search.rerank import reranked, widened
from cairn.pipeline.search.searcher import Served, check_queries
from cairn.pipeline.search_options import MAX_TOP_K, SearchKeywords, SearchOptions
from cairn.pipeline.serve.collections import Collections, LoadEncoder, ServedCollection
from cairn.pipeline.serve.corpus_map import MapCache
from cairn.pipeline.serve.feedback_log import FeedbackLog
from cairn.pipeline.serve.file_ingestion import FileIngestion
from cairn.pipeline.serve.keys import ApiKey, KeyFile, Keyring
from cairn.pipeline.serve.middleware import GRANT, Metrics, require_scope, stage
from cairn.pipeline.serve.problems import (
    Kind,
    contract,
    invalid_request,
    search_problem,
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
from cairn.pipeline.serve.settings import ServeSettings, num_processors
from cairn.pipeline.serve.uploads import Uploads
from cairn.pipeline.serve.writers import Writers
from cairn.pipeline.types import Hit, Reranker, SearchResult, json_value
from fastapi import APIRouter, Depends, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from pydantic_core import to_json
from threadpoolctl import threadpool_limits

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")


class SearchThreads:
    """Threads for the blocking work of requests, reading and ranking, never encoding; calls are timed."""

    def __init__(self, num_threads: int, observe_seconds: Callable[[float], None]) -> None:
        self._num_threads, self._observe_seconds, self._num_asked = num_threads, observe_seconds, 0
        # A search thread is one processor's work: threads of FAISS and BLAS would spin beside it, waiting for
        # more, where others could work.
        self.pool = ThreadPoolExecutor(
            num_threads, thread_name_prefix="cairn-search", initializer=partial(threadpool_limits, limits=1)
        )

    @property
    def is_busy(self) -> bool:
        """Tell whether calls wait for a thread."""
        return self._num_asked > self._num_threads

    async def run(self, call: Callable[[], _Result]) -> _Result:
        """Await a blocking call; used from one event loop."""

        def timed() -> _Result:
            started_seconds = time.perf_counter()
            try:
                return call()
            finally:
                self._observe_seconds(time.perf_counter() - started_seconds)

        self._num_asked += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self.pool, timed)
        finally:
            self._num_asked -= 1


class ServerState:
    """Everything the routes of one server share, started and stopped together."""

    def __init__(
        self,
        settings: ServeSettings,
        load_encoder: LoadEncoder,
        reranker: Reranker | None,
        on_encoder_thread: Callable[[], None] | None,
        open_one: OpenOne | None,
    ) -> None:
        self.settings, self.reranker, self.metrics = settings, reranker, Metrics()
        self.keyring = Keyring(KeyFile(settings.keys_path), is_required=not settings.is_loopback)
        self.collections = Collections(
            settings,
            load_encoder,
            on_start=on_encoder_thread,
            observe=self.metrics.observe_pass,
            open_one=open_one,
        )
        num_threads = settings.search_threads or num_processors()
        self.search_threads = SearchThreads(num_threads, self.metrics.observe_search)
        self.rerank_pool = ThreadPoolExecutor(
            1, thread_name_prefix="cairn-rerank", initializer=on_encoder_thread
        )
        self.maps = MapCache()
        folder, megabytes = settings.feedback_log, settings.feedback_log_megabytes
        self.feedback = None if folder is None else FeedbackLog(folder, megabytes << 20)
        self.writers = Writers(settings, self.collections, is_busy=lambda: self.search_threads.is_busy)
        self.uploads = Uploads(resolve_root(settings.root))
        self.ingestion = FileIngestion(settings.root, self.uploads, self.writers)

    def start(self) -> None:
        """Open collections, and go on with what a server before has left."""
        self.collections.start_preloading()
        if self.settings.writable:
            self.writers.start()
            self.ingestion.start()
        if self.feedback is not None:
            self.feedback.start()

    async def close(self) -> None:
        """Stop all threads."""
        if self.feedback is not None:
            await asyncio.to_thread(self.feedback.stop)
        self.maps.stop()
        await self.ingestion.close()
        await self.writers.close()
        await self.collections.close()
        for pool in (self.search_threads.pool, self.rerank_pool):
            pool.shutdown(wait=False, cancel_futures=True)


async def _state(request: Request) -> ServerState:
    return cast(ServerState, request.app.state.server)


def granted(request: Request, scope: str) -> ApiKey:
    """Return a request's grant, which must have a scope; to write, also a server that takes writes."""
    settings = cast(ServerState, request.app.state.server).settings
    return require_scope(cast(ApiKey, request.scope[GRANT]), scope, settings)


def _scope(name: str) -> Callable[[Request], Any]:
    async def require(request: Request) -> ApiKey:
        return granted(request, name)

    return require


def may_write(state: ServerState, grant: ApiKey) -> bool:
    """Tell whether a grant may write here."""
    return state.settings.writable and "write" in grant.scopes and grant.restriction is None


State = Annotated[ServerState, Depends(_state)]
SearchGrant = Annotated[ApiKey, Depends(_scope("search"))]
EmbedGrant = Annotated[ApiKey, Depends(_scope("embed"))]
WriteGrant = Annotated[ApiKey, Depends(_scope("write"))]
AdminGrant = Annotated[ApiKey, Depends(_scope("admin"))]


@dataclass(frozen=True, slots=True)
class Asked:
    """A collection that a request asks for by its name, and what it may see of it."""

    state: ServerState
    grant: ApiKey
    name: str

    @property
    def restriction(self) -> Mapping[str, Any] | None:
        """The filter that every document must match."""
        return self.grant.restriction

    async def served(self) -> ServedCollection:
        """Return it opened; one that the grant is not for looks unknown."""
        if not self.grant.reaches(self.name):
            raise Kind.UNKNOWN_COLLECTION()
        return await self.state.collections.get(self.name)

    async def read_served(self, read: Callable[[ServedCollection], _Result]) -> _Result:
        """Return what a search thread reads of it."""
        return await self.attempted(lambda opened: self.state.search_threads.run(lambda: read(opened)))

    async def read(
        self,
        read: Callable[Concatenate[Served, _Arguments], _Result],
        *args: _Arguments.args,
        **keywords: _Arguments.kwargs,
    ) -> _Result:
        """Return what a search thread reads of the generation that answers."""
        return await self.read_served(lambda served: served.searcher.reading(read, *args, **keywords))

    async def attempted(
        self,
        attempt: Callable[[ServedCollection], Awaitable[_Result]],
        served: ServedCollection | None = None,
    ) -> _Result:
        """Await ``attempt(collection)``; errors become problems.

        Where another encoder has made the newest generation, the collection is opened and asked once more;
        where no generation is whole, it is mended and asked again.
        """
        collections = self.state.collections
        served = served or await self.served()
        try:
            try:
                reply = await attempt(served)
            except FingerprintMismatchError:
                reply = await attempt(await collections.reopen(served))
            except IntegrityError:
                if not await collections.is_healed(served.name):
                    raise
                reply = await attempt(served)
        except CollectionNotFoundError as error:
            collections.forget(served)
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
        collections.heal_outdated(served)
        return reply

    async def search(
        self,
        queries: Sequence[str],
        options: SearchKeywords,
        *,
        rerank: bool = False,
        vector: Sequence[float] | None = None,
    ) -> list[SearchResult]:
        """Answer queries from one generation; ``vector`` is a single query's."""
        state = self.state
        if rerank and state.reranker is None:
            detail = "this server has no cross-encoder; leave it out"
            raise invalid_request(FieldProblem(pointer="#/rerank", detail=detail))
        reranker = state.reranker if rerank else None
        served = await self.served()
        try:
            keywords: SearchKeywords = {
                **options,
                "restriction": self.restriction,
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

        with stage("search", collection=self.name, queries=len(queries)):
            results = await self.attempted(attempt, served)
        state.metrics.generation.labels(self.name).set(results[0].generation)
        if reranker is not None:
            with stage("search.rerank"):
                results = await _reranked(state, reranker, results, asked)
        if state.feedback is not None and asked.offset == 0:  # a further page is no other query
            state.feedback.searched(self.name, results)
        return results


async def _searched(name: CollectionName, request: Request) -> Asked:
    return Asked(request.app.state.server, granted(request, "search"), name)


Searched = Annotated[Asked, Depends(_searched)]
"""The collection of a route's ``{name}``, for a key with the scope search."""


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
            raise Kind.RERANKER_FAILED("the model gave no score; the server's log says more") from None
    return found


def json_response(reply: Mapping[str, Any]) -> Response:
    """Return fields of a schema, in its order, as JSON: to make its objects first takes twice as long."""
    return Response(to_json(reply, inf_nan_mode="null"), media_type="application/json")


def hit_reply(hit: Hit, *, include_text: bool) -> Hit:
    """Return a hit with values of JSON, and with texts where they are asked for."""
    without_text = [] if include_text else [replace(each, text="") for each in hit.passages]
    metadata = {name: json_value(value) for name, value in hit.metadata.items()}
    return replace(hit, metadata=metadata, passages=without_text or hit.passages)


router = APIRouter(tags=["search"])


@router.post("/v1/collections/{name}/search", response_model=SearchReply | SearchReplies)
async def search_collection(request: SearchRequest, asked: Searched) -> Response:
    """Rank the collection's documents for a query, each with its best passages.

    A list of queries gives a list of answers, all from one generation, encoded in one pass.
    """
    vector, cursor, is_list = request.query_vector, request.cursor, isinstance(request.query, list)
    if answer_tokens(request) > MAX_ANSWER_TOKENS:
        told = f"queries, top_k, passages and chunk_tokens may ask for {MAX_ANSWER_TOKENS:,} tokens together"
        raise Kind.INVALID_REQUEST(told)
    if rerank_pairs(request) > MAX_RERANK_PAIRS:
        told = f"queries, top_k and passages may ask to rerank {MAX_RERANK_PAIRS:,} passages together"
        raise Kind.INVALID_REQUEST(told)
    if vector is not None and (is_list or cursor is not None):
        told = "a query_vector is of a single query and one page; leave the others out"
        raise Kind.INVALID_REQUEST(told)
    if cursor is not None and (is_list or request.rerank or request.max_characters is not None):
        told = "pages are of a single query, not reranked and without max_characters; leave the cursor out"
        raise Kind.INVALID_CURSOR(told)
    options = search_keywords(request)
    if cursor is None:
        queries = request.query if isinstance(request.query, list) else [request.query]
        found = await asked.search(queries, options, rerank=request.rerank, vector=vector)
        answers = [_reply(result, request) for result in found]
        many = {"generation": found[0].generation, "answers": answers}
        return json_response(many if is_list else answers[0])
    assert isinstance(request.query, str), "a list of queries has no pages"
    page = CursorPage.of(cursor, request.query, options)
    served = await asked.served()
    (result,) = await asked.search([request.query], page.options(options, request.top_k))
    if await asked.served() is not served:  # which of the two answered cannot be told
        raise Kind.CURSOR_EXPIRED("start again with the first page")
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
_CURSOR: Final = re.compile(r"([0-9a-f]{16})-([0-9]{1,3})-([0-9a-f]{16})")


@dataclass(frozen=True, slots=True)
class CursorPage:
    """A page of a request's ranking; ``generation`` is the hash of one, None on the first page."""

    request: str
    offset: int
    generation: str | None

    @classmethod
    def of(cls, cursor: str, query: str, options: Mapping[str, Any]) -> CursorPage:
        """Read a cursor; one of another query or other options raises :class:`ProblemError`.

        The size of a page and its text may differ.
        """
        changing = ("top_k", "passages", "chunk_tokens")
        request = _hash([query, {name: value for name, value in options.items() if name not in changing}])
        if cursor == START_CURSOR:
            return cls(request, 0, None)
        found = _CURSOR.fullmatch(cursor)
        if found is None or not 0 < int(found[2]) < MAX_DEPTH or found[3] != request:
            raise Kind.INVALID_CURSOR(
                "a cursor goes with the query and the options of the page that gave it out"
            )
        return cls(request, int(found[2]), found[1])

    def options(self, options: SearchKeywords, top_k: int) -> SearchKeywords:
        """Return the options that answer this page: a ranking of one depth, whatever the page's size."""
        top_k = min(top_k, MAX_DEPTH - self.offset)
        return {**options, "top_k": top_k, "offset": self.offset, "max_candidates": MAX_DEPTH}

    def next_cursor(self, result: SearchResult, served: ServedCollection, top_k: int) -> str | None:
        """Return the next page's cursor, None at the end; one of another generation has expired."""
        run = served.searcher.generation.manifest.run_id  # a collection made again counts from 1 again
        generation = _hash([served.name, run, result.generation])
        if self.generation not in (None, generation):
            raise Kind.CURSOR_EXPIRED("start again with the first page")
        offset = self.offset + len(result.hits)
        most = min(MAX_DEPTH, served.searcher.generation.num_documents)
        has_more = len(result.hits) >= top_k and offset < most
        return f"{generation}-{offset}-{self.request}" if has_more else None


def _hash(values: Sequence[Any]) -> str:
    content = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(content.encode(errors="replace")).hexdigest()[:16]
