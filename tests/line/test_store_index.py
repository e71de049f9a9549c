"""The whole line over an object store.

A corpus in it, a collection in it, and machines that share nothing else.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.cli.main import cairn, run
from cairn.pipeline.collection import Collection, open_collection
from cairn.pipeline.index import replica as replica_module
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import repartition
from cairn.pipeline.index.object_folder import ObjectFolder
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.search import searcher

from tests.served_stones import wait_until

if TYPE_CHECKING:
    from tests.object_stores import ObjectStore

ROOT = "s3://cairn/indexes"
TEXTS = {"a": "a cairn marks the way over the hill", "b": "the river runs past the old stone mill", "c": ""}


def put_corpus(store: ObjectStore, texts: dict[str, str]) -> None:
    content = io.BytesIO()
    pq.write_table(pa.table({"id": [*texts], "text": [*texts.values()]}), content)
    store.put("articles/part.parquet", content.getvalue())


@pytest.fixture
def on(
    object_store: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Any:
    """Return a runner of cairn on a machine of that name.

    It returns the exit code and what stdout says in JSON.
    """
    monkeypatch.setattr(replica_module, "REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(searcher, "REFRESH_SECONDS", 0.05)
    monkeypatch.setenv("CAIRN_ROOT", ROOT)
    monkeypatch.chdir(tmp_path)
    put_corpus(object_store, TEXTS)

    def invoke(machine: str, *arguments: str) -> tuple[int, Any]:
        monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / machine))
        code = run(cairn, arguments, "cairn")
        return code, json.loads(capsys.readouterr().out or "null")

    return invoke


@pytest.fixture
def ingest(tiny_model_folder: Path) -> tuple[str, ...]:
    model = ("--model", str(tiny_model_folder), "--landmark-interval", "16", "--token-bytes", "0")
    return ("ingest", "s3://cairn/articles/", "--collection", "c", *model, "--json", "--quiet")


def test_ingest_from_a_store_into_a_store_is_searched_updated_and_verified_elsewhere(
    on: Callable[..., Any], ingest: tuple[str, ...], object_store: ObjectStore
) -> None:
    code, report = on("a", *ingest)
    assert (code, report["indexed"], report["quarantined"], report["generation"]) == (3, 2, 1, 1)
    code, answer = on("b", "search", "the old stone mill", "--collection", "c", "--json")
    assert (code, answer["hits"][0]["doc_id"]) == (0, "b")
    put_corpus(
        object_store,
        {**TEXTS, "b": "the river runs past the new stone mill", "d": "snow lies on the ridge until june"},
    )
    code, report = on("b", *ingest)
    assert [report[name] for name in ("indexed", "unchanged", "encoded", "generation")] == [2, 1, 2, 2]
    code, status = on("a", "status", "c", "--json")
    assert (code, status["documents"], status["generation"]) == (0, 3, 2)
    assert not any("is served as it is" in each for each in status["warnings"])
    code, statuses = on("c", "list", "--json")
    assert [entry["collection"] for entry in statuses] == ["c"]
    assert on("c", "verify", "c", "--json")[0] == 0


def test_partitions_in_a_store_are_written_searched_and_cut_again_by_any_machine(
    on: Callable[..., Any], ingest: tuple[str, ...], object_store: ObjectStore, tmp_path: Path
) -> None:
    texts = {f"d{number}": f"a cairn of {number} stones" for number in range(9)}
    put_corpus(object_store, texts)
    assert on("a", *ingest, "--partitions", "3")[1]["indexed"] == 9
    put_corpus(object_store, {**texts, "d4": "a river"})
    report = on("b", *ingest)[1]
    assert (report["encoded"], report["unchanged"], report["generation"]) == (1, 8, 2)
    code, answer = on("a", "search", "a river", "--collection", "c", "--json")
    assert (code, answer["generation"], answer["hits"][0]["doc_id"]) == (0, 2, "d4")
    on("b", "status", "c", "--json")
    assert len(repartition(CollectionLayout.at(ROOT, "c"), 2).partitions) == 2
    for machine in ("a", "b"):
        assert on(machine, "search", "a river", "--collection", "c", "--json")[1]["hits"][0]["doc_id"] == "d4"
        assert verify_collection(CollectionLayout.at(ROOT, "c")) == []
    Collection(CollectionLayout.at(ROOT, "c")).delete(["d4"])
    assert on("a", "search", "a river", "--collection", "c", "--json")[1]["generation"] == 4
    used = list((tmp_path / "a").glob("s3/cairn/indexes/c/partitions/*"))
    assert len(used) == 2


def test_open_collection_follows_what_another_machine_publishes(
    on: Callable[..., Any],
    ingest: tuple[str, ...],
    object_store: ObjectStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on("a", *ingest)
    monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / "reader"))
    collection = open_collection("c", root=ROOT)
    assert collection.search("snow").generation == 1
    put_corpus(object_store, {**TEXTS, "d": "snow lies on the ridge until june"})
    on("b", *ingest)
    wait_until(lambda: collection.search("snow").generation != 1)
    assert collection.search("snow lies on the ridge").hits[0].doc_id == "d"


def test_records_and_refused_rows_of_a_run_are_in_the_store_which_advice_names(
    on: Callable[..., Any], ingest: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    on("a", *ingest)
    folder = ObjectFolder(f"{ROOT}/c")
    kept = [[Path(key).suffix for key in folder.list(name)] for name in ("runs", "quarantine")]
    assert kept == [[".json"], [".parquet"]]
    folder.delete(list(folder.list("files"))[:1])
    assert run(cairn, ["verify", "c"], "cairn") == 1
    assert "cairn repair c --root s3://cairn/indexes" in capsys.readouterr().err


@pytest.mark.usefixtures("short_library")
def test_sample_is_written_into_a_store_and_refused_before_it_is_made_for_another_kind(
    on: Callable[..., Any], tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, report = on("here", "sample", "s3://cairn/corpus", "--max-documents", "5", "--json")
    assert (code, report["documents"]) == (0, 5)
    options = ("--collection", "c", "--model", str(tiny_model_folder), "--dry-run", "--json", "--quiet")
    code, report = on("here", "ingest", "s3://cairn/corpus", *options)
    assert (code, report["rows"]) == (0, 5)
    monkeypatch.delattr("cairn.pipeline.corpus.sample.write_sample")
    assert on("here", "sample", "gs://bucket/corpus", "--max-documents", "5")[0] == 2


def test_unread_files_are_known_to_the_machine_that_published_last(
    on: Any, ingest: tuple[str, ...], object_store: ObjectStore
) -> None:
    content = io.BytesIO()
    pq.write_table(pa.table({"id": ["d"], "text": ["a path through the wood"]}), content)
    object_store.put("articles/other.parquet", content.getvalue())
    assert [on("one", *ingest)[1]["unread_files"] for _ in range(2)] == [0, 2]
    put_corpus(object_store, {**TEXTS, "b": "the mill stands by the river"})
    assert on("two", *ingest)[1]["unread_files"] == 0
    code, report = on("one", *ingest)
    assert (code, report["unread_files"], report["unchanged"], report["quarantined"]) == (3, 0, 3, 1)
    code, report = on("one", *ingest)
    assert (code, report["unread_files"], report["unchanged"], report["quarantined"]) == (3, 2, 3, 1)
