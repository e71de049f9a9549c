"""Highlights of titles, of texts with marks, and of tokens that begin with the space before a word."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from cairn.pipeline.collection import Collection
from cairn.pipeline.corpus.formats.format import PAGE_BREAK
from cairn.pipeline.encode import documents
from cairn.pipeline.search import hits
from cairn.pipeline.search.hits import MAX_WORDS
from cairn.pipeline.types import Highlight, Passage
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

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


def test_a_passage_of_several_pages_is_on_the_one_that_answers(late_folder: Path, tmp_path: Path):
    text = PAGE_BREAK.join(["granite", TEXT, "chalk"])
    teach_words(late_folder, text)

    assert found_by(late_folder, tmp_path, TEXT, text).page == "page 2"


def test_a_passage_is_on_the_page_of_the_word_itself_and_not_of_one_like_it(
    late_folder: Path, tmp_path: Path
):
    text = PAGE_BREAK.join(["the stoneriver", "mountain", "the stoneold path"])

    assert found_by(late_folder, tmp_path, "stoneold", text).page == "page 3"


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
