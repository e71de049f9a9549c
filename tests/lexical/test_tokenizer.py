"""Words of texts in every script: exact examples, and what holds for any text."""

from __future__ import annotations

import unicodedata

import pytest
from cairn.pipeline.lexical.tokenizer import (
    MAX_QUERY_WORDS,
    MAX_WORD_CHARACTERS,
    is_function_word,
    main_languages,
    pieces_of,
    runs_of,
    terms_of_query,
    word_at,
)
from hypothesis import example, given
from hypothesis import strategies as st

from tests.lexical.terms import terms_of


@pytest.mark.parametrize(
    ("text", "terms"),
    [
        ("Running STONES café naïvely", "run stone cafe naiv"),
        ("The path and the way", "path way"),
        ("don't re-use", "don t re use"),
        ("max_open_files", "maxopenfil max open file"),
        ("maxOpenFiles XMLHttpRequest", "maxopenfil max open file xmlhttprequest xml http request"),
        ("E1042 USB3 x86_64", "e1042 1042 usb3 usb x8664 x86 64 86"),
        ("C++ C# .NET ASP.NET i++;", "c++ c c# c .net net asp .net net i++ i"),
        ("PDFs __init__ ___ a_b", "pdfs init ab"),
        ("ＧｉｔＨｕｂ ﬁle ⅷ ½ m²", "github git hub file viii 1⁄2 m2"),
        ("١٢٣ १२३ 123", "123 123 123"),
        ("日本語の文", "日本 本語 語の の文 日 本 語 文"),
        ("水 カ", "水 カ"),
        ("ﾊﾟｿｺﾝ パソコン", "パソ ソコ コン パソ ソコ コン"),
        ("한국어 책", "한국 국어 책"),
        ("ภาษาไทย", "ภา าษ ษา าไ ไท ทย"),
        ("น้ำแข็ง", "น้ํา าแ แข็ ข็ง"),
        ("ພາສາລາວ", "ພາ າສ ສາ າລ ລາ າວ"),
        ("ភាសាខ្មែរ", "ភាសា សាខ្ ខ្មែ មែរ"),
        ("မြန်မာ", "မြန် န်မာ"),
        ("使用GitHub备份E1042", "使用 使 用 github git hub 备份 备 份 e1042 1042"),
        ("Cайт", "cаит аит"),
        ("co\u00adoperation 1\ufe0f\u20e3", "cooper 1"),
    ],
)
def test_terms_of_english_texts_and_of_scripts_without_spaces(text: str, terms: str) -> None:
    assert terms_of(text) == terms.split()


@pytest.mark.parametrize(
    ("language", "text", "terms"),
    [
        ("de", "Die Häuser der Straße", "haus strass"),
        ("fr", "l'école et les chevaux", "ecol cheval"),
        ("es", "las canciones cantadas", "cancion cant"),
        ("ru", "и книги читали", "книг чита"),
        ("el", "οι πόλεις", "πολ"),
        ("tr", "kitaplar ve ISPARTA", "kitap ispar"),
        ("vi", "của Hà Nội", "hà nội"),
        ("ar", "في المدارس", "مدارس"),
        ("hi", "में किताबें", "किताब"),
        ("hi", "क़िताबें \u095b\u092e\u0940\u0928 ज़मीन", "किताब जमीन जमीन"),
        ("bn", "বাড়ি", "বাডি"),
        ("he", "שָׁלוֹם שלום", "שלום שלום"),
        ("ar", "كِتَابٌ محـــمد", "كتاب محمد"),
        ("none", "מַיִם ਖ਼ਬਰ", "מים ਖਬਰ"),
        ("none", "the Häuser", "the hauser"),
        ("none", "Łódź smørrebrød œuvre þæt", "lodz smorrebrod oeuvre thaet"),
        ("zh", "文件 files", "文件 文 件 file"),
    ],
)
def test_terms_are_stems_of_the_language_without_its_function_words(
    language: str, text: str, terms: str
) -> None:
    assert terms_of(text, language) == terms.split()


def test_long_runs_are_kept_by_their_beginning_and_have_no_parts() -> None:
    run = "aB1" * 70_000
    assert terms_of(run) == [run[:MAX_WORD_CHARACTERS].lower()]
    assert terms_of("3f2a9cd01e4b77aa") == ["3f2a9cd01e4b77aa"]


def test_a_long_line_inside_a_word_takes_no_time() -> None:
    text = f"aa{'_' * 300_000}bb"
    assert terms_of(text) == ["aabb", "aa", "bb"]
    assert word_at(text, 1) == (0, len(text))


def test_a_query_asks_for_a_word_in_each_language_as_for_one() -> None:
    assert terms_of_query("die Häuser houses", ["en", "de"]) == [
        ("die",),
        ("hauser", "haus"),
        ("hous",),
    ]
    assert terms_of_query("备份脚本 水", ["zh"]) == [("备份",), ("份脚",), ("脚本",), ("水",)]
    assert len(terms_of_query("书" * 2 * MAX_QUERY_WORDS, ["zh"])) == MAX_QUERY_WORDS


def test_a_query_leaves_out_the_function_words_of_the_language_that_it_shows() -> None:
    languages = ["en", "de"]
    assert terms_of_query("world war", languages) == [("world",), ("war",)]
    assert terms_of_query("wo war der Stein", languages) == [("stein",)]
    assert terms_of_query("what was the world war", languages) == [("world",), ("war",)]


@pytest.mark.parametrize(
    ("query", "asked"),
    [
        ("What do we know about rivers?", "know river"),
        ("rivers and dams. What about bridges", "river dam bridg"),
        ("who runs the WHO now", "run who now"),
        ("what about who", "what about who"),
        ("how to cook", "how cook"),
        ("while loop", "while loop"),
        ("can opener", "can open"),
        ("us economy in May", "us economi may"),
    ],
)
def test_a_query_asks_for_question_words_where_they_are_names_or_little_else_is_left(query, asked) -> None:
    assert terms_of_query(query, ["en"]) == [(term,) for term in asked.split()]


def test_main_languages_are_those_of_a_hundredth_of_the_documents() -> None:
    assert main_languages({"de": 30, "en": 60, "fr": 1, "da": 0}) == ("en", "de", "fr")
    assert main_languages({"en": 1_000, "da": 9}) == ("en",)
    assert main_languages({}) == ()


def test_function_words_are_those_of_the_languages_asked() -> None:
    assert [is_function_word("The", own) for own in (["en"], ["de", "en"], ["de"], [])] == [
        *(True, True, False, False)
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("use _max_open_ (C++, .NET)", "use max_open C++ .NET"),
        ("don't 1\ufe0f\u20e3", "don t 1\ufe0f\u20e3"),
        ("東京タワーへ行く", "東 京 タワー へ 行 く"),
        ("서울에 น้ำ", "서울에 น้ำ"),
    ],
)
def test_words_that_are_shown(text: str, words: str) -> None:
    spans = dict.fromkeys(word_at(text, place) for place in range(len(text)))
    assert [text[slice(*span)] for span in spans if span is not None] == words.split()


TEXTS = st.text(st.characters(exclude_categories=("Cs", "Cn", "Co")), max_size=40)
MIXED = st.text(st.sampled_from("aZé9_-.+# C'日のカ한국ไทยน้ำខ្មែရန်३Дя\u00ad\u200d\ufe0fﾊﾟ"), max_size=40)


def is_said(character: str) -> bool:
    return unicodedata.category(character)[0] in "LN"


@given(TEXTS | MIXED)
@example("\U0001df00\U0001d2e0\U0001fbf9")
def test_every_letter_and_digit_is_in_a_word_that_is_shown(text: str) -> None:
    spans = [word_at(text, place) for place in range(len(text))]
    for place, character in enumerate(text):
        span = spans[place]
        assert span is None or span[0] <= place < span[1]
        assert span is not None or not is_said(character), (text, place)


@given(MIXED)
def test_every_letter_and_digit_is_in_a_word_that_is_counted(text: str) -> None:
    counted = "".join(piece for run in runs_of(text) for piece in pieces_of(run))
    for character in text:
        folded = unicodedata.normalize("NFKC", character).casefold()
        if is_said(character) and len(folded) == 1 and not folded.isdigit() and folded not in "ﾊﾟ":
            assert unicodedata.normalize("NFD", folded)[0] in unicodedata.normalize("NFD", counted)


WORDS = ["é", "naïve", "Й", "가", "ﾊﾟ", "パ", "น้ำ", "ខ្មែ", "日", "GitHub", "E1", "_", " ", "ñ", "हिन्दी"]


@given(st.lists(st.sampled_from(WORDS)).map("".join))
@example("é" * 33 + "GitHub")
def test_equal_texts_in_other_forms_have_the_same_terms(text: str) -> None:
    assert terms_of(unicodedata.normalize("NFD", text)) == terms_of(unicodedata.normalize("NFC", text))
