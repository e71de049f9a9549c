"""A collection's map, where documents stand on it, and its health. A key sees its own documents in each."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Final, Literal

import numpy as np
from cairn.pipeline.context.drift import Drift, measure_drift
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.search.filters import allowed_documents, compile_both
from cairn.pipeline.search.hits import read_rows
from cairn.pipeline.serve.access import SearchGrant, ServerState, State, reachable
from cairn.pipeline.serve.answers import with_collection
from cairn.pipeline.serve.collections import ServedCollection
from cairn.pipeline.serve.keys import Grant
from cairn.pipeline.serve.length_curve import LengthBin, measure_lengths
from cairn.pipeline.serve.maps.corpus_map import MAX_TITLE_CHARACTERS, CorpusMap, draw_map, place
from cairn.pipeline.serve.maps.map_cache import cache_key
from cairn.pipeline.serve.schemas import MAX_DOC_ID_CHARACTERS, CollectionName, Reply
from cairn.pipeline.serve.settings import TABLE_TIMEOUT_SECONDS
from fastapi import APIRouter, Query
from jaxtyping import Int64
from pydantic import Field

router = APIRouter(prefix="/v1/collections", tags=["collections"], redirect_slashes=False)

MAX_PLACES: Final = 200
MAP_WAIT_SECONDS: Final = 1.0
"""How long a request waits for a map to be drawn, before it answers that it is being drawn."""

DocIds = Annotated[
    list[Annotated[str, Query(min_length=1, max_length=MAX_DOC_ID_CHARACTERS)]],
    Query(min_length=1, max_length=MAX_PLACES, description="Documents to place, such as those of an answer."),
]


class MapPoints(Reply):
    """Documents on the map as columns of one length."""

    doc_id: list[str]
    title: list[str | None] = Field(description="Long ones are cut.")
    x: list[float] = Field(description="From -1 to 1.")
    y: list[float] = Field(description="From -1 to 1, upwards.")
    cluster: list[int]


class MapCluster(Reply):
    """A cluster's documents on the map.

    Its name is made of words of their titles or texts, and empty where there are none.
    """

    cluster: int
    documents: int
    name: str
    x: float
    y: float


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
    points: MapPoints | None = None
    clusters: list[MapCluster] | None = None


class DriftReply(Reply):
    """How far the corpus has moved from the context it was encoded with, cluster by cluster."""

    verdict: Literal["none", "slight", "re-contextualise"]
    total_variation: float = Field(
        description="Share of documents that would have to change cluster, 0 to 1."
    )
    jensen_shannon_bits: float
    added_share: float = Field(description="Documents gained since, as a share of those now.")
    changed_clusters: list[int]


class LengthReply(Reply):
    """Documents of min_tokens to max_tokens tokens.

    How many, and the mean cosine of their vectors over pairs, null for few.
    """

    min_tokens: int
    max_tokens: int
    documents: int
    cosine: float | None


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
    drift: DriftReply | None
    is_outdated: bool = Field(
        description="A newer generation was published but is damaged; an older one answers."
    )
    lengths: list[LengthReply] = Field(
        description="The curve of length collapse: alike vectors of long documents are told apart badly."
    )


@router.get("/{name}/map")
async def map_collection(name: CollectionName, state: State, grant: SearchGrant) -> MapReply:
    """Lay the documents out in the plane, neighbours beside one another, coloured by cluster."""

    async def attempt(served: ServedCollection) -> MapReply:
        generation, visible, found = await _find_map(state, served, grant)
        if found is None:
            return _drawing(state, generation, len(visible), grant)
        return await state.search_threads.run(lambda: _map_reply(generation, len(visible), found))

    return await with_collection(state, await reachable(state, grant, name), attempt)


@router.get("/{name}/map/places")
async def place_documents(name: CollectionName, doc_id: DocIds, state: State, grant: SearchGrant) -> MapReply:
    """Say where documents stand on the map, also those that are not among its points.

    Unknown ids are left out.
    """

    async def attempt(served: ServedCollection) -> MapReply:
        generation, visible, found = await _find_map(state, served, grant)
        if found is None:
            return _drawing(state, generation, len(visible), grant)
        points = await state.search_threads.run(lambda: _place(generation, found, doc_id, grant.restriction))
        return MapReply(generation=generation.number, status="ready", documents=len(visible), points=points)

    return await with_collection(state, await reachable(state, grant, name), attempt)


@router.get("/{name}/health")
async def examine_collection(name: CollectionName, state: State, grant: SearchGrant) -> HealthReply:
    """Say how a collection is.

    Counts, drift from its context, and whether its vectors of long documents collapse.
    """

    async def attempt(served: ServedCollection) -> HealthReply:
        generation, visible = await state.search_threads.run(
            lambda: served.searcher.visible(grant.restriction)
        )
        curve = await state.length_curves.get(
            cache_key(generation, grant.restriction), lambda: measure_lengths(generation, visible)
        )
        assert curve is not None, "without a timeout the cache waits"
        return _health(served, generation, visible, curve, sees_all=grant.restriction is None)

    return await with_collection(state, await reachable(state, grant, name), attempt)


async def _find_map(
    state: ServerState, served: ServedCollection, grant: Grant
) -> tuple[Generation, Int64[np.ndarray, " A"], CorpusMap | None]:
    generation, visible = await state.search_threads.run(lambda: served.searcher.visible(grant.restriction))
    key = cache_key(generation, grant.restriction)
    draw = partial(draw_map, generation, visible, state.map_files, partial(state.maps.report, key))
    return generation, visible, await state.maps.get(key, draw, MAP_WAIT_SECONDS)


def _drawing(state: ServerState, generation: Generation, num_visible: int, grant: Grant) -> MapReply:
    progress = state.maps.progress(cache_key(generation, grant.restriction))
    return MapReply(generation=generation.number, status="drawing", documents=num_visible, progress=progress)


def _map_reply(generation: Generation, num_visible: int, corpus_map: CorpusMap) -> MapReply:
    return MapReply(
        generation=generation.number,
        status="ready",
        documents=num_visible,
        points=_points(corpus_map.doc_ids, corpus_map.titles, corpus_map.places_N2, corpus_map.cluster_ids_N),
        clusters=[
            MapCluster(
                cluster=each.cluster_id,
                documents=each.documents,
                name=each.name,
                x=round(each.x, 4),
                y=round(each.y, 4),
            )
            for each in corpus_map.clusters
        ],
    )


def _place(
    generation: Generation,
    corpus_map: CorpusMap,
    doc_ids: Sequence[str],
    restriction: Mapping[str, Any] | None,
) -> MapPoints:
    condition = compile_both({"doc_id": list(doc_ids)}, restriction, generation.document_schema)
    assert condition is not None, "ids are asked for"
    positions = allowed_documents(generation, condition, dt.timedelta(seconds=TABLE_TIMEOUT_SECONDS))
    vectors = generation.documents.reconstruct(positions)
    places = place(vectors, corpus_map.sample_vectors_SV, corpus_map.sample_places_S2)
    known = {int(position): n for n, position in enumerate(corpus_map.positions_N)}
    for row, position in enumerate(positions.tolist()):
        if position in known:
            places[row] = corpus_map.places_N2[known[position]]
    rows = read_rows(generation, positions, ["doc_id", "title"])
    titles = [None if row["title"] is None else row["title"][:MAX_TITLE_CHARACTERS] for row in rows]
    return _points([row["doc_id"] for row in rows], titles, places, generation.cluster_ids[positions])


def _points(
    doc_ids: Sequence[str], titles: Sequence[str | None], places: np.ndarray, clusters: np.ndarray
) -> MapPoints:
    x, y = np.round(places.astype(np.float64), 4).T.tolist()
    return MapPoints(doc_id=list(doc_ids), title=list(titles), x=x, y=y, cluster=clusters.tolist())


def _health(
    served: ServedCollection,
    generation: Generation,
    visible: np.ndarray,
    curve: Sequence[LengthBin],
    *,
    sees_all: bool,
) -> HealthReply:
    manifest = generation.manifest
    offsets = generation.chunk_offsets
    return HealthReply(
        generation=generation.number,
        created_at=manifest.created_at,
        documents=len(visible),
        chunks=int((offsets[visible + 1] - offsets[visible]).sum()),
        tokens=int(generation.num_tokens[visible].sum()),
        clusters=len(np.unique(generation.cluster_ids[visible])),
        vector_dim=manifest.vector_dim,
        uses_context=manifest.encoder.needs_context,
        context_documents=manifest.context_documents if sees_all else None,
        drift=_drift(generation) if sees_all else None,
        is_outdated=served.searcher.is_outdated,
        lengths=[LengthReply(**asdict(length)) for length in curve],
    )


def _drift(generation: Generation) -> DriftReply:
    manifest = generation.manifest
    sizes = np.bincount(generation.cluster_ids, minlength=len(manifest.context_cluster_sizes)).tolist()
    drift: Drift = measure_drift(manifest.context_cluster_sizes, sizes, manifest.documents_at_context)
    return DriftReply(
        verdict=drift.verdict,
        total_variation=drift.total_variation,
        jensen_shannon_bits=drift.jensen_shannon_bits,
        added_share=drift.added_share,
        changed_clusters=list(drift.changed_clusters),
    )
