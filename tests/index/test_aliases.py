"""Switched names: what may be switched, and a file of them that someone else wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
from cairn.pipeline.errors import ConfigError, IntegrityError
from cairn.pipeline.index.aliases import ALIASES_NAME, read_aliases, switch, target_of
from cairn.pipeline.index.layout import CollectionLayout

from tests.index import stones


def test_collection_that_was_switched_away_and_back_is_one_to_switch_to(tmp_path: Path) -> None:
    for name in ("a", "b"):
        stones.publish_documents(CollectionLayout(tmp_path, name), ["d"])
    switch(tmp_path, "a", "b")
    with pytest.raises(ConfigError, match="answers from 'b'; name that one"):
        switch(tmp_path, "live", "a")
    switch(tmp_path, "a", None)
    switch(tmp_path, "live", "a")
    assert target_of(tmp_path, "live") == "a"


def test_name_that_never_was_switched_has_nothing_to_go_back_to(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'nosuch' must have answered from a collection before, got none"):
        switch(tmp_path, "nosuch", None)


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", "[" * 100_000, '{"a": {"to": "b"}}', '{"a": {"to": "../b", "before": "a"}}'),
        *('{"a": {"to": 1, "before": null}}', '{"\\ud800": {"to": "a", "before": "b"}}'),
    ],
)
def test_odd_content_of_the_names_is_said_in_a_sentence(tmp_path: Path, content: str) -> None:
    (tmp_path / ALIASES_NAME).write_text(content)
    with pytest.raises(IntegrityError, match="remove it, and switch each name again"):
        read_aliases(tmp_path)
