"""What clusters are called: words that tell them apart, no filling words, no word twice in another form."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import SIZES, CollectionLayout
from cairn.pipeline.serve.corpus_map import (
    MAX_TEXT_CHARACTERS,
    TEXTS_A_CLUSTER,
    name_clusters,
    telling_texts,
)


def test_clusters_are_named_by_words_that_tell_them_apart() -> None:
    texts = [
        "The old stone and the path",
        "An old stone path",
        "The river is old",
        "A river for the mill",
        None,
        "The 7 of 12",
    ]
    names = name_clusters(texts, np.array([0, 0, 1, 1, 2, 2], np.int32))
    assert names == {0: "path stone", 1: "river mill", 2: ""}


def test_name_has_no_function_words_and_no_two_clusters_have_the_same() -> None:
    texts = ["How to walk a path", "How you walk a path", "Walk what path uphill", "Walk which path uphill"]
    names = name_clusters(texts, np.array([0, 0, 1, 1], np.int32))
    assert names == {0: "path walk", 1: "uphill path"}
    alike = name_clusters(["mill stone river", "mill stone river hill"], np.array([0, 1], np.int32))
    assert len({*alike.values()}) == 2
    assert name_clusters(["mill", "mill"], np.array([0, 1], np.int32)) == {0: "mill", 1: "mill"}


def test_name_says_nothing_twice() -> None:
    texts = ["turtle rawturtle turtles", "turtle rawturtle pen", "logger logging handler", "logger logging"]
    assert name_clusters(texts, np.array([4, 4, 9, 9], np.int32)) == {4: "rawturtle pen", 9: "logger handler"}


def test_documents_without_title_are_known_by_how_their_texts_begin(served_root: Path) -> None:
    generation = open_generation(CollectionLayout(served_root, "stones"), checks=SIZES)
    positions = np.arange(20)
    rows = generation.fetch_documents(positions, ["title", "text"]).to_pylist()
    titles = [row["title"] for row in rows]
    texts = telling_texts(generation, positions, titles, np.zeros(20, np.int32))
    assert titles.count(None) <= TEXTS_A_CLUSTER
    assert texts == [row["title"] or row["text"][:MAX_TEXT_CHARACTERS] for row in rows]


def test_only_some_short_texts_of_a_cluster_are_read(served_root: Path) -> None:
    generation = open_generation(CollectionLayout(served_root, "stones"), checks=SIZES)
    clusters = np.arange(20, dtype=np.int32) // 18
    texts = telling_texts(generation, np.arange(20), [None] * 20, clusters)
    assert [sum(text is not None for text in texts[:18]), sum(text is not None for text in texts[18:])] == [
        TEXTS_A_CLUSTER,
        2,
    ]


def test_name_has_no_function_word_of_the_collection_s_languages():
    texts = ["Die Mühle und der Fluss", "Die Mühle und das Rad", "Der Stein", "Der Stein"]
    names = name_clusters(texts, np.array([0, 0, 1, 1], np.int32), ("de",))
    assert names[0].split()[0] == "mühle"
    assert not {"die", "und", "der", "das"} & set(" ".join(names.values()).split())
