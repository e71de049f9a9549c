"""Training pairs: read from files, cut from documents, kept out where judged; vectors, hard negatives."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.errors import SchemaError, SourceError
from cairn.pipeline.lab.train.documents import (
    MIN_SECTION_CHARACTERS,
    read_document_pairs,
    split_sections,
)
from cairn.pipeline.lab.train.leakage import JudgedTexts, drop_judged, read_judged_texts
from cairn.pipeline.lab.train.pair_data import (
    NONE_FOUND,
    embed_pairs,
    mine_hard_negatives,
    pairs_fingerprint,
    prepared,
)
from cairn.pipeline.lab.train.pairs import (
    Candidates,
    PairRow,
    TrainingPairs,
    join_pairs,
    read_pairs,
    read_texts,
)
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.types import silent_progress


def write_parquet(path: Path, **columns: list[object]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return path


def test_read_pairs_of_any_format_gives_the_same_pairs(tmp_path):
    columns = {"query": ["a", "b"], "document": ["x", "y"], "title": ["t", None], "source": ["s", "s"]}
    columns["negatives"] = [["n", "x", None, "n"], None]
    records = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    parquet = read_pairs([write_parquet(tmp_path / "pairs.parquet", **columns)])
    lines = read_pairs([write_lines(tmp_path / "pairs.jsonl", *records)])
    (tmp_path / "pairs.csv").write_text("query,document,title,source\na,x,t,s\nb,y,,s\n")
    for pairs in (parquet, lines, read_pairs([tmp_path / "pairs.csv"])):
        assert [row[:4] for row in pairs.rows] == [("a", "x", "t", "s"), ("b", "y", "", "s")]
    assert [[row.negatives for row in pairs.rows] for pairs in (parquet, lines)] == [[("n",), ()]] * 2
    empty = write_lines(tmp_path / "q.jsonl", {"query": "a", "document": "x", "negatives": []})
    assert read_pairs([empty]).rows[0].negatives == ()


def test_read_pairs_empty_sides_and_repetitions_are_counted(tmp_path):
    path = write_parquet(
        tmp_path / "p.parquet", query=["a", " ", "b", "a", None], document=["x", "y", "", "x", "z"]
    )
    pairs = read_pairs([path])
    assert [(row.query, row.source) for row in pairs.rows] == [("a", "p")]
    assert pairs.skipped == {"empty query": 2, "empty document": 1, "repeated pair": 1}


def test_read_pairs_text_that_is_not_unicode_is_named(tmp_path):
    rows = [{"query": "a", "document": "y"}, {"query": "half \ud800", "document": "x"}]
    write_lines(tmp_path / "p.jsonl", *rows)
    damaged = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xff\xfe")]
    )
    pq.write_table(pa.table({"query": damaged, "document": ["x"]}), tmp_path / "p.parquet")
    for name, row in (("p.jsonl", 2), ("p.parquet", 1)):
        told = rf"{name} must be a file that can be read whole, got: column 'query' of row {row} is not valid"
        with pytest.raises(SourceError, match=told):
            read_pairs([tmp_path / name])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"negatives": "n"}, "column negatives of p.jsonl must hold lists of texts, got string"),
        ({"negatives": [5]}, "column negatives of p.jsonl must hold lists of texts, got list"),
        ({"instruction": 5}, "column instruction of p.jsonl must hold text, got int64"),
        ({"query": ["a"]}, "column query of p.jsonl must hold text, got list"),
    ],
)
def test_read_pairs_columns_of_the_wrong_kind_are_named(tmp_path, change, sentence):
    with pytest.raises(SchemaError, match=sentence):
        read_pairs([write_lines(tmp_path / "p.jsonl", {"query": "a", "document": "x", **change})])


def test_files_that_give_nothing_to_train_on_are_refused(tmp_path):
    questions = write_parquet(tmp_path / "p.parquet", question=["a"], document=["x"])
    blank = write_parquet(tmp_path / "blank.parquet", query=[""], document=["x"], text=[" "])
    short = write_parquet(tmp_path / "m.parquet", text=["x"])
    (tmp_path / "notes.md").write_text("no pairs")
    sections = partial(read_document_pairs, max_document_tokens=256)
    for read, path, error, sentence in (
        (read_pairs, questions, SchemaError, r"p\.parquet must have the columns query, .* missing: query"),
        (read_pairs, blank, SourceError, "1 with empty query"),
        (read_pairs, tmp_path / "absent", SourceError, "absent"),
        (
            read_pairs,
            tmp_path / "notes.md",
            SourceError,
            r"must be tables with columns, got none in .*notes\.md",
        ),
        (read_texts, questions, SchemaError, "must have the columns text, missing: text; it has question"),
        (read_texts, tmp_path / "none.jsonl", SourceError, r"none\.jsonl"),
        (read_texts, blank, SourceError, "must hold at least one, got 1 with empty text; name others"),
        (sections, short, SourceError, "at least one section of 200 characters, got 1 with short section"),
        (read_judged_texts, tmp_path, SourceError, r"must hold queries\.parquet, \.arrow"),
    ):
        with pytest.raises(error, match=sentence):
            read([path])


def test_folders_are_read_in_the_order_of_names(tmp_path):
    (tmp_path / "deep").mkdir()
    b = {"query": ["b", "c"], "document": ["y", "y"], "text": ["b", "c"], "language": ["de", None]}
    write_parquet(tmp_path / "b.parquet", **b)
    first = {"query": "a", "document": "x", "text": "a"}
    write_lines(
        tmp_path / "a.jsonl", first, {**first, "language": "en", "text": "b"}, {**first, "query": "d"}
    )
    write_lines(tmp_path / "deep" / "e.jsonl", {"query": "e", "document": "", "text": " "})
    texts, pairs = read_texts([tmp_path]), read_pairs([tmp_path])
    assert [row.query for row in pairs.rows] == ["a", "d", "b", "c"]
    assert pairs.skipped == {"repeated pair": 1, "empty document": 1}
    assert (texts.texts, texts.languages) == (("a", "b", "c"), ("", "en", ""))
    assert texts.skipped == {"repeated text": 2, "empty text": 1}


def test_candidates_are_documents_then_given_negatives_each_once():
    rows = [
        PairRow("a", "x", "", "s", negatives=("n", "m")),
        PairRow("b", "y", "", "s", negatives=("m",)),
        PairRow("c", "z", "", "s", instruction="like", negatives=("m",)),
    ]
    candidates = Candidates.of(TrainingPairs(rows=tuple(rows)))
    assert candidates.texts == ("x", "y", "z", "n", "m")
    assert candidates.given_Nk.tolist() == [[3, 4], [4, -1], [4, -1]]


def prose(name: str, num_sentences: int = 6) -> str:
    return " ".join(
        f"The {name} of number {number} stands on the old path beside the river."
        for number in range(num_sentences)
    )


def test_split_sections_finds_headings_and_takes_no_code_or_rule_for_one():
    text = (
        "Opening.\n\n# First\n\n```\n# a comment\n```\n\nSecond\n------\ntwo\n=== Third ===\n"
        "a line of a paragraph\n---\n#tag and 1 == 2 == 3\n\n*****\nFourth\n*****\n\nfour\n\n-----\n\n====="
    )
    assert [(section.heading, section.body) for section in split_sections(text, 1_000)] == [
        ("", "Opening."),
        ("First", "```\n# a comment\n```"),
        ("Second", "two"),
        ("Third", "a line of a paragraph\n---\n#tag and 1 == 2 == 3"),
        ("Fourth", "four\n\n-----\n\n====="),
    ]


def test_split_sections_long_ones_are_cut_at_paragraphs_then_sentences_and_lose_nothing():
    paragraphs = [prose(name, 5) for name in ("stone", "cat", "mat")]
    text = "# Use\n\n" + "\n\n".join(paragraphs)
    for limit in (400, 150):
        sections = split_sections(text, limit)
        assert {section.heading for section in sections if section.body} == {"Use"}
        parts = [section for section in sections if section.body]
        assert all(len(part.body) <= limit and not part.is_whole for part in parts)
        assert " ".join(" ".join(part.body for part in parts).split()) == " ".join(
            " ".join(paragraphs).split()
        )
    assert [section.body for section in split_sections(text, 400)][1:] == paragraphs


def test_read_document_pairs_ask_with_title_and_heading_or_a_sentence_that_is_cut_out(tmp_path):
    names = [f"stone{number}" for number in range(20)]
    text = "\n\n".join(f"## Part {name}\n\n{prose(name)}" for name in names)
    pairs = read_document_pairs(
        [write_parquet(tmp_path / "manual.parquet", title=["Manual"], text=[text])], 256
    )
    assert len(pairs) == 20
    kinds = {"heading": 0, "sentence": 0}
    for name, (query, document, *about) in zip(names, pairs.rows, strict=True):
        assert about[:3] == ["Manual", "manual", "0:0"]
        asked = query.removeprefix("Manual: ")
        assert asked != query
        assert not {"Manual", "Part"} & set(document.split())
        kinds["heading" if asked == f"Part {name}" else "sentence"] += 1
        if asked != f"Part {name}":
            assert asked in prose(name)
            assert asked not in document
            assert sorted((asked + " " + document).split()) == sorted(prose(name).split())
    assert min(kinds.values()) > 2


def test_read_document_pairs_without_a_title_or_of_a_section_in_parts_ask_with_no_heading(tmp_path):
    long = "# Use\n\n" + "\n\n".join(prose(f"stone{number}", 10) for number in range(12))
    texts, sources = [f"# Use\n\n{prose('cat')}", long], ["cats", "manual"]
    file = write_parquet(tmp_path / "m.parquet", title=["", "Manual"], text=texts, source=sources)
    pairs = read_document_pairs([file], 256)
    assert pairs.rows[0].query in prose("cat")
    assert {row.source: row.query == "Manual: Use" for row in pairs.rows} == {"cats": False, "manual": False}
    assert len(pairs) > 7


def test_read_document_pairs_counts_what_makes_no_pair(tmp_path):
    listing = "\n".join(f"* item{number}" for number in range(60))
    texts = [None, "# A\n\nshort", f"# B\n\n{prose('cat')}", f"# B\n\n{prose('cat')}", listing]
    pairs = read_document_pairs([write_parquet(tmp_path / "m.parquet", title=["T"] * 5, text=texts)], 256)
    assert len(listing) > MIN_SECTION_CHARACTERS
    assert len(pairs) == 2  # equal sections of two pages
    assert pairs.skipped["empty document"] == 1
    assert pairs.skipped["section without a sentence to ask with"] == 1


def article(num_words: int, seed: int) -> list[str]:
    generator = random.Random(seed)
    return [f"word{generator.randrange(5_000)}" for _ in range(num_words)]


def test_judged_texts_are_known_however_written_whole_or_for_the_most_part(tmp_path):
    words = article(400, 0)
    for name, text in (("one", " ".join(words)), ("two", "the old path")):
        (tmp_path / name).mkdir()
        write_parquet(tmp_path / name / "corpus.parquet", id=["1"], text=[text])
        write_parquet(tmp_path / name / "queries.parquet", id=["1", "2"], text=[f"What is {name}?", None])
    judged, paragraph = read_judged_texts([tmp_path / "one", tmp_path / "two"]), words[100:160]
    assert judged.has_query("what is ONE")
    assert not judged.has_query("what is three")
    assert not judged.has_query("the old path")
    assert judged.has_document(" ".join(paragraph).upper())
    assert judged.has_document(" ".join([*paragraph, *article(20, 1)]))
    assert judged.has_document("The old path.")
    quoting = " ".join([*article(80, 3), *words[:60], *article(80, 4)])
    for other in (" ".join(article(60, 2)), quoting, "the old"):
        assert not judged.has_document(other)


def test_drop_judged_counts_pairs_by_the_side_that_was_judged():
    text, sides = " ".join(article(100, 0)), ("asked", "other", "third", "fourth")
    rows = [
        PairRow(query, document, "", "s")
        for query, document in zip(sides, ("a", text, "a", "b"), strict=True)
    ]
    rows[2] = rows[2]._replace(negatives=("c", text))
    kept = drop_judged(TrainingPairs(rows=tuple(rows)), JudgedTexts(["asked"], [text]))
    assert kept.rows == (rows[2]._replace(negatives=("c",)), rows[3])
    assert kept.skipped == {"query of an evaluation set": 1, "document of an evaluation set": 1}
    again = join_pairs([kept, replace(kept, skipped={"empty query": 2, "query of an evaluation set": 3})])
    assert (again.rows[2:], again.skipped["query of an evaluation set"]) == (kept.rows, 4)
    with pytest.raises(SourceError, match="got no other"):
        drop_judged(TrainingPairs(rows=tuple(rows[:1])), JudgedTexts(["asked"], []))


N, V = 41, 6


def world() -> tuple[np.ndarray, np.ndarray, list[str], list[str]]:
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((2, N, V)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=2, keepdims=True)
    documents = [f"text {place % 35}" for place in range(N)]
    for place in range(35, N):
        vectors[1, place] = vectors[1, place - 35]
    return vectors[0], vectors[1], documents, [f"s{place % 3}" for place in range(N)]


@pytest.mark.parametrize("num_negatives", [1, 4, 30])
def test_mine_hard_negatives_equals_the_rule_written_out(num_negatives):
    query, document, texts, sources = world()
    left_out, sources[5] = np.array([3, 8]), "alone"
    mined = mine_hard_negatives(
        query,
        document,
        texts,
        sources,
        num_negatives=num_negatives,
        max_share=0.95,
        left_out=left_out,
    )
    for pair in range(N):
        positive = float(query[pair] @ document[pair])
        limit = positive - 0.05 * abs(positive)
        seen: dict[str, int] = {}
        for other in range(N):
            if sources[other] == sources[pair] and other not in left_out and texts[other] != texts[pair]:
                seen.setdefault(texts[other], other)
        allowed = [other for other in seen.values() if float(query[pair] @ document[other]) < limit]
        expected = sorted(allowed, key=lambda other: -float(query[pair] @ document[other]))[:num_negatives]
        assert mined[pair].tolist() == expected + [NONE_FOUND] * (num_negatives - len(expected))


def test_own_negatives_are_those_that_a_pair_brings_else_mined_ones_and_none_is_held_out(
    tiny_model_folder, tmp_path, make_pairs
):
    given = {4: ("a river", "the old mat"), 9: ("the old mat",), 30: ("a river",)}
    rows = make_pairs(40).rows
    given[5], given[6] = (rows[3].document, "a river"), (rows[3].document,)
    pairs = TrainingPairs(
        rows=tuple(row._replace(negatives=given.get(place, ())) for place, row in enumerate(rows))
    )
    heldout, config = np.array([3, 20]), TrainConfig(steps=1, hard_negatives=2, title_share=0.0)
    served = EncoderConfig(model=str(tiny_model_folder), pooling="lmk", attention="full", window_tokens=96)
    checkpoint = read_checkpoint(tiny_model_folder)
    data = prepared(pairs, heldout, checkpoint, served, config, tmp_path, silent_progress)
    mined_Nk = mine_hard_negatives(
        data.vectors.query_NV,
        data.vectors.document_NV[:40],
        pairs.documents,
        [row.source for row in rows],
        num_negatives=2,
        max_share=0.95,
        left_out=heldout,
    )
    texts = Candidates.of(pairs).texts
    for place, own in enumerate(data.hard_negatives_Nk.tolist()):
        mined = [texts[number] for number in mined_Nk[place].tolist() if number != NONE_FOUND]
        brought = [text for text in given.get(place, ()) if text != rows[3].document]
        assert [texts[number] for number in own if number != NONE_FOUND] == (brought or mined), place
    assert (mined_Nk != NONE_FOUND).any(1).sum() > 20


CPU = torch.device("cpu")


def test_embed_pairs_gives_unit_vectors_and_equal_texts_equal_ones(tiny_model_folder, make_pairs):
    first, second, *others = make_pairs(40).rows
    pairs = TrainingPairs(rows=(first._replace(document=second.document), second, *others))
    backbone = load_backbone(EncoderConfig(model=str(tiny_model_folder), precision="fp32"), CPU)
    vectors = embed_pairs(pairs, backbone, silent_progress)
    assert vectors.document_NV.shape == vectors.query_NV.shape == (40, vectors.document_NV.shape[1])
    assert np.allclose(np.linalg.norm(vectors.query_NV, axis=1), 1.0, atol=1e-5)
    assert np.array_equal(vectors.document_NV[0], vectors.document_NV[1])
    assert not np.array_equal(vectors.document_NV[0], vectors.document_NV[2])


def test_pairs_fingerprint_knows_texts_order_and_where_a_column_ends(make_pairs):
    first, *others = make_pairs(6).rows
    query, document = first.query + first.document[0], first.document[1:]
    changed = [
        (first._replace(query="x"), *others),
        (*others, first),
        (first._replace(query=query, document=document), *others),
        (first, *others),
    ]
    assert len({pairs_fingerprint(TrainingPairs(rows=rows)) for rows in changed}) == 4
    assert pairs_fingerprint(TrainingPairs(rows=changed[-1])) == pairs_fingerprint(make_pairs(6))
