from cairn.pipeline.index.words import NO_TERM, TermNumbers, terms_of, words_of


def test_words_are_runs_of_letters_marks_and_digits() -> None:
    assert words_of("don't re-use utf_8 (twice)!  日本語 हिन्दी") == [
        "don",
        "t",
        "re",
        "use",
        "utf",
        "8",
        "twice",
        "日本語",
        "हिन्दी",
    ]


def test_terms_are_lower_case_stems_without_accents() -> None:
    assert terms_of("Running STONES café naïvely") == ["run", "stone", "cafe", "naiv"]


def test_terms_leave_out_stop_words_and_endless_runs() -> None:
    assert terms_of("The path and " + "x" * 41 + " " + "k" * 40) == ["path", "k" * 40]


def test_terms_of_no_words_are_none() -> None:
    assert terms_of("  ... the") == []


def test_numbers_are_given_by_term_in_the_order_met() -> None:
    numbers = TermNumbers()
    assert numbers.of(["Stones", "the", "path", "stone", "PATH"]) == [0, NO_TERM, 1, 0, 1]
    assert numbers.terms == ["stone", "path"]
