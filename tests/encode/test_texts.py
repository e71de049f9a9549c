from __future__ import annotations

import pytest
from cairn.pipeline.encode.texts import require_texts
from cairn.pipeline.errors import ConfigError


@pytest.mark.parametrize(
    ("texts", "words"),
    [
        ("hello", r"query texts must come in a list, got 'hello'; write \[text\]"),
        (b"hello", r"query texts must come in a list, got b'hello'"),
        (None, r"query texts must come in a list, got None"),
        (3, r"query texts must come in a list, got 3"),
        ("long " * 50, r"query texts must come in a list, got '(long ){11}long…; write"),
        (["cat", None], r"a query must be text, got None at position 1; leave it out"),
        (["cat", ["dog"]], r"a query must be text, got \['dog'\] at position 1"),
        (
            ["cat", "\udcff"],
            r"a query must be valid Unicode, got a lone surrogate in the one at position 1; remove it",
        ),
    ],
    ids=["string", "bytes", "none", "number", "long string", "none within", "list within", "surrogate"],
)
def test_what_is_no_list_of_texts_is_refused(texts, words):
    with pytest.raises(ConfigError, match=rf"^{words}"):
        require_texts(texts, "query")
