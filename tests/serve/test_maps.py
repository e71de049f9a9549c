"""Maps of a collection: laid out, named, drawn once for a generation, and given by routes."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from cairn.pipeline.context.drift import measure_drift
from cairn.pipeline.errors import StorageError, TryAgainError
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import SIZES, CollectionLayout
from cairn.pipeline.serve import corpus_map, map_routes
from cairn.pipeline.serve.corpus_map import (
    MAX_TEXT_CHARACTERS,
    TEXTS_A_CLUSTER,
    MapCache,
    densest_place,
    draw_map,
    lay_out,
    name_clusters,
    place,
    telling_texts,
)
from cairn.pipeline.serve.problems import ProblemError
from cairn.pipeline.serve.settings import ServeSettings

from tests.serve.conftest import drawn, stone_rows


def groups(count, each, dim=16, seed=0):
    """Unit vectors in ``count`` tight groups."""
    generator = np.random.default_rng(seed)
    vectors = np.repeat(generator.normal(size=(count, dim)), each, axis=0) + 0.05 * generator.normal(
        size=(count * each, dim)
    )
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_layout_keeps_groups_together_fills_the_square_is_the_same_each_time_and_has_place_for_others():
    told: list[float] = []
    vectors = groups(4, 30)
    places = lay_out(vectors, told.append)
    assert np.abs(places).max() == pytest.approx(1.0, abs=1e-5)
    assert np.array_equal(places, lay_out(vectors))
    assert told == sorted(set(told))
    assert (told[0] > 0, told[-1]) == (True, 1.0)
    sample = lay_out(vectors[::2])
    others = place(vectors[1::2], vectors[::2], sample)
    for found, own in ((places, places), (others, sample)):
        middles = own.reshape(4, -1, 2).mean(axis=1)
        nearest = np.linalg.norm(found[:, None] - middles[None], axis=2).argmin(axis=1)
        assert (nearest == np.repeat(np.arange(4), len(found) // 4)).all()


@pytest.mark.parametrize("count", [0, 1, 2, 3, 9])
def test_few_documents_are_laid_out_too_and_copies_stand_in_one_place(count):
    places = lay_out(groups(9, 1)[:count])
    assert places.shape == (count, 2)
    assert np.isfinite(places).all()
    assert not lay_out(np.repeat(groups(1, 1), 4 * count, axis=0)).any()


def test_many_begin_between_a_first_sample_and_find_their_own_neighbours(monkeypatch):
    vectors = groups(60, 5)
    monkeypatch.setattr(corpus_map, "FIRST_SAMPLE", 30)
    told: list[float] = []
    moved = lay_out(vectors, told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0
    first = np.linspace(0, len(vectors) - 1, 30).astype(np.int64)
    between = place(vectors, vectors[first], lay_out(vectors[first]))
    assert own_group_share(between) < 0.9
    assert own_group_share(moved) > 0.95


def own_group_share(places):
    """Return how often the nearest four of a place are of its group of five."""
    distances = np.linalg.norm(places[:, None] - places[None], axis=2)
    np.fill_diagonal(distances, np.inf)
    nearest = distances.argsort(axis=1)[:, :4]
    return float((nearest // 5 == np.arange(len(places))[:, None] // 5).mean())


def test_map_of_a_large_collection_is_of_an_even_part_that_has_every_cluster(served_root, monkeypatch):
    monkeypatch.setattr(corpus_map, "MAX_DOCUMENTS", 7)
    monkeypatch.setattr(corpus_map, "MAX_SAMPLE", 4)
    generation = open_generation(CollectionLayout(served_root, "stones"), checks=SIZES)
    drawn = draw_map(generation, np.arange(20))
    assert drawn.positions_N.tolist() == [0, 3, 6, 9, 12, 15, 19]
    assert drawn.places_N2.shape == (7, 2)
    assert sum(cluster.documents for cluster in drawn.clusters) == 7
    monkeypatch.setattr(corpus_map, "MAX_DOCUMENTS", 1)
    filled = np.unique(generation.cluster_ids)
    assert len(filled) > 1
    drawn = draw_map(generation, np.arange(20))
    assert [cluster.cluster for cluster in drawn.clusters] == filled.tolist()


def test_label_stands_among_the_documents_of_a_ring_and_of_two_islands():
    turns = np.linspace(0, 2 * np.pi, 700, endpoint=False) ** 1.05
    ring = np.stack([np.cos(turns), np.sin(turns)], axis=1).astype(np.float32)
    assert 0.7 < np.linalg.norm(densest_place(ring)) < 1.1
    rng = np.random.default_rng(0)
    islands = np.concatenate([rng.normal(-1, 0.05, (60, 2)), rng.normal(1, 0.05, (61, 2))]).astype(np.float32)
    assert np.abs(np.abs(densest_place(islands)) - 1).max() < 0.05
    blob = rng.normal(0.3, 0.1, (2_000, 2)).astype(np.float32)
    assert np.abs(densest_place(blob) - 0.3).max() < 0.06
    for few in (blob[:1], np.repeat(blob[:1], 3, axis=0)):
        assert densest_place(few) == pytest.approx(few[0])


RIVERS = ["The old stone and the path", "An old stone path", "The river is old", "A river for the mill"]
WALKS = ["How to walk a path", "How you walk a path", "Walk what path uphill", "Walk which path uphill"]
TWICE = ["turtle rawturtle turtles", "turtle rawturtle pen", "logger logging handler", "logger logging"]
MILLS = ["Die Mühle und der Fluss", "Die Mühle und das Rad", "Der Stein", "Der Stein"]


ALIKE = ["mill stone river", "mill stone river hill"]


@pytest.mark.parametrize(
    ("texts", "clusters", "languages", "names"),
    [
        ([*RIVERS, None, "The 7 of 12"], [0, 0, 1, 1, 2, 2], (), {0: "path stone", 1: "river mill", 2: ""}),
        (WALKS, [0, 0, 1, 1], (), {0: "path walk", 1: "uphill path"}),
        (["mill", "mill"], [0, 1], (), {0: "mill", 1: "mill"}),
        (TWICE, [4, 4, 9, 9], (), {4: "rawturtle pen", 9: "logger handler"}),
        (ALIKE, [0, 1], (), {0: "mill river", 1: "hill mill"}),
        (MILLS, [0, 0, 1, 1], ("de",), {0: "mühle fluss", 1: "stein"}),
    ],
    ids=["telling words", "no function words", "what there is", "nothing twice", "alike", "German"],
)
def test_clusters_are_named_by_words_that_tell_them_apart(texts, clusters, languages, names):
    assert name_clusters(texts, np.array(clusters, np.int32), languages) == names


def test_documents_without_title_are_known_by_how_some_of_their_texts_begin(served_root):
    generation = open_generation(CollectionLayout(served_root, "stones"), checks=SIZES)
    positions = np.arange(20)
    rows = generation.fetch_documents(positions, ["title", "text"]).to_pylist()
    titles = [row["title"] for row in rows]
    texts = telling_texts(generation, positions, titles, np.zeros(20, np.int32))
    assert titles.count(None) <= TEXTS_A_CLUSTER
    assert texts == [row["title"] or row["text"][:MAX_TEXT_CHARACTERS] for row in rows]
    texts = telling_texts(generation, positions, [None] * 20, positions.astype(np.int32) // 18)
    read = [sum(text is not None for text in part) for part in (texts[:18], texts[18:])]
    assert read == [TEXTS_A_CLUSTER, 2]


def key(collection="stones", generation=1, restriction="null"):
    return collection, generation, "run", restriction


@pytest.mark.anyio
async def test_all_requests_share_one_entry_also_one_that_takes_long_and_a_failed_one_is_computed_again():
    made: list[int] = []
    release = threading.Event()
    kept = MapCache()
    with pytest.raises(ZeroDivisionError):
        await kept.get(key(), lambda: 1 / 0)
    assert await asyncio.gather(*(kept.get(key(), lambda: made.append(1) or 7) for _ in range(5))) == [7] * 5
    assert made == [1]
    early = await kept.get(key("slow"), lambda: release.wait(), 0.0)
    release.set()
    assert (early, await kept.get(key("slow"), lambda: False)) == (None, True)


@pytest.mark.anyio
async def test_what_is_being_computed_is_told_to_end_when_the_server_stops():
    is_computing = threading.Event()
    kept = MapCache()

    def compute():
        while True:
            kept.report(key(), 0.5)
            is_computing.set()

    assert await kept.get(key(), compute, 0.0) is None
    await asyncio.to_thread(is_computing.wait)
    assert kept.progress(key()) == 0.5
    kept.stop()
    with pytest.raises(TryAgainError, match="ask again"):
        await kept.get(key(), compute)
    assert kept.progress(key()) == 0.0


@pytest.mark.anyio
async def test_only_the_newest_of_generations_that_follow_one_another_is_computed():
    """A page asks after each write: what older generations left would never end."""
    made: list[int] = []
    is_computing, all_are_asked = threading.Event(), threading.Event()
    kept = MapCache()

    def first():
        is_computing.set()
        all_are_asked.wait()
        kept.report(key(), 0.5)  # it is told to end
        made.append(1)
        return 1

    asked = asyncio.create_task(kept.get(key(), first))
    await asyncio.to_thread(is_computing.wait)
    for number in range(2, 10):
        await kept.get(key(generation=number), lambda number=number: made.append(number) or 1, 0.0)
    last = asyncio.create_task(kept.get(key(generation=10), lambda: 10))
    for _ in range(2):  # what `last` cancels reaches the pool one turn of the loop later
        await asyncio.sleep(0)
    all_are_asked.set()
    assert (await asked, await last) == (None, 10)
    assert made == []


@pytest.mark.anyio
async def test_other_generations_and_too_many_go_and_more_than_can_be_computed_are_told_to_try_again(
    monkeypatch,
):
    monkeypatch.setattr(corpus_map, "MAX_ENTRIES", 3)
    made: list[str] = []
    kept = MapCache()
    steps = [key(), key(generation=2), key(), key("a"), key("b"), key("c"), key()]
    for step, each in enumerate(steps):
        await kept.get(each, lambda step=step: made.append(str(step)))
    await kept.get(key("c"), lambda: made.append("again"))
    assert made == ["0", "1", "2", "3", "4", "5", "6"]
    monkeypatch.setattr(corpus_map, "MAX_PENDING", 2)
    release = threading.Event()
    for collection in "xy":
        assert await kept.get(key(collection), lambda: release.wait(300), 0.0) is None
    with pytest.raises(ProblemError, match="too many maps"):
        await kept.get(key("z"), lambda: True, 0.0)
    release.set()


def test_map_has_every_document_once(client):
    reply = drawn(client, "map")
    points = reply["points"]
    shown = zip(points["doc_id"], points["title"], strict=True)
    assert sorted(shown) == sorted((row["id"], row["title"]) for row in stone_rows())
    assert {len(column) for column in points.values()} == {20} == {reply["documents"]}
    assert all(-1 <= value <= 1 for value in points["x"] + points["y"])
    assert sorted(set(points["cluster"])) == [cluster["cluster"] for cluster in reply["clusters"]]
    assert (reply["generation"], sum(cluster["documents"] for cluster in reply["clusters"])) == (1, 20)


def test_map_that_is_being_drawn_says_so(own_client, monkeypatch):
    monkeypatch.setattr("cairn.pipeline.serve.map_routes.MAP_WAIT_SECONDS", 0.0)
    for path in ("map", "map/places?doc_id=a"):
        reply = own_client.get(f"/v1/collections/pebbles/{path}").json()
        assert (reply["status"], reply["documents"], reply["points"]) == ("drawing", 4, None)
        assert reply["progress"] == 0.0
        if path == "map":
            monkeypatch.setattr("cairn.pipeline.serve.corpus_map.MapCache.get", never_ready)


async def never_ready(*_):
    """Stand for a drawing that is not there yet."""


def test_documents_stand_where_the_map_has_them_and_others_are_placed(own_client, monkeypatch):
    points = drawn(own_client, "map")["points"]
    wanted = [points["doc_id"][7], "nobody", points["doc_id"][3]]
    found = drawn(own_client, "map/places", doc_id=wanted)["points"]
    for doc_id in (wanted[0], wanted[2]):
        here, there = found["doc_id"].index(doc_id), points["doc_id"].index(doc_id)
        assert [found[name][here] for name in found] == [points[name][there] for name in points]
    assert len(found["doc_id"]) == 2
    monkeypatch.setattr("cairn.pipeline.serve.corpus_map.MAX_DOCUMENTS", 10)
    own_client.app.state.server.maps = MapCache()
    shown = drawn(own_client, "map")
    assert (len(shown["points"]["doc_id"]), shown["documents"]) == (10, 20)
    missing = next(each for each in points["doc_id"] if each not in shown["points"]["doc_id"])
    placed = drawn(own_client, "map/places", doc_id=missing)["points"]
    assert placed["doc_id"] == [missing]
    assert -1 <= placed["x"][0] <= 1


def test_each_generation_has_one_map_that_no_late_request_of_an_older_one_takes_away(
    own_root, serve, ingest, monkeypatch
):
    client = serve(ServeSettings(root=own_root))
    assert drawn(client, "map")["documents"] == 20
    older = open_generation(CollectionLayout(own_root, "stones"), checks=SIZES)
    ingest(own_root, "stones", [*stone_rows(), {"id": "new", "text": "pumice"}])
    expected = drawn(client, "map")
    monkeypatch.delattr("cairn.pipeline.serve.corpus_map.lay_out")  # it is drawn once
    assert (expected["generation"], expected["documents"], len(expected["points"]["doc_id"])) == (2, 21, 21)
    with monkeypatch.context() as late:
        late.setattr(map_routes, "visible_documents", lambda *_: (older, np.arange(20)))
        reply = client.get("/v1/collections/stones/map").json()
    assert (reply["generation"], reply["status"]) == (1, "drawing")
    assert client.get("/v1/collections/stones/map").json() == expected


def test_health_that_meets_damage_is_that_of_the_generation_before_and_holds_up_no_other_request(
    own_root, serve, ingest, monkeypatch
):
    ingest(own_root, "stones", [*stone_rows(), {"id": "new", "text": "pumice"}])
    client = serve(ServeSettings(root=own_root))
    path = next(CollectionLayout(own_root, "stones").generation_folder(2).glob("*documents.arrow"))

    def measured(*read):
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        if path.stat().st_size:
            path.write_bytes(b"")
            raise StorageError("the rows cannot be read")
        return measure_drift(*read)

    monkeypatch.setattr("cairn.pipeline.serve.map_routes.measure_drift", measured)
    found = client.get("/v1/collections/stones/health").json()
    assert (found["generation"], found["documents"], found["is_outdated"]) == (1, 20, True)


def test_health_is_what_the_generation_holds_with_the_drift_of_an_ingest_that_moved_the_corpus(
    own_root, serve, ingest
):
    client = serve(ServeSettings(root=own_root))
    moved = [*stone_rows(), *({"id": f"new/{n}", "text": f"chert number {n}"} for n in range(30))]
    for verdict, added in (("none", 0.0), ("re-contextualise", 0.6)):
        generation = open_generation(CollectionLayout(own_root, "stones"), checks=SIZES)
        manifest = generation.manifest
        found = client.get("/v1/collections/stones/health").json()
        figures = ("generation", "created_at", "documents", "chunks", "tokens", "vector_dim")
        figures += ("context_documents",)
        assert {name: found[name] for name in figures} == {name: getattr(manifest, name) for name in figures}
        sizes = np.bincount(generation.cluster_ids, minlength=len(manifest.context_cluster_sizes)).tolist()
        expected = measure_drift(manifest.context_cluster_sizes, sizes, manifest.documents_at_context)
        assert found["drift"]["total_variation"] == expected.total_variation
        assert found["drift"]["verdict"] == expected.verdict == verdict
        assert found["drift"]["added_share"] == pytest.approx(added)
        if not added:
            ingest(own_root, "stones", moved)
