"""Random operations on one collection, beside an oracle that is a dictionary and shares no code with it.

Every third operation or so is killed, at a commit point or at a random time. A reader must then see the state
before or the state after it, whole, and the same operation again must end in the state after it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.index.generation import open_latest_intact_generation
from pipeline.index.layout import CollectionLayout
from pipeline.index.maintenance import (
    compact_collection,
    delete_documents,
    repair_collection,
    verify_collection,
)
from pipeline.index.publish import COMMIT_POINTS
from pipeline.search.searcher import Searcher
from tests.index import stones
from tests.nightly.campaign import Tally, require
from tests.nightly.forks import Outcome, forked

State = dict[str, int]
"""The oracle: the version of each document."""

OPERATIONS = 30
KILLED_SHARE = 0.35
MAX_KILL_SECONDS = 0.35
VERIFIED_EVERY = 5


def episode(rng: random.Random, folder: Path, tally: Tally) -> None:
    """Try thirty operations on an empty collection."""
    state = State()
    for number in range(OPERATIONS):
        work, arguments, after = _operation(rng, state, number)
        kill = _kill(rng) if state and rng.random() < KILLED_SHARE else None
        tally["operations"] += 1
        outcome = forked(work, folder, *arguments, kill=kill)
        if outcome.was_killed:
            tally["kills"] += 1
            seen = _observed(folder, number, state)
            require(seen in (state, after), f"a kill at {kill} left {_difference(seen, state, after)}")
            outcome = Outcome() if seen == after != state else forked(work, folder, *arguments)
        _require_done(outcome, f"operation {number}, {work.__name__}")
        state = after
        seen = _observed(folder, number, state)
        require(
            seen == state, f"after operation {number}, {work.__name__}: {_difference(seen, state, state)}"
        )
    _require_done(outcome := forked(_problems, folder), "verify")
    require(outcome.value == [], f"verify finds {outcome.value}")


def _kill(rng: random.Random) -> str | float:
    return rng.choice(COMMIT_POINTS) if rng.random() < 0.5 else rng.uniform(0.005, MAX_KILL_SECONDS)


def _operation(rng: random.Random, state: State, number: int) -> tuple[Any, tuple[Any, ...], State]:
    """Draw an operation: what to call, with what, and the state it must lead to."""
    kind = "write" if not state else rng.choice(("write",) * 5 + ("delete", "delete", "compact", "repair"))
    if kind == "write":
        added = [
            f"n{number}x{'y' * (place % 3)}{place}" for place in range(rng.randint(0 if state else 1, 12))
        ]
        changed = rng.sample(sorted(state), min(len(state), rng.randint(0, 6)))
        ids = [*added, *changed] or [f"n{number}"]
        return _write, (ids, number), state | dict.fromkeys(ids, number)
    if kind == "delete":
        gone = rng.sample(sorted(state), min(len(state) - 1, rng.randint(0, 5)))
        left = {doc_id: version for doc_id, version in state.items() if doc_id not in gone}
        return _delete, ([*gone, "never-there"],), left
    return (_compact if kind == "compact" else _repair), (), dict(state)


def _layout(folder: Path) -> CollectionLayout:
    return CollectionLayout(folder, "stones")


def _write(folder: Path, doc_ids: list[str], version: int) -> None:
    stones.publish_documents(_layout(folder), doc_ids, replaced=doc_ids, version=version)


def _delete(folder: Path, doc_ids: list[str]) -> None:
    delete_documents(_layout(folder), doc_ids)


def _compact(folder: Path) -> None:
    compact_collection(_layout(folder))


def _repair(folder: Path) -> None:
    report = repair_collection(_layout(folder))
    assert not report.lost


def _problems(folder: Path) -> list[str]:
    return [problem.sentence for problem in verify_collection(_layout(folder))]


def _observed(folder: Path, number: int, state: State) -> State:
    outcome = forked(_look, folder, sorted(state)[:: max(len(state) // 3, 1)])
    _require_done(outcome, f"reading after operation {number}")
    if number % VERIFIED_EVERY == 0:
        problems = forked(_problems, folder)
        _require_done(problems, f"verify after operation {number}")
    return outcome.value


def _look(folder: Path, asked: list[str]) -> State:
    """Return what a fresh reader sees, having searched for some of it."""
    generation = open_latest_intact_generation(_layout(folder))
    rows = generation.fetch_documents(range(generation.num_documents), ["doc_id", "text", "year"]).to_pylist()
    ids = [row["doc_id"] for row in rows]
    assert len(ids) == len(set(ids)), "doubled documents"
    assert ids == generation.doc_ids.to_pylist(), "positions of another generation"
    seen = {row["doc_id"]: row["year"] - 2000 for row in rows}
    for row in rows:
        assert row["text"] == stones.text_of(row["doc_id"], seen[row["doc_id"]]), "torn document"
    searcher = Searcher(_layout(folder), _NoEncoder())
    for doc_id in asked:
        if doc_id in seen:
            vector = stones.unit_vectors(f"{doc_id}/{seen[doc_id]}", 1)
            _require_found(searcher, vector, doc_id, seen)
    return seen


def _require_found(searcher: Searcher, vector: np.ndarray, doc_id: str, seen: State) -> None:
    """Search by a document's own vector and words, once with a filter that it passes."""
    for filters in (None, {"type": "eq", "key": "year", "value": 2000 + seen[doc_id]}):
        (nearest,) = searcher.search_vectors(
            vector, granularity="document", hybrid=False, top_k=10, filters=filters
        )
        assert nearest.hits[0].doc_id == doc_id, f"{doc_id} is not nearest to its own vector"
        (result,) = searcher.search_vectors(vector, queries=[doc_id], top_k=100, filters=filters)
        hits = [hit.doc_id for hit in result.hits]
        assert doc_id in hits, f"{doc_id} is not found by its word"
        assert len(hits) == len(set(hits)), "doubled hits"
        assert set(hits) <= set(seen), "hits that are not there"
        assert filters is None or {seen[hit] for hit in hits} == {seen[doc_id]}, "hits beside the filter"


class _NoEncoder:
    fingerprint = "e" * 64

    def encode_queries(self, texts: Any) -> np.ndarray:
        """Nothing here is encoded."""
        raise AssertionError(texts)


def _require_done(outcome: Outcome, what: str) -> None:
    require(outcome.refusal is None, f"{what} was refused: {outcome.refusal}")
    require(outcome.fault is None, f"{what} failed: {outcome.fault}")
    require(outcome.signal is None, f"{what} died of signal {outcome.signal}")


def _difference(seen: State, before: State, after: State) -> str:
    lost = sorted(set(before) & set(after) - set(seen))
    more = sorted(set(seen) - set(before | after))
    other = [doc_id for doc_id in seen if seen[doc_id] not in (before.get(doc_id), after.get(doc_id))]
    return f"lost {lost[:5]}, more {more[:5]}, other {other[:5]}"
