"""A search of a collection with token vectors, through a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.cli.main import cairn, run
from cairn.cli.search import _excerpt, _found_by
from cairn.pipeline.collection import Collection, open_collection
from cairn.pipeline.config import ClusterConfig, ContextConfig, EncoderConfig, IngestConfig
from cairn.pipeline.corpus.sources import TableSource
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.search.ranking import BY_VECTORS_ALONE
from cairn.pipeline.search.searcher import Searcher
from cairn.pipeline.types import Highlight, Passage

TOPICS = ("old stone path over the mountain", "a river walks to the sea", "the cat sat on the mat", "mark")
QUERY = "the old stone path"


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Collection:
    folder = tmp_path_factory.mktemp("late")
    generator = np.random.default_rng(0)
    rows = [
        {
            "id": f"d{number:02d}",
            "title": TOPICS[number % 4] if number % 3 else None,
            "year": 2_000 + number,
            "text": " ".join(generator.choice(" ".join(TOPICS).split(), 20 + number)),
        }
        for number in range(30)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "corpus.parquet")
    config = IngestConfig(
        encoder=EncoderConfig(
            model=str(tiny_model_folder), landmark_interval=16, use_context=False, token_bytes=8
        ),
        cluster=ClusterConfig(num_clusters=2),
        context=ContextConfig(context_documents=2, max_document_tokens=16),
    )
    build_index([str(folder / "corpus.parquet")], folder / "root", "c", config)
    return open_collection("c", root=folder / "root")


@pytest.mark.parametrize("hybrid", [True, False])
@pytest.mark.parametrize("granularity", ["document", "chunk", "both"])
def test_search_with_token_vectors_ranks_by_scores_of_at_most_one(
    collection: Collection, granularity: Any, hybrid: bool
):
    hits = collection.search(QUERY, granularity=granularity, hybrid=hybrid, top_k=30).hits
    scores = [hit.score for hit in hits]

    assert len(hits) == 30
    assert scores == sorted(scores, reverse=True)
    assert scores[0] <= 1.0 + 1e-9
    assert all("late" in hit.scores for hit in hits)


def test_search_without_late_is_as_before_token_vectors(collection: Collection):
    hits = collection.search(QUERY, late=False, hybrid=False).hits
    searcher = Searcher(collection.layout, _Plain(open_generation(collection.layout)))
    expected = searcher.search(QUERY, hybrid=False).hits

    assert [(hit.doc_id, hit.score) for hit in hits] == [(hit.doc_id, hit.score) for hit in expected]
    assert all("late" not in hit.scores for hit in hits)


class _Plain:
    """The collection's encoder without its tokens."""

    def __init__(self, generation: Any) -> None:
        from cairn.pipeline.collection import load_query_encoder

        self._encoder = load_query_encoder(generation)
        self.fingerprint = self._encoder.fingerprint

    def encode_queries(self, texts: Any) -> np.ndarray:
        return self._encoder.encode_queries(texts)


@pytest.mark.parametrize(
    "options",
    [
        {"filters": {"type": "gte", "key": "year", "value": 2_020}},
        {"chunk_tokens": 16},
        {"chunk_tokens": 48, "passages": 5},
        {"max_characters": 900},
        {"max_characters": 90, "chunk_tokens": 16},
        {"passages": 0},
        {"top_k": 1},
    ],
)
def test_search_with_any_option_is_judged_too(collection: Collection, options: dict[str, Any]):
    hits = collection.search(QUERY, **options).hits

    assert hits
    assert all("late" in hit.scores for hit in hits)
    if "filters" in options:
        assert all(hit.metadata["year"] >= 2_020 for hit in hits)
    if options.get("max_characters"):
        passages = [passage for hit in hits for passage in hit.passages]
        assert sum(passage.end_char - passage.start_char for passage in passages) <= options["max_characters"]


@pytest.mark.parametrize("query", ["the", "日本語 ☃", "old stone " * 700, "?!", "x" * 3_000])
def test_query_of_stop_words_unknown_characters_or_great_length_is_answered(
    collection: Collection, query: str
):
    assert collection.search(query).hits
    assert collection.search(query, hybrid=False).hits


@pytest.mark.parametrize("query", ["日本語 ☃", "👩\u200d👧", "?!"])
def test_query_without_a_word_that_the_model_knows_is_ranked_by_vectors_and_says_so(
    collection: Collection, query: str
):
    found = collection.search(query)

    assert found.warnings == (BY_VECTORS_ALONE,)
    assert found.hits
    assert all("late" not in hit.scores for hit in found.hits)
    assert collection.search(QUERY).warnings == ()


def _collection_of(texts: list[str], root: Path, model: Path) -> Collection:
    config = IngestConfig(
        encoder=EncoderConfig(model=str(model), use_context=False, token_bytes=8),
        cluster=ClusterConfig(num_clusters=1),
        context=ContextConfig(context_documents=1),
    )
    ids = [str(number) for number in range(len(texts))]
    build_index([TableSource(table=pa.table({"id": ids, "text": texts}))], root, "c", config)
    return open_collection("c", root=root)


def test_query_without_a_word_that_the_model_knows_is_ranked_by_the_words_that_stand_there(
    tmp_path: Path, tiny_model_folder: Path
):
    texts = ["水", "雪山", "雪山の石 (2020, 10%): 道 / 海; 川 - 空!" * 3, "石"]
    hits = _collection_of(texts, tmp_path, tiny_model_folder).search("海").hits

    assert hits[0].doc_id == "2"
    assert all(hit.score == 0.0 for hit in hits[1:])


def test_query_of_a_word_that_every_document_holds_is_ranked_by_vectors_too(
    tmp_path: Path, tiny_model_folder: Path
):
    others = ["basalt", "slate", "marble", "flint", "chalk", "quartz", "gneiss", "shale"]
    texts = [f"granite and {other}" for _ in range(25) for other in others]
    hits = _collection_of(texts, tmp_path, tiny_model_folder).search("granite", top_k=200).hits

    assert all("late" not in hit.scores for hit in hits)
    dense = {hit.score: hit.scores["document"] for hit in hits}
    assert len(dense) > 1
    assert sorted(dense) == sorted(dense, key=dense.__getitem__)


def test_budget_that_no_passage_fits_names_the_smallest_that_gives_one(collection: Collection):
    (warning,) = collection.search(QUERY, max_characters=5).warnings
    smallest = int(warning.split()[-1])

    assert warning == f"no passage fits in 5 characters; ask for at least {smallest}"
    assert collection.search(QUERY, max_characters=smallest - 1).hits == ()
    assert collection.search(QUERY, max_characters=smallest).hits


def test_batch_answers_as_single_queries_do(collection: Collection):
    queries = [QUERY, "river sea", "cat on the mat"]
    batch = collection.search_batch(queries)

    for query, found in zip(queries, batch, strict=True):
        alone = collection.search(query)
        assert [hit.doc_id for hit in found.hits] == [hit.doc_id for hit in alone.hits]


def test_highlights_are_words_of_the_passage_that_answer_words_of_the_query(collection: Collection):
    hits = collection.search("old, STONE path").hits
    passages = [passage for hit in hits for passage in hit.passages]
    found = [(passage, each) for passage in passages for each in passage.highlights]

    assert found
    for passage, each in found:
        word = passage.text[each.start_char - passage.start_char : each.end_char - passage.start_char]
        assert passage.start_char <= each.start_char < each.end_char <= passage.end_char
        assert word.isalnum()
        assert set(each.query_words) <= {"old", "STONE", "path"}
        assert each.weight > 0.0
    for passage in passages:
        starts = [each.start_char for each in passage.highlights]
        assert starts == sorted(starts)
        assert sum(each.weight for each in passage.highlights) <= 1.0 + 1e-6


def test_highlights_of_a_joined_passage_stand_in_its_text(collection: Collection):
    hits = collection.search(QUERY, max_characters=900, chunk_tokens=16).hits

    for passage in (passage for hit in hits for passage in hit.passages):
        for each in passage.highlights:
            assert passage.start_char <= each.start_char < each.end_char <= passage.end_char


def test_highlights_are_absent_without_token_vectors(collection: Collection):
    hits = collection.search(QUERY, late=False).hits

    assert all(passage.highlights == () for hit in hits for passage in hit.passages)


def test_command_line_names_the_strongest_word_first_and_those_of_the_title() -> None:
    highlights = (
        Highlight(start_char=7, end_char=12, weight=0.2, query_words=("stone", "rock")),
        Highlight(start_char=13, end_char=16, weight=0.3, query_words=("way",)),
    )
    titles = (
        Highlight(start_char=0, end_char=3, weight=0.4, query_words=("new",)),
        Highlight(start_char=4, end_char=7, weight=0.1, query_words=("way", "path")),
    )
    passage = Passage(
        start_char=0,
        end_char=16,
        text="of old stone way",
        score=1.0,
        highlights=highlights,
        title_highlights=titles,
    )
    found = list(_found_by(passage, "New way"))

    assert found == ["New (title)", "way", "stone (rock)"]


def test_command_line_shows_a_passage_around_the_words_that_answered_in_bold() -> None:
    text = "old stone " * 60 + "river walks " + "cat mat " * 60
    start_char = 7
    start = start_char + text.index("river")
    river = Highlight(start_char=start, end_char=start + 5, weight=0.2, query_words=("sea",))
    passage = Passage(
        start_char=start_char,
        end_char=start_char + len(text),
        text=text,
        score=1.0,
        highlights=(river,),
    )
    lines = _excerpt(passage, 4)

    assert len(lines) == 4
    assert "\ue0feriver\ue0ff walks" in " ".join(lines)
    assert lines[0].startswith("… ")
    assert lines[-1].endswith(" …")


def test_command_line_names_the_words_a_passage_was_found_by(
    collection: Collection, capsys: pytest.CaptureFixture[str]
):
    root = str(collection.layout.root)
    assert run(cairn, ["search", QUERY, "--collection", "c", "--root", root], "cairn") == 0
    shown = capsys.readouterr().out
    assert run(cairn, ["search", QUERY, "--collection", "c", "--root", root, "--no-late"], "cairn") == 0

    assert "found by: " in shown
    assert "found by: " not in capsys.readouterr().out
