"""A search of a collection with token vectors, through a tiny model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cairn.cli.main import cairn, run
from cairn.cli.search import _excerpt, _found_by
from cairn.pipeline.collection import Collection, load_query_encoder, open_collection
from cairn.pipeline.corpus.formats.format import PAGE_BREAK
from cairn.pipeline.encode import documents
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.search import hits
from cairn.pipeline.search.hits import MAX_WORDS
from cairn.pipeline.search.ranking import BY_VECTORS_ALONE
from cairn.pipeline.search.searcher import Searcher
from cairn.pipeline.types import Highlight, Passage
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tests.small_ingests import ingest_rows, settings

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
    ingest_rows(rows, folder / "root", settings(tiny_model_folder, token_bytes=8))
    return open_collection("c", root=folder / "root")


def test_search_without_late_is_as_before_token_vectors(collection: Collection):
    hits = collection.search(QUERY, late=False, hybrid=False).hits
    encoder = load_query_encoder(open_generation(collection.layout))
    without: Any = SimpleNamespace(fingerprint=encoder.fingerprint, encode_queries=encoder.encode_queries)
    expected = Searcher(collection.layout, without).search(QUERY, hybrid=False).hits

    assert [(hit.doc_id, hit.score) for hit in hits] == [(hit.doc_id, hit.score) for hit in expected]
    assert all("late" not in hit.scores for hit in hits)
    assert all(passage.highlights == () for hit in hits for passage in hit.passages)


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
        *(
            {"granularity": granularity, "hybrid": hybrid, "top_k": 30}
            for granularity in ("document", "chunk", "both")
            for hybrid in (True, False)
        ),
    ],
)
def test_search_with_any_option_is_judged_too(collection: Collection, options: dict[str, Any]):
    found, other = collection.search_batch([QUERY, "cat on the mat"], **options)
    hits, scores = found.hits, [hit.score for hit in found.hits]

    assert found == collection.search(QUERY, **options)
    assert other == collection.search("cat on the mat", **options)
    assert scores == sorted(scores, reverse=True)
    assert 0 < len(hits) <= 30
    assert scores[0] <= 1.0 + 1e-9
    assert all("late" in hit.scores for hit in hits)
    for passage in (passage for hit in hits for passage in hit.passages):
        for each in passage.highlights:
            assert passage.start_char <= each.start_char < each.end_char <= passage.end_char
    if "filters" in options:
        assert all(hit.metadata["year"] >= 2_020 for hit in hits)
    if options.get("max_characters"):
        passages = [passage for hit in hits for passage in hit.passages]
        assert sum(passage.end_char - passage.start_char for passage in passages) <= options["max_characters"]


@pytest.mark.parametrize("query", ["日本語 ☃", "👩\u200d👧", "?!"])
def test_query_without_a_word_that_the_model_knows_is_ranked_by_vectors_and_says_so(
    collection: Collection, query: str
):
    found = collection.search(query)

    assert found.warnings == (BY_VECTORS_ALONE,)
    assert found.hits
    assert all("late" not in hit.scores for hit in found.hits)
    assert collection.search(QUERY).warnings == ()
    for other in (query, "the", "old stone " * 700, "x" * 3_000):
        assert collection.search(other, hybrid=False).hits


def _collection_of(texts: list[str], root: Path, model: Path) -> Collection:
    config = settings(model, num_clusters=1, context_documents=1, landmark_interval=64, token_bytes=8)
    ingest_rows([{"id": str(number), "text": text} for number, text in enumerate(texts)], root, config)
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


WORDS = {"old", "cafe\u0301", "हिन्दी", "1\ufe0f\u20e3", "stone", "river"}
TEXT = "the old cafe\u0301 हिन्दी on the 1\ufe0f\u20e3 stone 👩\u200d👩\u200d👧 river"
TITLE = "the old stone path the mountain the river"


@pytest.fixture
def late_folder(tmp_path: Path, tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a copy of the tiny BERT; in codebooks that are made here all tokens weigh alike."""
    monkeypatch.setattr(
        documents, "token_idf", lambda _ids, _offsets, size, _unseen: np.ones(size, np.float32)
    )
    return shutil.copytree(tiny_model_folder, tmp_path / "late-model")


def collection_of(
    folder: Path, root: Path, text: str, title: str = "", landmark_interval: int = 64
) -> Collection:
    """Return a collection of one document, all tokens weighing alike."""
    encoder = {
        "model": str(folder),
        "landmark_interval": landmark_interval,
        "use_context": False,
        "token_bytes": 32,  # of states of 32 numbers: codes lose next to nothing
    }
    collection = Collection.create("c", root=root, settings={"encoder": encoder})
    collection.add([{"id": "0", "text": text, "title": title}])
    return collection


def found_by(
    folder: Path, root: Path, query: str, text: str, title: str = "", landmark_interval: int = 64
) -> Passage:
    """Return the passage of one document that answers a query."""
    (hit,) = collection_of(folder, root, text, title, landmark_interval).search(query).hits
    return hit.passages[0]


def teach_words(folder: Path, text: str) -> None:
    """Give the words of a text that a model does not know the ids of parts of words."""
    path = folder / "tokenizer.json"
    tokenizer, content = Tokenizer.from_file(str(path)), json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text))
    unknown = sorted({piece for piece, _ in pieces} - vocabulary.keys())
    for part, word in zip([token for token in vocabulary if token.startswith("##")], unknown, strict=False):
        vocabulary[word] = vocabulary.pop(part)
    path.write_text(json.dumps(content))


def words_of(text: str, highlights: Sequence[Highlight]) -> list[str]:
    return [text[each.start_char : each.end_char] for each in highlights]


def space_before_words(folder: Path) -> None:
    """Let the tokenizer of a model count the space before a word to the word, as sentencepiece's do."""
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] = {
        token if token.startswith(("##", "[")) else f"▁{token}": number
        for token, number in content["model"]["vocab"].items()
    }
    content["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"}
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("is_spaced", [False, True])
def test_highlights_are_whole_words_with_their_marks_whichever_token_holds_the_space(
    late_folder: Path, tmp_path: Path, is_spaced: bool
):
    teach_words(late_folder, TEXT)
    if is_spaced:
        space_before_words(late_folder)

    assert set(words_of(TEXT, found_by(late_folder, tmp_path, TEXT, TEXT).highlights)) == WORDS


def test_a_passage_of_several_pages_is_on_the_one_of_the_word_itself_and_not_of_one_like_it(
    late_folder: Path, tmp_path: Path
):
    text = PAGE_BREAK.join(["the stoneriver", "mountain", "the stoneold path"])
    assert found_by(late_folder, tmp_path / "words", "stoneold", text).page == "page 3"
    text = PAGE_BREAK.join(["granite", TEXT, "chalk"])
    teach_words(late_folder, text)
    assert found_by(late_folder, tmp_path / "texts", TEXT, text).page == "page 2"


def test_ideographs_are_words_of_their_own(late_folder: Path, tmp_path: Path):
    text = "stone 古石の道"
    teach_words(late_folder, text)
    found = set(words_of(text, found_by(late_folder, tmp_path, text, text).highlights))

    assert found & {"古", "石", "の", "道"}
    assert found <= {"stone", "古", "石", "の", "道"}


def test_highlights_do_not_repeat_a_query_that_is_one_endless_word(late_folder: Path, tmp_path: Path):
    text = "stone_stone"
    collection = collection_of(late_folder, tmp_path, text)
    once, often = (collection.search(query).hits[0].passages[0] for query in (text, f"{text}_" * 600))

    assert {word for each in once.highlights for word in each.query_words} == {text}
    assert often.highlights == ()


@pytest.mark.parametrize("landmark_interval", [8, 64])
def test_words_of_the_title_explain_the_late_score_of_a_passage_without_them(
    late_folder: Path, tmp_path: Path, landmark_interval: int
):
    passage = found_by(late_folder, tmp_path, TITLE, "cat", TITLE, landmark_interval)
    words = words_of(TITLE, passage.title_highlights)
    explained = sum(each.weight for each in passage.title_highlights)

    assert words == ["old", "stone", "path", "mountain", "river"]
    assert explained == pytest.approx(passage.scores["late"] * len(words) / len(TITLE.split()), rel=0.05)


def test_highlights_of_a_long_query_are_a_few_words_and_no_function_words(late_folder: Path, tmp_path: Path):
    text = "the old stone path over the mountain, a river walks to the sea and the cat sat on the mat"
    found = words_of(text, found_by(late_folder, tmp_path, text, text).highlights)

    assert len(found) == MAX_WORDS
    assert not {"the", "to", "on", "a", "and"} & set(found)


@pytest.mark.parametrize(("query", "text"), [("stone", "how does too"), ("how does too", "stone")])
def test_highlights_pair_no_function_word_where_a_model_finds_all_tokens_alike(
    late_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: str, text: str
):
    monkeypatch.setattr(hits, "LEAST_COSINE", -2.0)
    teach_words(late_folder, "how does too stone river")
    passage = found_by(late_folder, tmp_path, f"{query} river", f"{text} river", landmark_interval=8)
    shown = words_of(f"{text} river", passage.highlights)
    asked = {word for each in passage.highlights for word in each.query_words}

    assert shown
    assert asked
    assert not {"how", "does", "too"} & {*shown, *asked}


def test_highlights_pair_no_unlike_words_of_a_model_whose_states_have_much_in_common(
    late_folder: Path, tmp_path: Path
):
    weights = load_file(late_folder / "model.safetensors")
    last = max(name for name in weights if name.endswith("output.LayerNorm.bias"))
    weights[last][0] += 8.0
    save_file(weights, late_folder / "model.safetensors", {"format": "pt"})
    like = found_by(late_folder, tmp_path / "like", "old river", "old river")
    unlike = found_by(late_folder, tmp_path / "unlike", "old river", "stone mountain cat")

    assert words_of("old river", like.highlights) == ["old", "river"]
    assert unlike.scores["late"] > hits.LEAST_COSINE
    assert unlike.highlights == ()


@pytest.mark.parametrize(("query", "shown"), [("103", False), ("x", False), ("mat", True)])
def test_highlights_pair_no_number_or_letter_with_another_word(
    late_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, query: str, shown: bool
):
    monkeypatch.setattr(hits, "LEAST_COSINE", -2.0)
    monkeypatch.setattr(hits, "LEAST_GAIN", -2.0)
    teach_words(late_folder, "103 x")
    found = [found_by(late_folder, tmp_path / "near", query, "stone").highlights]
    monkeypatch.setattr(hits, "OTHER_WORD", 1.0)
    found.append(found_by(late_folder, tmp_path / "far", query, "stone").highlights)

    assert [words_of("stone", each) for each in found] == [["stone"] * shown, []]


def test_highlights_leave_out_function_words_of_the_language_of_the_query(late_folder: Path, tmp_path: Path):
    query = "wie man das tor mit dem stein baut"
    teach_words(late_folder, query)
    passage = found_by(late_folder, tmp_path, query, f"{'the river of the stone and the way. ' * 4}{query}")

    asked = {word for each in passage.highlights for word in each.query_words}

    assert asked
    assert not {"man", "das", "mit"} & asked
