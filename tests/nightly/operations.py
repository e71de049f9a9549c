"""Random operations on one collection, beside an oracle that is a dictionary and shares no code with it.

Writes go to one process, readings to another one that stays open, and now and then to a fresh reader. A write
may be killed, at a commit point or at a random time, and so may the same write again. A reader must then see
the state before or the state after it, whole, and the write once more must end in the state after it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import compact_collection, delete_documents
from cairn.pipeline.index.publish import COMMIT_POINTS
from cairn.pipeline.index.recovery import repair_collection

from tests.index import stones
from tests.nightly import readings
from tests.nightly.campaign import Tally, require
from tests.nightly.forks import Worker, problems
from tests.nightly.readings import State

OPERATIONS = 250
WRITTEN_SHARE = 0.33
KILLED_SHARE = 0.2
KILLED_AGAIN_SHARE = 0.25
MAX_KILL_SECONDS = 0.35
MAX_DOCUMENTS = 60
VERIFIED_EVERY = 5
KINDS = ("write",) * 6 + ("sync", "sync", "rewrite", "delete", "delete", "compact", "repair", "damage")


def episode(rng: random.Random, folder: Path, tally: Tally) -> None:
    """Try a few hundred operations on an empty collection."""
    state = State()
    with Worker() as writer, Worker() as reader:
        for number in range(OPERATIONS):
            tally["operations"] += 1
            if state and rng.random() > WRITTEN_SHARE:
                kind, arguments, expected = readings.draw(rng, state)
                tally[kind.__name__] += 1
                seen = reader.run(kind, folder, *arguments).value_of(f"{kind.__name__} {arguments}")
                what = f"before operation {number}: {kind.__name__} {arguments} gives {seen}, not {expected}"
                require(seen == expected, what)
                continue
            work, arguments, after = _operation(rng, state, number)
            tally[work.__name__.strip("_")] += 1
            _until_done(rng, (writer, reader), (work, folder, *arguments), (state, after), tally)
            state = after
            what = f"operation {number}, {work.__name__}"
            seen = reader.run(readings.all_documents, folder).value_of(f"reading after {what}")
            require(seen == state, f"after {what}: {_difference(seen, state, state)}")
            if number % VERIFIED_EVERY == 0:
                _require_whole(writer, folder, state, what)
        _require_whole(writer, folder, state, "the last operation")


def _until_done(
    rng: random.Random,
    workers: tuple[Worker, Worker],
    work: tuple[Any, ...],
    states: tuple[State, State],
    tally: Tally,
) -> None:
    """Do some work until it is not killed; a reader must see the state before or after it then.

    Of damage nothing tells which generation answers until the repair.
    """
    writer, reader = workers
    what, share = f"{work[0].__name__} {work[2:]}", KILLED_SHARE
    while True:
        kill = _kill(rng) if rng.random() < share and states[0] else None
        outcome = writer.run(*work, kill=kill)
        if not outcome.was_killed:
            outcome.value_of(what)
            return
        share = KILLED_AGAIN_SHARE
        tally["kills"] += 1
        if work[0] is not _damage:
            seen = reader.run(readings.all_documents, work[1]).value_of(f"reading after a kill at {kill}")
            require(seen in states, f"{what}, killed at {kill}, left {_difference(seen, *states)}")


def _difference(seen: State, before: State, after: State) -> str:
    """Say how what a reader sees differs from a state and the one after it."""
    lost = sorted({*before} & {*after} - {*seen})
    more = sorted({*seen} - {*before, *after})
    other = [doc_id for doc_id in seen if seen[doc_id] not in (before.get(doc_id), after.get(doc_id))]
    return f"lost {lost[:5]}, more {more[:5]}, other {other[:5]} of {len(seen)}"


def _kill(rng: random.Random) -> str | float:
    return rng.choice(COMMIT_POINTS) if rng.random() < 0.5 else rng.uniform(0.002, MAX_KILL_SECONDS)


def _operation(rng: random.Random, state: State, number: int) -> tuple[Any, tuple[Any, ...], State]:
    """Draw an operation: what to call, with what, and the state it must lead to."""
    kind = rng.choice(KINDS) if state else "write"
    if kind == "compact":
        return _compact, (), dict(state)
    if kind == "repair":
        return _repair, (), dict(state)
    if kind == "damage":
        return _damage, (rng.randrange(2**32),), dict(state)
    if kind == "rewrite":
        return _rewrite, (sorted(state), number), dict.fromkeys(state, number)
    most = max(len(state) - 1, 0)
    num_gone = rng.randint(0, min(most, 5)) if len(state) < MAX_DOCUMENTS else most // 2
    gone = rng.sample(sorted(state), num_gone) if kind != "write" else []
    left = {doc_id: version for doc_id, version in state.items() if doc_id not in gone}
    if kind == "delete":
        return _delete, ([*gone, "never-there"],), left
    added = [f"n{number}x{'y' * (place % 3)}{place}" for place in range(rng.randint(0 if state else 1, 8))]
    changed = rng.sample(sorted(left), min(len(left), rng.randint(0, 6)))
    ids = [*added, *changed] or [f"n{number}"]
    return _write, (ids, gone, number), left | dict.fromkeys(ids, number)


def _layout(folder: Path) -> CollectionLayout:
    return CollectionLayout(folder, "stones")


def _write(folder: Path, doc_ids: list[str], gone: list[str], version: int) -> None:
    """Add, change and, as ``--sync`` does, delete documents by one publication."""
    stones.publish_documents(
        _layout(folder), doc_ids, replaced=[*doc_ids, *gone], version=version, with_tokens=True
    )


def _rewrite(folder: Path, doc_ids: list[str], version: int) -> None:
    """Replace all documents and the context, as ``cairn plan --apply`` does."""
    context = str(version).encode()
    stones.publish_documents(
        _layout(folder), doc_ids, replaced=doc_ids, version=version, context=context, with_tokens=True
    )


def _delete(folder: Path, doc_ids: list[str]) -> None:
    delete_documents(_layout(folder), doc_ids)


def _compact(folder: Path) -> None:
    compact_collection(_layout(folder))


def _repair(folder: Path) -> None:
    report = repair_collection(_layout(folder))
    assert not report.lost


def _damage(folder: Path, seed: int) -> None:
    """Damage a file of the served generation, one that rows can be read without; then repair."""
    layout, rng = _layout(folder), random.Random(seed)
    served = layout.generation_folder(layout.generation_numbers()[-1])
    path = rng.choice(sorted(path for path in served.iterdir() if path.is_file() and path.stat().st_size))
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content[: len(content) if rng.random() < 0.7 else len(content) // 2])
    _repair(folder)


def _require_whole(writer: Worker, folder: Path, state: State, what: str) -> None:
    """Hold what was written to ``verify`` and to a reader that opens it now."""
    found = writer.run(problems, _layout(folder)).value_of(f"verify after {what}")
    require(found == [], f"after {what} verify finds {found}")
    seen = writer.run(readings.all_documents_reopened, folder).value_of(f"opening after {what}")
    require(seen == state, f"reopened after {what}: {_difference(seen, state, state)}")
