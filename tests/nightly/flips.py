"""Single damages of a collection's files, most of them flipped bits, each under its readers and ``verify``.

A searcher that was open before, a fresh one, and ``verify`` see each damage. An answer is right, by one of
the generations, or ``verify`` finds the file; a refusal says what to run. Then the file is put back, or now
and then the collection is repaired, which loses no document that the repair does not name.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

from cairn.pipeline.errors import CairnError, IntegrityError, StorageError
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import repair_collection, verify_collection
from cairn.pipeline.search.searcher import Searcher

from tests.index import stones
from tests.nightly.campaign import Tally, require
from tests.nightly.forks import Worker
from tests.nightly.served import StoneEncoder

DAMAGES = 150
FLIPPED_SHARE = 0.9
REPAIRED_SHARE = 0.03
OPEN_BEFORE_SHARE = 0.25
OLD = stones.document_ids(20)
CHANGED = [*stones.document_ids(10, "n"), "d0"]
RIGHT = {
    1: {doc_id: stones.text_of(doc_id) for doc_id in OLD},
    2: {doc_id: stones.text_of(doc_id, int(doc_id in CHANGED)) for doc_id in [*OLD, *CHANGED]},
}


def episode(rng: random.Random, folder: Path, tally: Tally) -> None:
    """Damage one file after the other, and put each back."""
    whole, root = folder / "whole", folder / "root"
    with Worker() as worker:
        worker.run(_publish, whole).value_of("publishing")
        shutil.copytree(whole, root)
        files = [path for path in sorted(root.rglob("*")) if path.is_file() and path.suffix != ".lock"]
        for _ in range(DAMAGES):
            path = rng.choice([path for path in files if path.stat().st_size])
            content = path.read_bytes()
            damaged, what = _damaged(rng, content)
            tally["flips" if what.startswith("bit") else "other damages"] += 1
            what = f"{path.relative_to(root)}: {what}"
            is_open = rng.random() < OPEN_BEFORE_SHARE
            told = worker.run(_look, root, path, damaged, is_open).value_of(what)
            require(told == [], f"{what}: {told}")
            if rng.random() < REPAIRED_SHARE:
                told = worker.run(_repair, root).value_of(f"{what}, repair")
                require(told == [], f"{what}: {told}")
                tally["repairs"] += 1
                shutil.rmtree(root)
                shutil.copytree(whole, root)
            else:
                path.write_bytes(content)
        left = worker.run(_problems, root).value_of("verify at the end")
        require(left == [], f"with every file put back verify finds {left}")


def _damaged(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    if rng.random() < FLIPPED_SHARE:
        bit = rng.randrange(8 * len(content))
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        return bytes(flipped), f"bit {bit} flipped"
    if rng.random() < 0.5:
        size = rng.randrange(len(content))
        return content[:size], f"cut to {size}"
    return rng.randbytes(len(content)), "replaced by random bytes"


def _layout(root: Path) -> CollectionLayout:
    return CollectionLayout(root, "stones")


def _publish(root: Path) -> None:
    stones.publish_documents(_layout(root), OLD, with_tokens=True)
    stones.publish_change(_layout(root), "n")


def _problems(root: Path) -> list[str]:
    return [problem.sentence for problem in verify_collection(_layout(root))]


def _look(root: Path, path: Path, damaged: bytes, is_open: bool) -> list[str]:
    """Damage a file; return what is wrong with how that is seen."""
    layout = _layout(root)
    before = Searcher(layout, StoneEncoder()) if is_open else None
    path.write_bytes(damaged)
    told = [] if before is None else _wrong_of(layout, before)
    try:
        fresh = Searcher(layout, StoneEncoder())
    except (IntegrityError, StorageError) as error:
        told += _wrong_sentence(layout, error)
    else:
        told += _wrong_of(layout, fresh)
    problems = _problems(root)
    told = [sentence for sentence in told if not (sentence.startswith("answers ") and problems)]
    return told + [f"a sentence of verify has two lines: {it}" for it in problems if "\n" in it]


def _wrong_of(layout: CollectionLayout, searcher: Searcher) -> list[str]:
    """Return what is wrong with the answers to a search with a filter and one without."""
    told: list[str] = []
    for filters in (None, {"type": "gte", "key": "year", "value": 2000}):
        try:
            (result,) = searcher.search_vectors(
                stones.unit_vectors("d1/0", 1), queries=["stone"], top_k=60, filters=filters
            )
        except CairnError as error:
            told += _wrong_sentence(layout, error)
            continue
        right = RIGHT[result.generation]
        found = {hit.doc_id for hit in result.hits}
        if found != set(right):
            told.append(f"answers {sorted(found ^ set(right))[:3]} too little or too much")
            continue
        for hit in result.hits:
            text = right[hit.doc_id]
            if any(text[part.start_char : part.end_char] != part.text for part in hit.passages):
                told.append(f"answers another text of {hit.doc_id}")
    return told


def _wrong_sentence(layout: CollectionLayout, error: CairnError) -> list[str]:
    sentence = str(error)
    is_right = "\n" not in sentence and "LanceError" not in sentence
    commands = (layout.command("repair"), layout.command("verify"), "ingest the sources again")
    return [] if is_right and any(it in sentence for it in commands) else [f"refuses with: {sentence}"]


def _repair(root: Path) -> list[str]:
    """Repair; return what is wrong with what that leaves."""
    layout = _layout(root)
    report = repair_collection(layout)
    told = [f"after the repair verify finds {sentence}" for sentence in _problems(root)]
    generation = open_generation(layout)
    rows = generation.fetch_documents(range(generation.num_documents), ["doc_id", "text"]).to_pylist()
    kept = {row["doc_id"]: row["text"] for row in rows}
    lost = sorted(it for it in RIGHT[2] if kept.get(it) != RIGHT[2][it] and it not in report.lost)
    return told + ([f"the repair lost {lost[:5]} and does not say so"] if lost else [])
