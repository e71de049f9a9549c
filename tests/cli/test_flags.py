from __future__ import annotations

import pytest

from cli.evaluate import evaluate
from cli.flags import FIELD_OF, in_flags
from cli.ingest import ingest
from cli.main import cairn


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("settings: encoder.truncate_dim is None, got 8", "settings: --dims is None, got 8"),
        (("context.num_documents is 2; index.kind is "
"'flat'"), "--context-documents is 2; --index-kind is 'flat'"),
        ("dims (truncate_dim) must lie between 1 and 32", "--dims must lie between 1 and 32"),
        (("max_window_tokens must fit; or "
"landmark_interval"), "--window-tokens must fit; or --landmark-interval"),
        (("temperature must lie between 0.01 and 100, got "
"0.0"), "--temperature must lie between 0.01 and 100, got 0.0"),
        ("the temperature of a model", "the temperature of a model"),
        ("model_type must be one of bert", "model_type must be one of bert"),
        (("got 'landmark_interval' in "
"data/landmark_interval"), "got 'landmark_interval' in data/landmark_interval"),
        (("query_temperature must not be "
"temperature_by_length"), "--query-temperature must not be --temperature-by-length"),
    ],
)  # fmt: skip
def test_a_sentence_names_flags(sentence, expected):
    assert in_flags(sentence, ingest) == expected


def test_a_sentence_of_no_verb_stays():
    assert in_flags("max_window_tokens must be positive", None) == "max_window_tokens must be positive"
    assert in_flags("max_window_tokens must be positive", cairn) == "max_window_tokens must be positive"


def test_every_parameter_of_another_name_is_an_option():
    options = {option.name for command in (ingest, evaluate) for option in command.params}
    assert options.issuperset(FIELD_OF)
