"""A collection in partitions answers as one folder does, and every write to it is one publication."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cairn.jobs.ray_cluster import tasks
from cairn.jobs.ray_cluster.tasks import TaskPool, TaskWorker
from cairn.pipeline.collection import Collection, load_query_encoder, open_collection
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.errors import (
    CollectionBusyError,
    DiskFullError,
    PartitionsMissingError,
    UsageError,
)
from cairn.pipeline.index import maintenance, partitions
from cairn.pipeline.index.generation import mean_vector, open_generation
from cairn.pipeline.index.layout import CollectionLayout, read_manifest
from cairn.pipeline.index.maintenance import compact_collection, repartition
from cairn.pipeline.index.names import partition_of
from cairn.pipeline.index.partitions import ChangePartition
from cairn.pipeline.index.recovery import repair_collection
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.line import live
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.encoder_worker import EncoderWorker
from cairn.pipeline.line.live import LiveWriter
from cairn.pipeline.line.plan_index import plan_index
from cairn.pipeline.line.recontextualise import recontextualise
from cairn.pipeline.manifest import PartitionRecord
from cairn.pipeline.search.contents import read_document
from cairn.pipeline.search.searcher import Searcher, Served

from tests.damages import flip, put
from tests.small_ingests import document, ingest_rows, stopped_at, write_rows

PARTITIONS = 3
IDS = [f"doc-{number:03d}" for number in range(24)]


@pytest.fixture(scope="module")
def partitioned(config: IngestConfig) -> IngestConfig:
    return replace(
        config,
        index=replace(config.index, partitions=PARTITIONS),
        encoder=replace(config.encoder, token_bytes=8),
    )


@pytest.fixture(scope="module")
def ingested(tmp_path_factory: pytest.TempPathFactory, partitioned: IngestConfig) -> Path:
    """A root with the collection ``c``, made once; tests change copies."""
    folder = tmp_path_factory.mktemp("ingested")
    ingest_into(folder / "root", folder, partitioned, FIRST)
    return folder / "root"


@pytest.fixture
def layout(ingested: Path, root: Path) -> CollectionLayout:
    shutil.copytree(ingested, root)
    return CollectionLayout(root, "c")


Ingest = Callable[..., Any]


@pytest.fixture
def ingest(root: Path, tmp_path: Path, partitioned: IngestConfig) -> Ingest:
    """Return what ingests documents in some versions, with other settings where they are given."""
    return lambda versions, **settings: ingest_into(
        root, tmp_path, replace(partitioned, **settings), versions
    )


def ingest_into(root: Path, folder: Path, config: IngestConfig, versions: dict[int, int]) -> Any:
    source = write_rows(folder / "a.parquet", [document(*each) for each in versions.items()])
    return build_index([source], root, "c", config)


FIRST, NEXT = dict.fromkeys(range(24), 0), dict.fromkeys(range(24), 1)


def contents(layout: CollectionLayout) -> dict[str, str]:
    """Return the texts of a collection in which ``verify`` finds nothing."""
    assert verify_collection(layout) == []
    rows = open_collection(layout.name, root=layout.root).documents.to_arrow(["doc_id", "text"])
    return dict(zip(*(column.to_pylist() for column in rows.itercolumns()), strict=True))


def generations(layout: CollectionLayout) -> list[int]:
    number = layout.current_generation_number()
    assert number is not None
    return [record.generation for record in read_manifest(layout, number).partitions]


def answered_without(layout: CollectionLayout, lost: str) -> set[str]:
    """Return what a search answers that is asked to leave out a partition; another is refused."""
    collection = open_collection(layout.name, root=layout.root)
    with pytest.raises(PartitionsMissingError, match=lost):
        collection.search("stone path", top_k=50)
    with pytest.raises(PartitionsMissingError, match=lost):
        list(collection.documents)
    result = collection.search("stone path", top_k=50, partial=True)
    assert any(lost in warning for warning in result.warnings)
    return {hit.doc_id for hit in result.hits}


def copied_to_one(layout: CollectionLayout) -> Collection:
    """Return the same rows in one folder, under another name."""
    shutil.copytree(layout.folder, layout.root / "one")
    one = CollectionLayout(layout.root, "one")
    repartition(one, 1)
    return open_collection("one", root=layout.root)


def test_search_of_partitions_answers_with_the_bits_of_one_folder(layout: CollectionLayout) -> None:
    one, many = copied_to_one(layout), open_collection("c", root=layout.root)
    asked: list[dict[str, Any]] = [
        {"granularity": "both"},
        {"granularity": "chunk", "hybrid": False},
        {"granularity": "document", "hybrid": False, "late": False},
        {"granularity": "both", "late": False, "filters": {"year": [2001, 2003, 2005]}},
        {"granularity": "both", "group_by": "year", "passages": 2},
    ]
    for options, query in product(asked, ("stone path", "snow on the ridge", "doc-003", "lake 12")):
        found, expected = (each.search(query, top_k=8, **options).hits for each in (many, one))
        assert found == expected
        assert len(found) == 8 or "group_by" in options


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory, config: IngestConfig) -> dict[str, Collection]:
    """The same rows in one folder, in four partitions and in five that were three; tests only read them."""
    folder = tmp_path_factory.mktemp("layouts")
    rows = [
        {
            "id": f"p{n}",
            "title": f"Title {n}",
            "text": f"partition text number {n} about topic{n % 7} and river",
            "topic": f"topic{n % 7}",
            "place": f"place{n % 40}",
        }
        for n in range(80)
    ]
    for name, count in {"one": 1, "four": 4, "cut": 3}.items():
        partitioned = replace(config, index=replace(config.index, partitions=count))
        ingest_rows(rows, folder / "root", partitioned, name)
    repartition(CollectionLayout(folder / "root", "cut"), 5)
    return {name: open_collection(name, root=folder / "root") for name in ("one", "four", "cut")}


def test_ties_probabilities_and_counts_are_alike_in_every_layout(layouts: dict[str, Collection]) -> None:
    every = layouts["one"].search("river", top_k=80).hits
    assert len(every) == 80
    assert all(hit.scores["bm25"] > 0.0 for hit in every)
    score_of = {hit.doc_id: hit.score for hit in every}
    for top_k in (5, 12, 80):
        hits = {name: each.search("river", top_k=top_k).hits for name, each in layouts.items()}
        assert hits["one"] == hits["four"] == hits["cut"]
        assert all(hit.score == score_of[hit.doc_id] for hit in hits["one"])
    one, *others = (each.search("river 7", top_k=80, min_probability=0.0) for each in layouts.values())
    assert len({hit.scores["probability"] for hit in one.hits}) > 1
    assert [each.hits for each in others] == [one.hits] * 2
    one, *others = (each.facets(["topic", "place"], num_values=12) for each in layouts.values())
    assert [value.value for value in one[0].values] == [f"topic{number}" for number in range(7)]
    assert others == [one] * 2


def test_documents_are_read_by_their_partition(layout: CollectionLayout) -> None:
    collection = open_collection("c", root=layout.root)
    assert sorted(collection.documents.ids()) == IDS
    assert collection.documents["doc-007"].text == f"{document(7)['text']}"
    assert sorted(collection.documents.ids({"year": 2003})) == ["doc-003", "doc-010", "doc-017"]
    lineage = collection.lineage("doc-007")
    assert lineage is not None
    assert lineage.source_row == 7
    status = collection.status()
    assert sum(each["documents"] for each in status["partitions"]) == status["documents"] == 24
    assert sum(status["cluster_sizes"]) == 24
    counts = {name: each["num_vectors"] for name, each in status["indexes"].items()}
    assert counts == {"documents": 24, "chunks": status["chunks"]}
    assert verify_collection(layout) == []


def test_changed_document_touches_its_partition_alone(layout: CollectionLayout, ingest: Ingest) -> None:
    report = ingest({**FIRST, 5: 1})
    assert (report.encoded, report.generation) == (1, 2)
    expected = [1] * PARTITIONS
    expected[partition_of("doc-005", PARTITIONS)] = 2
    assert generations(layout) == expected
    assert contents(layout)["doc-005"] == document(5, 1)["text"]


def test_second_ingest_and_a_plan_find_nothing_to_do(
    layout: CollectionLayout, tmp_path: Path, partitioned: IngestConfig, ingest: Ingest
) -> None:
    report = ingest(FIRST)
    assert (report.unchanged, report.encoded, report.generation) == (24, 0, 1)
    plan = plan_index([str(tmp_path / "a.parquet")], layout.root, "c", replace(partitioned, reread=True))
    assert (plan["unchanged"], plan["new"], plan["changed"]) == (24, 0, 0)


def test_sync_delete_and_compact_publish_all_partitions_as_one(
    layout: CollectionLayout, ingest: Ingest
) -> None:
    synced = ingest(dict.fromkeys(range(4, 24), 0), sync=True, max_deleted=1.0)
    assert (synced.deleted, synced.generation) == (4, 2)
    report = Collection(layout).delete(["doc-004", "doc-005", "doc-006", "none"])
    assert (report.deleted, report.missing, report.generation) == (3, ("none",), 3)
    heard: list[tuple[int | None, list[int]]] = []

    def hear(stage: str, done: int, total: int | None, unit: str) -> None:
        if (stage, done) == ("index", total):
            heard.append((layout.current_generation_number(), layout.generation_numbers()))

    assert compact_collection(layout, progress=hear).documents == 17
    assert heard[-1] == (4, [2, 3, 4]), "it is served before the oldest one goes"
    assert sorted(contents(layout)) == IDS[7:]


def test_new_metadata_column_reaches_every_partition(
    layout: CollectionLayout, tmp_path: Path, partitioned: IngestConfig
) -> None:
    ingest_rows([{**document(3, 1), "kind": "hill"}], layout.root, partitioned)
    collection = open_collection("c", root=layout.root)
    assert collection.documents.ids({"kind": "hill"}) == ["doc-003"]
    assert len(collection.documents.ids({"kind": None})) == 23


def test_partitions_of_fewer_documents_than_there_are_partitions(root: Path, ingest: Ingest) -> None:
    layout = CollectionLayout(root, "c")
    ingest({1: 0})
    assert sorted(generations(layout)) == [0, 0, 1]
    collection = open_collection("c", root=root)
    assert collection.search("stone").hits[0].doc_id == "doc-001"
    Collection(layout).delete("doc-001")
    assert len(open_collection("c", root=root).documents) == 0
    with pytest.raises(UsageError, match="must hold documents to be cut"):
        repartition(layout, 4)
    assert verify_collection(layout) == []
    ingest({**dict.fromkeys(range(6), 0), 1: 1})
    assert len(contents(layout)) == 6


@pytest.mark.parametrize(
    ("point", "times"),
    [
        ("chunks-added", 1),
        ("current-replaced", 2),
        *(("partition-published", times) for times in (1, 2, 3)),
        ("manifest-written", 4),
        ("generation-renamed", 4),
        ("current-replaced", 4),
    ],
)
def test_kill_of_a_publication_leaves_the_old_or_the_new_collection(
    layout: CollectionLayout, point: str, times: int, ingest: Ingest
) -> None:
    before = contents(layout)
    with stopped_at(point, times):
        ingest(NEXT)
    after = {f"doc-{number:03d}": document(number, 1)["text"] for number in range(24)}
    assert contents(layout) == (after if (point, times) == ("current-replaced", 4) else before)
    report = ingest(NEXT)
    assert report.encoded == 0  # what was encoded is kept
    assert contents(layout) == after
    assert generations(layout) == [2] * PARTITIONS


@pytest.mark.parametrize(
    ("point", "times"), [("shard-written", 4), ("partition-published", 2), ("documents-added", 1)]
)
def test_kill_of_a_first_ingest_leaves_nothing_and_the_next_goes_on(
    root: Path, point: str, times: int, ingest: Ingest
) -> None:
    with stopped_at(point, times):
        ingest(FIRST)
    layout = CollectionLayout(root, "c")
    assert not layout.exists()
    report = ingest(FIRST)
    assert (0 < report.encoded < 24) if point == "shard-written" else report.encoded == 0
    assert sorted(contents(layout)) == IDS
    held = [partition_of(doc_id, PARTITIONS) for doc_id in IDS]
    status = open_collection("c", root=root).status()
    assert [each["documents"] for each in status["partitions"]] == np.bincount(held).tolist()


@pytest.mark.parametrize("cuts", [False, True])
def test_reader_two_generations_behind_answers_from_the_newest(
    layout: CollectionLayout, partitioned: IngestConfig, cuts: bool, ingest: Ingest
) -> None:
    met: list[int] = []

    def read(served: Served) -> str | None:
        met.append(served.generation.number)
        if len(met) == 1:
            ingest(NEXT)
            if cuts:
                repartition(layout, 2)
            index = replace(partitioned.index, partitions=2 if cuts else PARTITIONS)
            ingest(dict.fromkeys(range(24), 2), index=index)
        found = read_document(served, "doc-005")
        return None if found is None else found.text

    searcher = Searcher(layout, load_query_encoder(open_generation(layout)))
    assert searcher.reading(read) == document(5, 2)["text"]
    assert met == [1, 4 if cuts else 3]


@pytest.mark.parametrize("numbers", [(6,), (2, 4), (1, 2, 1)])
def test_repartition_copies_every_row_and_later_ingests_go_on(
    layout: CollectionLayout, partitioned: IngestConfig, numbers: tuple[int, ...], ingest: Ingest
) -> None:
    before, hits = contents(layout), open_collection("c", root=layout.root).search("stone path").hits
    for number in numbers:
        repartition(layout, number)
        assert contents(layout) == before
        assert open_collection("c", root=layout.root).search("stone path").hits == hits
    index = replace(partitioned.index, partitions=numbers[-1])
    report = ingest({**FIRST, 5: 1, 6: 1}, index=index)
    assert (report.encoded, report.unchanged) == (2, 22)
    assert verify_collection(layout) == []
    if numbers[-1] > 1:
        ingest({**FIRST, 5: 2, 6: 1}, index=index)
        assert len(list(layout.partitions_folder.iterdir())) == numbers[-1]
        assert not layout.lance_folder.exists()


@pytest.mark.parametrize(
    ("point", "times", "numbers"),
    [("partition-published", 1, (4,)), ("manifest-written", 5, (4,)), ("documents-added", 1, (1, 2, 1))],
)
def test_kill_of_a_repartition_leaves_the_collection_as_it_was(
    layout: CollectionLayout, point: str, times: int, numbers: tuple[int, ...]
) -> None:
    *before_it, number = numbers
    before = contents(layout)
    for each in before_it:
        repartition(layout, each)
    with stopped_at(point, times):
        repartition(layout, number)
    assert contents(layout) == before
    repartition(layout, number)
    assert contents(layout) == before
    assert len(generations(layout)) == (number if number > 1 else 0)


def test_failed_repartition_leaves_no_copies_on_the_disk(
    layout: CollectionLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def folders() -> set[Path]:
        return {*layout.folder.iterdir(), *layout.partitions_folder.iterdir()} - {layout.lock_path}

    def full(*_: object) -> None:
        raise DiskFullError("no space left")

    before = folders()
    for number in (5, 1):
        with monkeypatch.context() as patch:
            owner, step = (
                (partitions, "publish_partitions") if number > 1 else (maintenance, "publish_generation")
            )
            patch.setattr(owner, step, full)
            with pytest.raises(DiskFullError):
                repartition(layout, number)
        assert folders() == before
    assert verify_collection(layout) == []


def test_write_that_waited_through_a_repartition_is_published(
    layout: CollectionLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ingest: Ingest
) -> None:
    def build_after_a_repartition(*arguments: Any, **options: Any) -> Any:
        repartition(layout, 2)
        return build_index(*arguments, **options)

    monkeypatch.setattr(live, "build_index", build_after_a_repartition)
    source = write_rows(tmp_path / "b.parquet", [document(5, 1)])
    writer = LiveWriter(layout, backbone=lambda: None, take_up=lambda _: None)
    outcome = writer.ingest(source).published.result(600)
    writer.stop(1)
    assert (outcome.state, outcome.fault) == ("searchable", None)
    assert contents(layout)["doc-005"] == document(5, 1)["text"]


def test_change_that_comes_after_the_collection_has_moved_on_undoes_nothing(
    layout: CollectionLayout, ingest: Ingest
) -> None:
    number = layout.current_generation_number()
    assert number is not None
    late = [
        ChangePartition(
            layout=layout.partition(record),
            record=record,
            change=lambda *_: pytest.fail("it undid what was published"),
            part=range(1),
        )
        for record in read_manifest(layout, number).partitions
    ]
    ingest(NEXT)
    for change in late:
        with pytest.raises(CollectionBusyError, match="was changed by another run meanwhile"):
            change.run()
    assert verify_collection(layout) == []


def test_worker_that_wakes_when_another_has_done_its_task_changes_nothing(
    layout: CollectionLayout, monkeypatch: pytest.MonkeyPatch, ingest: Ingest
) -> None:
    """The twin works between the first answer and the end of the tasks, and once more after that."""
    made: list[ChangePartition] = []

    class Pool:
        step = close = lambda *_: None

        def map(self, method: str, arguments: Callable[[int], Any], sizes: list[int], _: object) -> Any:
            for number in range(len(sizes)):
                task, handed = arguments(number)
                made.append(task)
                assert method == "run"
                for _ in range(2):
                    yield number, TaskWorker().run(task, handed)

    monkeypatch.setattr(tasks, "WorkerPool", lambda *_, **__: Pool())
    monkeypatch.setattr(EncoderWorker, "run_tasks", TaskPool(None, 1, 1))
    ingest(NEXT)
    assert len(made) == PARTITIONS
    for task in made:
        assert not TaskWorker().run(task, None)
        with pytest.raises(CollectionBusyError, match="was given up"):
            task.run()
    assert contents(layout) == {f"doc-{number:03d}": document(number, 1)["text"] for number in range(24)}


def lose_the_context(layout: CollectionLayout) -> None:
    """Damage that of the collection; each partition has its own."""
    for path in layout.folder.rglob("context.arrow"):
        if not path.is_relative_to(layout.partitions_folder):
            path.write_bytes(b"damaged")


def flip_a_bit(layout: CollectionLayout) -> None:
    """Damage an index of a partition."""
    flip(next(layout.partitions_folder.glob("*/generations/*/*chunks.faiss")))


def lose_generations(layout: CollectionLayout) -> None:
    """Remove what names and holds generations, of the collection and of all partitions."""
    for name in ("CURRENT", "generations"):
        for path in [*layout.folder.rglob(name)]:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize(
    ("damage", "generation"), [(lose_the_context, 1), (flip_a_bit, 2), (lose_generations, 2)]
)
def test_damage_of_what_rows_or_partitions_hold_is_mended_without_loss(
    layout: CollectionLayout, damage: Callable[[CollectionLayout], None], generation: int
) -> None:
    before = contents(layout)
    damage(layout)
    assert verify_collection(layout)
    report = repair_collection(layout)
    assert (report.generation, report.lost) == (generation, ())
    assert contents(layout) == before


def test_repair_returns_to_the_generation_before_where_the_newest_does_not_say_what_it_is(
    layout: CollectionLayout, ingest: Ingest
) -> None:
    before = contents(layout)
    ingest({**FIRST, 5: 1})
    for folder in (layout.generation_folder(2), layout.copies_folder(2)):
        (folder / "MANIFEST.json").write_bytes(b"damaged")
    report = repair_collection(layout)
    assert report.generation == 3
    assert "returned to generation 1" in report.action
    assert "generation 2 had changed cannot be told" in report.action
    assert contents(layout) == before
    assert ingest({**FIRST, 5: 1}, reread=True).encoded == 1
    assert verify_collection(layout) == []


@pytest.mark.parametrize("remnant", [None, "file", "FIFO", "generations", "copies", "lance"])
def test_lost_partition_is_told_and_filled_again_by_an_ingest(
    layout: CollectionLayout, remnant: str | None, ingest: Ingest
) -> None:
    lost = next(layout.partitions_folder.iterdir())
    if remnant is None:
        shutil.rmtree(lost)
    elif remnant in ("generations", "copies", "lance"):
        shutil.rmtree(lost)
        lost.mkdir()
        put(lost / remnant, "FIFO")
    else:
        put(lost, remnant)
    assert any(lost.name in fault.file for fault in verify_collection(layout))
    held = {doc_id: partition_of(doc_id, PARTITIONS) for doc_id in IDS}
    left = {doc_id for doc_id in IDS if held[doc_id] != int(lost.name[-1])}
    assert answered_without(layout, lost.name) == left
    report = repair_collection(layout)
    assert f"partition {lost.name} is lost (" in report.action
    assert f"collection {lost.name!r}" not in report.action
    assert answered_without(layout, lost.name) == left
    assert any(
        lost.name in warning for warning in open_collection("c", root=layout.root).status()["warnings"]
    )
    assert ingest(FIRST).encoded == 24 - len(left)
    assert sorted(contents(layout)) == IDS


def test_killed_repair_of_damaged_rows_is_told_by_the_next(layout: CollectionLayout) -> None:
    next(layout.partitions_folder.glob("*/lance/documents.lance/data/*")).write_bytes(b"")
    with stopped_at("side-files-copied", 2):  # that of the collection, behind that of the partition
        repair_collection(layout)
    report = repair_collection(layout)
    assert 0 < len(report.lost) < 24
    assert sorted([*contents(layout), *report.lost]) == IDS


@pytest.mark.parametrize("name", ["runs", "quarantine", "origins", "pending"])
def test_file_in_the_place_of_a_folder_stops_no_ingest(
    layout: CollectionLayout, tmp_path: Path, partitioned: IngestConfig, name: str
) -> None:
    put(layout.folder / name, "FIFO")
    rows = [document(5, 1), {**document(6), "text": ""}]
    report = ingest_rows(rows, layout.root, partitioned)
    assert (report.encoded, report.quarantined, report.generation) == (1, 1, 2)
    assert contents(layout)["doc-005"] == document(5, 1)["text"]


def test_folders_of_partitions_that_were_swapped_give_no_row_of_another(
    layout: CollectionLayout, tmp_path: Path, ingest: Ingest
) -> None:
    ingest(NEXT)
    one, other, _ = sorted(layout.partitions_folder.iterdir())
    for source, target in ((one, tmp_path / "aside"), (other, one), (tmp_path / "aside", other)):
        source.rename(target)
    with pytest.raises(UsageError, match=r"got the folder of another; put its own back"):
        repair_collection(layout)
    one.rename(tmp_path / "moved")
    other.rename(one)
    (tmp_path / "moved").rename(other)
    assert sorted(contents(layout)) == IDS


@pytest.mark.parametrize(("name", "words"), [("partitions", "got a file"), ("one of them", "symbolic link")])
def test_file_or_link_in_place_of_partitions_is_named_with_what_helps(
    layout: CollectionLayout, name: str, words: str
) -> None:
    path = layout.partitions_folder if name == "partitions" else next(layout.partitions_folder.iterdir())
    path.rename(layout.root / "aside")
    if name == "partitions":
        path.touch()
    else:
        path.symlink_to(layout.root / "aside")
    with pytest.raises(UsageError, match=rf"partitions/.*{words}.*run `cairn repair c --root"):
        repair_collection(layout)


@pytest.mark.parametrize("name", ["MANIFEST.json", "context.arrow", "chunks.arrow", "*.faiss", "*.manifest"])
@pytest.mark.parametrize("are_copies_damaged", [False, True])
def test_damage_of_the_generation_before_in_a_partition_is_named_and_mended_or_removed(
    layout: CollectionLayout, name: str, are_copies_damaged: bool, ingest: Ingest
) -> None:
    stood = {path for path in layout.partitions_folder.rglob(name) if path.is_file()}
    ingest(NEXT)
    for path in stood:
        if are_copies_damaged or "copies" not in path.parts:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.unlink()  # the newest generation has the same file under another name
            path.write_bytes(content)
    faults = verify_collection(layout)
    assert {Path(fault.file).parts[0] for fault in faults} == {"partitions"}
    action = repair_collection(layout).action
    assert verify_collection(layout) == []
    is_copied = name in ("MANIFEST.json", "*.manifest") and not are_copies_damaged
    if is_copied or name == "context.arrow":  # which the newest generation has, too
        assert layout.generation_numbers() == [1, 2]
    else:
        assert action == "generation 2 is whole; generation 1, which was damaged, is removed"
        for folder in (layout.folder, *layout.partitions_folder.iterdir()):
            assert [each.name for each in (folder / "generations").iterdir()] == ["00000002"]
    assert contents(layout)["doc-005"] == document(5, 1)["text"]


def test_new_context_of_partitions_is_published_as_one_also_after_a_killed_run(
    layout: CollectionLayout, partitioned: IngestConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, texts = generations(layout), contents(layout)
    run, ran = ChangePartition.run, []

    def killed(self: ChangePartition) -> PartitionRecord:
        ran.append(self)
        if len(ran) == 2:
            raise KeyboardInterrupt
        return run(self)

    with monkeypatch.context() as patched:
        patched.setattr(ChangePartition, "run", killed)
        with pytest.raises(KeyboardInterrupt):
            recontextualise(layout.root, "c", partitioned)
    assert (generations(layout), contents(layout)) == (before, texts)
    report = recontextualise(layout.root, "c", partitioned)
    assert (report.documents, report.encoded) == (len(texts), 0)
    assert contents(layout) == texts
    assert all(now > then for now, then in zip(generations(layout), before, strict=True))


def test_mean_of_vectors_has_the_same_bits_in_any_order() -> None:
    rng = np.random.default_rng(0)
    vectors_SV = rng.standard_normal((500, 32)).astype(np.float32)
    vectors_SV /= np.linalg.norm(vectors_SV, axis=1, keepdims=True)
    mean_V = mean_vector(vectors_SV)
    assert np.array_equal(mean_V, mean_vector(rng.permutation(vectors_SV)))
    assert np.allclose(mean_V, vectors_SV.mean(axis=0), atol=1e-6)
