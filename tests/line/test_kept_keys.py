"""The last keys are kept, and no more than there is room for."""

from __future__ import annotations

import pytest
from cairn.pipeline.errors import KeyReusedError
from cairn.pipeline.line import kept_keys
from cairn.pipeline.line.kept_keys import KeptKeys


def test_key_brings_its_write_and_refuses_another_request() -> None:
    keys = KeptKeys()
    keys.add({"a": ("digest", 3, {"deleted": 1})})
    assert keys.find("a", "digest") == (3, {"deleted": 1})
    assert keys.find("b", "digest") is None
    with pytest.raises(KeyReusedError):
        keys.find("a", "another")


@pytest.mark.parametrize(
    ("num_keys", "num_documents", "kept"),
    [(2, 100, "de"), (100, 5, "de"), (100, 1, "e"), (100, 100, "abcde")],
)
def test_oldest_keys_are_let_go_of(
    monkeypatch: pytest.MonkeyPatch, num_keys: int, num_documents: int, kept: str
) -> None:
    monkeypatch.setattr(kept_keys, "KEPT_KEYS", num_keys)
    monkeypatch.setattr(kept_keys, "KEPT_DOCUMENTS", num_documents)
    keys = KeptKeys()
    for number, key in enumerate("abcde"):
        keys.add({key: ("digest", number, {"documents": [{}], "missing": ["x"]})})
    assert list(keys.answers) == list(kept)
