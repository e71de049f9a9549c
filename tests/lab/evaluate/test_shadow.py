"""Two collections asked the same queries: what moves, and whether that is noise."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.cli.main import cairn, run
from cairn.pipeline.collection import Collection, open_collection
from cairn.pipeline.errors import SourceError
from cairn.pipeline.lab.evaluate.shadow import (
    AskedQueries,
    _ndcg,
    compare_collections,
    known_items,
    read_asked_queries,
)
from cairn.pipeline.serve.feedback_log import FeedbackLog
from cairn.pipeline.types import Hit, SearchResult

from tests.small_ingests import ingest_rows, settings

WORDS = ("stone", "path", "hill", "river", "mark", "way", "mountain", "walk", "cat", "mat")


def text(number: int) -> str:
    drawn = np.random.default_rng(number).choice(WORDS, 30)
    return f"The {WORDS[number % 10]} number {number} stands there. {' '.join(drawn)}."


@pytest.fixture(scope="module")
def root(tmp_path_factory, tiny_model_folder):
    """A root with ``old``, ``new`` in other chunks, and ``half``, which lacks every second document."""
    folder = tmp_path_factory.mktemp("compared")
    for name, interval, step in (("old", 16, 1), ("new", 8, 1), ("half", 16, 2)):
        rows = [{"id": f"doc-{number}", "text": text(number)} for number in range(0, 24, step)]
        encoder: dict[str, Any] = {"landmark_interval": interval, "window_tokens": 64, "precision": "fp32"}
        ingest_rows(rows, folder / "root", settings(tiny_model_folder, **encoder), name)
    return folder / "root"


@pytest.fixture(scope="module")
def opened(root) -> dict[str, Collection]:
    return {name: open_collection(name, root=root) for name in ("old", "new", "half")}


@pytest.fixture(scope="module")
def asked(opened):
    return known_items(opened["old"], 24, seed=0)


def test_collection_compared_with_itself_moves_nothing(opened, asked):
    report = compare_collections(opened["old"], opened["old"], asked, top_k=5)

    assert (report.overlap, report.same_first) == (1.0, 1.0)
    assert (report.quality_verdict, report.changed) == ("noise", ())


def test_compare_finds_the_loss_of_half_of_the_documents(opened, asked):
    old, half = opened["old"], opened["half"]
    report = compare_collections(old, half, asked, top_k=5)
    found = (
        [{hit.doc_id for hit in side.search(query, top_k=5).hits} for side in (old, half)]
        for query in asked.queries
    )
    expected = [len(before & after) / 5 for before, after in found]
    assert report.overlap == pytest.approx(np.mean(expected))
    assert report.overlap_low < report.overlap < report.overlap_high
    assert report.quality is not None
    assert report.quality["new"] < report.quality["old"]
    assert (report.quality_verdict, report.judged_queries) == ("hurts", 24)
    assert [each.overlap for each in report.changed] == sorted(each.overlap for each in report.changed)
    assert report.changed[0].overlap == min(expected)
    assert all(int(doc_id[4:]) % 2 == 0 for each in report.changed for doc_id in each.came)
    assert (report.old.documents, report.new.documents) == (24, 12)
    few = AskedQueries(queries=asked.queries[:3], relevant=asked.relevant[:3])
    assert compare_collections(old, half, few, top_k=5).quality_verdict == "noise"
    assert asked.warnings == ()
    (warning,) = known_items(old, 100, seed=0).warnings
    assert warning.startswith("24 queries are asked in place of 100: old has 24 documents, ")


def test_ndcg_is_that_of_binary_relevance():
    assert _ndcg(["a", "b"], frozenset("a"), 5) == 1.0
    assert _ndcg(["b", "a"], frozenset("a"), 5) == pytest.approx(1 / np.log2(3))
    assert _ndcg(["a"], frozenset("ab"), 5) == pytest.approx(1 / (1 + 1 / np.log2(3)))
    assert _ndcg([], frozenset("a"), 5) == 0.0
    assert np.isnan(_ndcg(["a"], frozenset(), 5))


def test_queries_are_read_from_every_kind_of_file(tmp_path):
    (tmp_path / "q.txt").write_text("one\n\n two \none\n")
    (tmp_path / "q.jsonl").write_text('{"query": "one"}\n{"query": "two"}\n')
    pq.write_table(pa.table({"query": ["one", "two", None]}), tmp_path / "q.parquet")
    for name in ("q.txt", "q.jsonl", "q.parquet"):
        assert read_asked_queries(tmp_path / name).queries == ("one", "two")
    judged = tmp_path / "judged"
    judged.mkdir()
    pq.write_table(pa.table({"id": [1, 2], "text": ["one", "two"]}), judged / "queries.parquet")
    qrels = {"query_id": [1, 1, 2, 9], "doc_id": ["a", "b", "a", "a"], "score": [2, 0, 1, 1]}
    pq.write_table(pa.table(qrels), judged / "qrels.parquet")
    assert read_asked_queries(judged).relevant == (frozenset("a"), frozenset("a"))


def test_clicks_of_a_feedback_log_are_relevant(tmp_path):
    log = FeedbackLog(tmp_path / "log", max_bytes=1 << 20)
    hit = Hit(doc_id="a", title=None, score=1.0, scores={}, metadata={}, passages=())
    log.searched(
        "c", [SearchResult(query=query, generation=1, hits=(hit,)) for query in ("one", "two", "one")]
    )
    log.clicked("c", "two", "b", 1)
    log.start()
    log.stop()

    asked = read_asked_queries(tmp_path / "log")
    assert (asked.queries, asked.relevant) == (("one", "two"), (frozenset(), frozenset("b")))


@pytest.mark.parametrize("name", ["empty.txt", "other.parquet", "broken.jsonl", "folder"])
def test_file_without_queries_is_refused_in_a_sentence(tmp_path, name):
    (tmp_path / "empty.txt").write_text("\n")
    pq.write_table(pa.table({"text": ["one"]}), tmp_path / "other.parquet")
    (tmp_path / "broken.jsonl").write_text("{")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SourceError, match="quer"):
        read_asked_queries(tmp_path / name)


def test_compare_verb_shows_both_sides_and_what_changed(root, tmp_path, capsys):
    def call(*arguments: Any) -> tuple[int, str]:
        code = run(cairn, ["compare", "old", "half", "--root", str(root), "--quiet", *arguments], "cairn")
        return code, capsys.readouterr().out

    (tmp_path / "q.txt").write_text("the stone number 1 stands there\nthe river\n")
    code, said = call("--queries", str(tmp_path / "q.txt"), "--top-k", "5")
    assert code == 0
    assert "old, generation 1" in said
    assert "gone: " in said
    assert "nDCG" not in said  # nothing is known of what is relevant
    code, said = call("--known-items", "6", "--json")
    assert (code, json.loads(said)["judged_queries"]) == (0, 6)
    assert call()[0] == call("--known-items", "6", "--queries", str(tmp_path / "q.txt"))[0] == 2
