"""Highlights of texts with marks, and of models whose tokens begin with the space before a word."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jobs.collection import Collection
from pipeline.token_vectors.projection import save_token_projection
from tests.late_models import random_projection

WORDS = {"the", "old", "cafe\u0301", "हिन्दी", "on", "1\ufe0f\u20e3", "stone", "path", "river"}
TEXT = "the old cafe\u0301 हिन्दी on the 1\ufe0f\u20e3 stone path 👩\u200d👩\u200d👧 river"


def collection_of(folder: Path, root: Path, text: str) -> Collection:
    """Index a text; all tokens of a query weigh alike."""
    projection = random_projection(folder)
    alike = replace(projection, weight_codes_X=np.full_like(projection.weight_codes_X, 255))
    save_token_projection(folder, alike)
    settings = {"encoder": {"model": str(folder), "landmark_interval": 64, "use_context": False}}
    collection = Collection.create("c", root=root, settings=settings)
    collection.add([{"id": "0", "text": text}])
    return collection


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
    tiny_model_folder: Path, tmp_path: Path, is_spaced: bool
):
    folder = shutil.copytree(tiny_model_folder, tmp_path / "model")
    if is_spaced:
        space_before_words(folder)

    (hit,) = collection_of(folder, tmp_path, TEXT).search(TEXT).hits
    assert {TEXT[each.start_char : each.end_char] for each in hit.passages[0].highlights} == WORDS


def test_ideographs_are_words_of_their_own(tiny_late_folder: Path, tmp_path: Path):
    text = "stone 古石の道"
    (hit,) = collection_of(tiny_late_folder, tmp_path, text).search(text).hits
    found = {text[each.start_char : each.end_char] for each in hit.passages[0].highlights}

    assert found & {"古", "石", "の", "道"}
    assert found <= {"stone", "古", "石", "の", "道"}


def test_highlights_do_not_repeat_a_query_that_is_one_endless_word(tiny_late_folder: Path, tmp_path: Path):
    text = "stone_stone"
    collection = collection_of(tiny_late_folder, tmp_path, text)
    once, often = (collection.search(query).hits[0].passages[0] for query in (text, f"{text}_" * 600))

    assert {word for each in once.highlights for word in each.query_words} == {text}
    assert often.highlights == ()
