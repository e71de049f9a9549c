from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.errors import SourceError
from cairn.pipeline.lab.train.leakage import JudgedTexts, drop_judged, read_judged_texts, words
from cairn.pipeline.lab.train.pairs import TrainingPairs


def text_of(num_words: int, seed: int) -> str:
    generator = random.Random(seed)
    return " ".join(f"word{generator.randrange(5_000)}" for _ in range(num_words))


def pairs_of(*pairs: tuple[str, str]) -> TrainingPairs:
    queries, documents = zip(*pairs, strict=True)
    return TrainingPairs(
        queries=queries, documents=documents, titles=("",) * len(pairs), sources=("s",) * len(pairs)
    )


def test_words_case_width_and_punctuation_do_not_matter():
    assert words("\uff23\uff41\uff49\uff52\uff4e, the STONE-path!") == words("cairn the stone path")


def test_judged_texts_know_queries_however_they_are_written():
    judged = JudgedTexts(["What is a cairn?"], [])
    assert judged.has_query("what is a CAIRN")
    assert not judged.has_query("what is a stone")


def test_judged_texts_know_a_paragraph_of_a_judged_article():
    article = text_of(400, 0)
    judged = JudgedTexts([], [article])
    paragraph = " ".join(article.split()[100:160])
    assert judged.has_document(paragraph.upper())
    assert judged.has_document(paragraph + " " + text_of(20, 1))
    assert not judged.has_document(text_of(60, 2))


def test_judged_texts_a_shared_quotation_does_not_make_a_document_judged():
    article = text_of(400, 0)
    quoting = text_of(80, 3) + " " + " ".join(article.split()[:30]) + " " + text_of(80, 4)
    assert not JudgedTexts([], [article]).has_document(quoting)


def test_judged_texts_short_documents_count_only_whole():
    judged = JudgedTexts([], ["the old path", text_of(50, 0)])
    assert judged.has_document("The old path.")
    assert not judged.has_document("the old")


def test_drop_judged_counts_pairs_by_the_side_that_was_judged():
    article = text_of(100, 0)
    pairs = pairs_of(("asked", "fine"), ("other", article), ("third", "fine"), ("fourth", "also fine"))
    kept = drop_judged(pairs, JudgedTexts(["asked"], [article]))
    assert kept.queries == ("third", "fourth")
    assert kept.skipped == {"query of an evaluation set": 1, "document of an evaluation set": 1}


def test_drop_judged_nothing_left_is_an_error():
    with pytest.raises(SourceError, match="got no other"):
        drop_judged(pairs_of(("asked", "x")), JudgedTexts(["asked"], []))


def test_read_judged_texts_reads_both_files_of_every_set(tmp_path: Path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        pq.write_table(
            pa.table({"id": ["1"], "text": [f"document {name}"]}), tmp_path / name / "corpus.parquet"
        )
        pq.write_table(
            pa.table({"id": ["1", "2"], "text": [f"query {name}", None]}), tmp_path / name / "queries.parquet"
        )
    judged = read_judged_texts([tmp_path / "one", tmp_path / "two"])
    assert judged.has_query("query one")
    assert judged.has_document("document two")
    assert not judged.has_query("document two")


def test_read_judged_texts_folder_without_a_corpus_is_refused(tmp_path: Path):
    with pytest.raises(SourceError, match=r"must hold corpus\.parquet, \.arrow"):
        read_judged_texts([tmp_path])
