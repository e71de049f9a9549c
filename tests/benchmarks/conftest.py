"""Passages for the benchmarks.

Paragraphs of the sample corpus, cut the way a RAG developer would, the same on every run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.pipeline.corpus.sample import write_sample

os.environ["TOKENIZERS_PARALLELISM"] = (
    "true"  # as users have it; the suite turns it off to keep its two workers apart
)

PASSAGE_CHARACTERS = 280
"""Some 69 tokens: a short passage, where padding and per-call costs weigh most."""


@pytest.fixture(scope="session", autouse=True)
def nothing_waits_for_the_disk() -> None:
    """Flush, as users do."""


@pytest.fixture
def sample_passages(tmp_path: Path) -> Callable[[int], list[str]]:
    """Return a function that gives so many passages."""
    return lambda count: _sample_passages(tmp_path / "sample", count)


@pytest.fixture
def write_passages() -> Callable[[Path, list[str]], str]:
    """Return a function that writes passages as a corpus with ids and texts."""

    def write(path: Path, passages: list[str]) -> str:
        pq.write_table(
            pa.table({"id": [f"p{number:06d}" for number in range(len(passages))], "text": passages}), path
        )
        return str(path)

    return write


def _sample_passages(folder: Path, count: int) -> list[str]:
    """Return ``count`` different passages in corpus order.

    A passage is whole paragraphs joined up to about ``PASSAGE_CHARACTERS``.
    """
    write_sample(folder)
    passages: dict[str, None] = {}
    for path in sorted(folder.glob("*.parquet")):
        for text in pq.read_table(path, columns=["text"]).column("text").to_pylist():
            for passage in _passages(text):
                passages.setdefault(passage)
                if len(passages) == count:
                    return list(passages)
    raise AssertionError(f"the sample holds {len(passages)} passages, {count} were asked for")


def _passages(text: str) -> list[str]:
    found, current = [], ""
    for paragraph in text.split("\n\n"):
        if current and len(current) + len(paragraph) > PASSAGE_CHARACTERS:
            found.append(current)
            current = ""
        current = f"{current}\n\n{paragraph}".strip()[: 4 * PASSAGE_CHARACTERS]
    return [*found, current] if current else found
