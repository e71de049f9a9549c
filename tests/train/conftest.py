"""A tiny world to train in: three topics of words, questions that name a topic's word, documents that hold it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.train.pairs import TrainingPairs

TOPICS = (("stone", "path", "mark", "way"), ("river", "mountain", "walk", "old"), ("cat", "mat", "sat", "on"))


def tiny_pairs(num_pairs: int, seed: int = 0) -> list[dict[str, str]]:
    generator = random.Random(seed)
    records: list[dict[str, str]] = []
    for number in range(num_pairs):
        topic = TOPICS[number % 3]
        key = f"{generator.choice(topic)} {generator.choice('abcdefgh')}{number}"
        filler = " ".join(generator.choice([*topic, "the", "a"]) for _ in range(generator.randrange(4, 30)))
        records.append(
            {
                "query": f"the {key}",
                "document": f"{filler} {key} {filler}",
                "title": f"{topic[0]} {number // 6}",
                "source": f"s{number % 2}",
            }
        )
    return sorted(records, key=lambda record: (record["source"], record["title"]))


@pytest.fixture
def pairs_file(tmp_path: Path) -> Path:
    """Return sixty pairs of two sources as JSON lines."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in tiny_pairs(60)))
    return path


@pytest.fixture
def make_pairs() -> Callable[..., TrainingPairs]:
    """Return a maker of such pairs in memory."""

    def make(num_pairs: int, seed: int = 0) -> TrainingPairs:
        records = tiny_pairs(num_pairs, seed)
        columns = (tuple(record[name] for record in records) for name in ("query", "document", "title", "source"))
        queries, documents, titles, sources = columns
        return TrainingPairs(queries=queries, documents=documents, titles=titles, sources=sources)

    return make
