from __future__ import annotations

import pytest
from cairn.pipeline.cluster.queries import MAX_SENTENCE_CHARACTERS, leading_sentence, query_side


def test_query_side_takes_query_then_title_then_sentence() -> None:
    titles = ["a title", "a title", None, ""]
    queries = ["a query", None, "  ", None]
    texts = [
        "text",
        "text",
        "Only a text stands in this row. And more.",
        "Blank is as good as absent here. Yes.",
    ]
    assert query_side(titles, queries, texts) == [
        "a query",
        "a title",
        "Only a text stands in this row.",
        "Blank is as good as absent here.",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "The wing stalls at 12.5 degrees of incidence. Then it drops.",
            "The wing stalls at 12.5 degrees of incidence.",
        ),
        (
            "Dr. A. Smith of Leeds measured the flow. Nobody else did.",
            "Dr. A. Smith of Leeds measured the flow.",
        ),
        ('"Is this the way to the harbour?" she asked. He nodded.', '"Is this the way to the harbour?"'),
        ("Introduction\n\nThe boundary layer is thin. It grows.", "Introduction The boundary layer is thin."),
        ("A heading without a full stop\n\nThe first paragraph follows.", "A heading without a full stop"),
        ("A hard-wrapped line goes\non below it. The end.", "A hard-wrapped line goes on below it."),
        (
            "東京は日本の首都であり、最大の都市である。人口は多い。",
            "東京は日本の首都であり、最大の都市である。",
        ),
        ("दिल्ली भारत की राजधानी है। यह बड़ी है।", "दिल्ली भारत की राजधानी है।"),
        (
            "Wo liegt der Hafen von Hamburg eigentlich? An der Elbe.",
            "Wo liegt der Hafen von Hamburg eigentlich?",
        ),
        ("no stop at all", "no stop at all"),
        ("  \n ", ""),
    ],
)
def test_leading_sentence_ends_where_a_reader_would(text: str, expected: str) -> None:
    assert leading_sentence(text) == expected


def test_leading_sentence_of_endless_text_ends_at_a_word() -> None:
    sentence = leading_sentence("word " * 500)
    assert len(sentence) <= MAX_SENTENCE_CHARACTERS
    assert set(sentence.split()) == {"word"}
    assert leading_sentence("x" * 10_000) == "x" * MAX_SENTENCE_CHARACTERS
