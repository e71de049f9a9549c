"""A collection's map, where documents stand on it, and its health. A key sees its own documents in each."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final, Literal

import numpy as np
from cairn.pipeline.context.drift import Drift, measure_drift
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.search.contents import visible_documents
from cairn.pipeline.search.filters import matching_documents
from cairn.pipeline.search.hits import read_rows
from cairn.pipeline.search.searcher import Searcher, Served
from cairn.pipeline.serve.answers import Asked, Searched
from cairn.pipeline.serve.collections import ServedCollection
from cairn.pipeline.serve.corpus_map import (
    Cluster,
    CorpusMap,
    Points,
    cache_key,
    draw_map,
    place,
)
from cairn.pipeline.serve.schemas import MAX_DOC_ID_CHARACTERS, Reply
from cairn.pipeline.serve.settings import TABLE_TIMEOUT_SECONDS
from fastapi import APIRouter, Query
from pydantic import Field

router = APIRouter(prefix="/v1/collections", tags=["collections"], redirect_slashes=False)

MAX_PLACES: Final = 200
MAP_WAIT_SECONDS: Final = 1.0
"""How long a request waits for a map to be drawn, before it answers that it is being drawn."""

DocIds = Annotated[
    list[Annotated[str, Query(min_length=1, max_length=MAX_DOC_ID_CHARACTERS)]],
    Query(min_length=1, max_length=MAX_PLACES, description="Documents to place, such as those of an answer."),
]


class MapReply(Reply):
    """The documents this key sees, or an even sample of them, laid out so that neighbours are alike."""

    generation: int
    status: Literal["ready", "drawing"] = Field(
        description="A map is drawn when it is first asked for: ask again in a second."
    )
    documents: int = Field(description="Documents this key sees, on the map or not.")
    progress: float | None = Field(
        default=None, description="While the map is being drawn: the share that is done, 0 to 1."
    )
    points: Points | None = None
    clusters: Sequence[Cluster] | None = None


class HealthReply(Reply):
    """The health of a collection, of the part that the key sees; null where a figure is of the whole."""

    generation: int
    created_at: str
    documents: int
    chunks: int
    tokens: int
    clusters: int = Field(description="Clusters that hold documents.")
    vector_dim: int
    uses_context: bool
    context_documents: int | None
    drift: Drift | None
    is_outdated: bool = Field(
        description="A newer generation was published but is damaged; an older one answers."
    )


@router.get("/{name}/map")
async def map_collection(asked: Searched) -> MapReply:
    """Lay the documents out in the plane, neighbours beside one another, coloured by cluster."""

    def fill(_: Generation, found: CorpusMap) -> dict[str, Any]:
        return {"points": found.points, "clusters": found.clusters}

    return await _with_map(asked, fill)


@router.get("/{name}/map/places")
async def place_documents(doc_id: DocIds, asked: Searched) -> MapReply:
    """Say where documents stand on the map, also those that are not among its points.

    Unknown ids are left out.
    """

    def fill(generation: Generation, found: CorpusMap) -> dict[str, Any]:
        return {"points": _place(generation, found, doc_id, asked.restriction)}

    return await _with_map(asked, fill)


@router.get("/{name}/health")
async def examine_collection(asked: Searched) -> HealthReply:
    """Say how a collection is: its counts and its drift from its context."""

    def examine(served: ServedCollection) -> HealthReply:
        searcher = served.searcher
        return searcher.reading(lambda now: _health(searcher, now, asked.restriction))

    return await asked.read_served(examine)


async def _with_map(asked: Asked, fill: Callable[[Generation, CorpusMap], dict[str, Any]]) -> MapReply:
    threads, maps = asked.state.search_threads, asked.state.maps

    async def attempt(served: ServedCollection) -> MapReply:
        generation, visible = await threads.run(
            lambda: served.searcher.reading(visible_documents, asked.restriction)
        )
        key = cache_key(generation, asked.restriction)
        reply = MapReply(generation=generation.number, status="drawing", documents=len(visible))
        if key != cache_key(served.searcher.last_generation, asked.restriction):  # it would end a newer one
            return reply
        draw = partial(draw_map, generation, visible, partial(maps.report, key))
        found = await maps.get(key, draw, MAP_WAIT_SECONDS)
        if found is None:
            return reply.model_copy(update={"progress": maps.progress(key)})
        filled = await threads.run(lambda: fill(generation, found))
        return reply.model_copy(update={"status": "ready", **filled})

    return await asked.attempted(attempt)


def _place(
    generation: Generation,
    corpus_map: CorpusMap,
    doc_ids: Sequence[str],
    restriction: Mapping[str, Any] | None,
) -> Points:
    timeout = dt.timedelta(seconds=TABLE_TIMEOUT_SECONDS)
    positions = matching_documents(generation, {"doc_id": list(doc_ids)}, restriction, timeout)
    assert positions is not None, "ids are asked for"
    vectors = generation.documents.reconstruct(positions)
    places = place(vectors, corpus_map.sample_vectors_SV, corpus_map.sample_places_S2)
    known = {int(position): n for n, position in enumerate(corpus_map.positions_N)}
    for row, position in enumerate(positions.tolist()):
        if position in known:
            places[row] = corpus_map.places_N2[known[position]]
    rows = read_rows(generation, positions, ["doc_id", "title"])
    return Points.of(rows, places, generation.cluster_ids[positions])


def _health(searcher: Searcher, now: Served, restriction: Mapping[str, Any] | None) -> HealthReply:
    generation, visible = visible_documents(now, restriction)
    manifest, sees_all = generation.manifest, restriction is None
    firsts, ends = generation.chunks_of(visible)
    return HealthReply(
        generation=generation.number,
        created_at=manifest.created_at,
        documents=len(visible),
        chunks=int((ends - firsts).sum()),
        tokens=int(generation.num_tokens[visible].sum()),
        clusters=len(np.unique(generation.cluster_ids[visible])),
        vector_dim=manifest.vector_dim,
        uses_context=manifest.encoder.use_context,
        context_documents=manifest.context_documents if sees_all else None,
        drift=_drift(generation) if sees_all else None,
        is_outdated=searcher.is_outdated,
    )


def _drift(generation: Generation) -> Drift:
    manifest = generation.manifest
    sizes = np.bincount(generation.cluster_ids, minlength=len(manifest.context_cluster_sizes)).tolist()
    return measure_drift(manifest.context_cluster_sizes, sizes, manifest.documents_at_context)
