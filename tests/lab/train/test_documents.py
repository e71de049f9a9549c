from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.errors import SchemaError, SourceError
from cairn.pipeline.lab.train.documents import (
    MIN_SECTION_CHARACTERS,
    like_headed,
    read_document_pairs,
    split_sections,
)
from cairn.pipeline.lab.train.pair_vectors import NONE_FOUND, pairs_fingerprint
from cairn.pipeline.lab.train.pairs import PairRow, TrainingPairs


def prose(name: str, num_sentences: int = 6) -> str:
    return " ".join(
        f"The {name} of number {number} stands on the old path beside the river."
        for number in range(num_sentences)
    )


def write(path: Path, **columns: list[object]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "Opening.\n\n# First\n\none\n\n## Second ##\n\ntwo\n",
        "Opening.\n\nFirst\n=====\n\none\n\nSecond\n------\ntwo",
        "Opening.\n== First ==\none\n=== Second ===\ntwo",
        "Opening.\n\n*****\nFirst\n*****\n\none\n\nSecond\n~~~~~~\n\ntwo",
    ],
    ids=["markdown", "underlined", "wiki", "overlined"],
)
def test_split_sections_finds_headings(text: str):
    assert [(section.heading, section.body) for section in split_sections(text, 1_000)] == [
        ("", "Opening."),
        ("First", "one"),
        ("Second", "two"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "```\n# a comment\nx = 1\n```",
        "a line of a paragraph\n---",
        "words before\nnot after a gap\n---------------",
        "#tag and 1 == 2 == 3",
        "-----\n\n=====",
    ],
)
def test_split_sections_takes_no_code_rule_or_paragraph_for_a_heading(text: str):
    assert [section.heading for section in split_sections(text, 1_000)] == [""]


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


def test_split_sections_a_sentence_longer_than_a_section_stays_one():
    sentence = "word " * 100 + "end."
    assert [section.body for section in split_sections(sentence, 50)] == [sentence]


def test_read_document_pairs_ask_with_title_and_heading_or_a_sentence_that_is_cut_out(tmp_path: Path):
    names = [f"stone{number}" for number in range(20)]
    text = "\n\n".join(f"## Part {name}\n\n{prose(name)}" for name in names)
    pairs = read_document_pairs([write(tmp_path / "manual.parquet", title=["Manual"], text=[text])], 256)
    assert len(pairs) == 20
    kinds = {"heading": 0, "sentence": 0}
    for name, query, document in zip(names, pairs.queries, pairs.documents, strict=True):
        asked = query.removeprefix("Manual: ")
        assert asked != query
        assert "Manual" not in document
        assert "Part" not in document
        kinds["heading" if asked == f"Part {name}" else "sentence"] += 1
        if asked != f"Part {name}":
            assert asked in prose(name)
            assert asked not in document
            assert sorted((asked + " " + document).split()) == sorted(prose(name).split())
    assert min(kinds.values()) > 2
    assert (set(pairs.titles), set(pairs.sources), set(pairs.pages)) == ({"Manual"}, {"manual"}, {"0:0"})
    assert pairs.headings == tuple(f"Part {name}" for name in names)


def test_read_document_pairs_heading_of_a_section_in_parts_asks_for_none_of_them(tmp_path: Path):
    text = "# Use\n\n" + "\n\n".join(prose(f"stone{number}", 10) for number in range(12))
    pairs = read_document_pairs([write(tmp_path / "m.parquet", title=["Manual"], text=[text])], 256)
    assert len(pairs) > 6
    assert not any(query == "Manual: Use" for query in pairs.queries)


def test_read_document_pairs_without_title_ask_with_the_sentence_alone(tmp_path: Path):
    pairs = read_document_pairs(
        [write(tmp_path / "m.parquet", text=[f"# Use\n\n{prose('cat')}"], source=["cats"])], 256
    )
    assert pairs.queries[0] in prose("cat")
    assert pairs.sources == ("cats",)


def test_read_document_pairs_are_the_same_however_often_they_are_read(tmp_path: Path):
    path = write(
        tmp_path / "m.parquet",
        title=["Manual"],
        text=["\n\n".join(f"# S{n}\n\n{prose(f'cat{n}')}" for n in range(9))],
    )
    one, again = (read_document_pairs([path], 256) for _ in range(2))
    assert list(one.rows()) == list(again.rows())
    assert pairs_fingerprint(one) == pairs_fingerprint(again)


def test_read_document_pairs_counts_what_makes_no_pair(tmp_path: Path):
    listing = "\n".join(f"* item{number}" for number in range(60))
    texts = [None, "# A\n\nshort", f"# B\n\n{prose('cat')}", f"# B\n\n{prose('cat')}", listing]
    pairs = read_document_pairs([write(tmp_path / "m.parquet", title=["T"] * 5, text=texts)], 256)
    assert len(listing) > MIN_SECTION_CHARACTERS
    assert len(pairs) == 2  # equal sections of two pages
    assert pairs.skipped["empty document"] == 1
    assert pairs.skipped["section without a sentence to ask with"] == 1


def test_read_document_pairs_files_that_cannot_be_used_are_named(tmp_path: Path):
    with pytest.raises(SchemaError, match=r"m\.parquet must have the columns text, got body"):
        read_document_pairs([write(tmp_path / "m.parquet", body=["x"])], 256)
    with pytest.raises(
        SourceError, match=r"at least one section of 200 characters, got 1 with short section"
    ):
        read_document_pairs([write(tmp_path / "m.parquet", text=["x"])], 256)
    (tmp_path / "m.jsonl").write_text("{}")
    with pytest.raises(SourceError, match=r"must end in \.parquet, got 'm\.jsonl'"):
        read_document_pairs([tmp_path / "m.jsonl"], 256)


def test_like_headed_is_a_section_of_the_next_page_with_that_heading():
    headings = ("Use", "Use", "Other", "use", "Use", "Alone", "")
    pages = ("0:0", "0:0", "0:0", "0:1", "0:2", "0:2", "")
    pairs = TrainingPairs.of(
        [
            PairRow("q", f"d{n}", "", "s", page, head)
            for n, (page, head) in enumerate(zip(pages, headings, strict=True))
        ],
        {},
    )
    assert like_headed(pairs, np.zeros(0, np.int64))[:, 0].tolist() == [
        3,
        3,
        NONE_FOUND,
        4,
        0,
        NONE_FOUND,
        NONE_FOUND,
    ]
    assert like_headed(pairs, np.array([3]))[:, 0].tolist() == [
        4,
        4,
        NONE_FOUND,
        NONE_FOUND,
        0,
        NONE_FOUND,
        NONE_FOUND,
    ]
