"""Ingests of Parquet files with a tiny model, new contexts and deletions, beside two dictionaries.

One is what the files say, the other what the collection must hold. Files are changed, rows move from one
to another, files go; an ingest reads what changed or everything, with ``--sync`` or without. Any of it may be
killed: a reader then sees the collection before or after it, and the same work again ends in the state after.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from cairn.pipeline.collection import open_collection
from cairn.pipeline.config import ClusterConfig, ContextConfig, EncoderConfig, IngestConfig
from cairn.pipeline.corpus import file_identity
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import compact_collection, delete_documents, verify_collection
from cairn.pipeline.index.publish import COMMIT_POINTS
from cairn.pipeline.line.build_index import build_index
from cairn.pipeline.line.recontextualise import recontextualise

from tests.nightly.campaign import Tally, require
from tests.nightly.forks import Worker
from tests.tiny_models import TINY_WORDS, make_tiny_model

OPERATIONS = 30
KILLED_SHARE = 0.35
KILLED_AGAIN_SHARE = 0.3
MAX_KILL_SECONDS = 1.5
SETTLED_SECONDS = 0.05
"""Files that are older are passed over by an ingest if nothing changed."""
FILES = ("a", "b", "c", "d")
KILL_POINTS = (
    *COMMIT_POINTS,
    "clusters-written",
    "context-written",
    "shard-written",
    "shard-chunks-written",
    "token-vectors-written",
    "sources-recorded",
)
KINDS = ("ingest",) * 6 + ("sync", "sync", "reread", "delete", "new_context", "compact")
Texts = dict[str, str]


def episode(rng: random.Random, folder: Path, tally: Tally) -> None:
    """Change files and ingest them a few dozen times."""
    (folder / "corpus").mkdir()
    files, state = dict[str, Texts](), Texts()
    with Worker() as writer, Worker() as reader:
        writer.run(_write_model, folder).value_of("writing the model")
        for number in range(OPERATIONS):
            kind = rng.choice(KINDS) if state else "ingest"
            tally[kind] += 1
            tally["operations"] += 1
            what = f"operation {number}, {kind}"
            if kind in ("ingest", "sync", "reread"):
                _change(rng, files, number)
                writer.run(_write_files, folder, files).value_of("writing files")
                told = {doc_id: text for rows in files.values() for doc_id, text in rows.items()}
                after = told if kind == "sync" else state | told
                work = (_ingest, folder, kind == "sync", kind == "reread")
                expected = {
                    "indexed": sum(state.get(doc_id) != text for doc_id, text in told.items()),
                    "rows": len(told),
                    "deleted": len(set(state) - set(told)) if kind == "sync" else 0,
                }
            elif kind == "delete":
                gone = rng.sample(sorted(state), rng.randint(1, max(len(state) // 4, 1)))
                after = {doc_id: text for doc_id, text in state.items() if doc_id not in gone} or state
                work, expected = (_delete, folder, sorted(set(state) - set(after))), None
            else:
                after, expected = state, None
                work = (_new_context if kind == "new_context" else _compact, folder)
            said = _until_done(rng, (writer, reader), work, (state, after), what, tally)
            if expected is not None and said is not None:
                tally["unread_files"] += said.pop("unread_files")
                require(said == expected, f"{what} reports {said}, not {expected}")
            state = after
            _require_state(writer, reader, rng, folder, state, what)


def _until_done(
    rng: random.Random,
    workers: tuple[Worker, Worker],
    work: tuple[Any, ...],
    states: tuple[Texts, Texts],
    what: str,
    tally: Tally,
) -> dict[str, int] | None:
    """Do some work until it is not killed; return its report, None of work that was killed before."""
    writer, reader = workers
    folder, is_first = work[1], True
    while True:
        share = 0.0 if not states[0] else KILLED_SHARE if is_first else KILLED_AGAIN_SHARE
        kill = None
        if rng.random() < share:
            kill = rng.choice(KILL_POINTS) if rng.random() < 0.5 else rng.uniform(0.01, MAX_KILL_SECONDS)
        outcome = writer.run(*work, kill=kill)
        if not outcome.was_killed:
            said = outcome.value_of(what)
            return said if is_first else None
        is_first = False
        tally["kills"] += 1
        seen = reader.run(_texts, folder).value_of(f"reading after {what} was killed at {kill}")
        require(seen in states, f"{what}, killed at {kill}, left {_difference(seen, *states)}")


def _require_state(
    writer: Worker, reader: Worker, rng: random.Random, folder: Path, state: Texts, what: str
) -> None:
    seen = reader.run(_texts, folder).value_of(f"reading after {what}")
    require(seen == state, f"after {what}: {_difference(seen, state, state)}")
    doc_id = rng.choice(sorted(state))
    found = reader.run(_search, folder, state[doc_id]).value_of(f"searching after {what}")
    require(found == sorted(state), f"after {what} the text of {doc_id} finds {found}")
    problems = writer.run(_problems, folder).value_of(f"verify after {what}")
    require(problems == [], f"after {what} verify finds {problems}")


def _change(rng: random.Random, files: dict[str, Texts], number: int) -> None:
    """Add, change and remove rows and files, or nothing; rows may move to another file."""
    for name in rng.sample(FILES, rng.choice((0, 1, 1, 2)) if files else 2):
        rows = files.setdefault(name, {})
        for doc_id in rng.sample(sorted(rows), rng.randint(0, min(len(rows), 3))):
            kind = rng.choice(("change", "remove", "move"))
            text = rows.pop(doc_id)
            if kind == "change":
                rows[doc_id] = _text(rng, doc_id)
            elif kind == "move":
                files.setdefault(rng.choice(FILES), {})[doc_id] = text
        for place in range(rng.randint(1, 4)):
            doc_id = f"{name}{number}x{place}"
            rows[doc_id] = _text(rng, doc_id)
    if len(files) > 1 and rng.random() < 0.1:
        del files[rng.choice(sorted(files))]


def _text(rng: random.Random, doc_id: str) -> str:
    return f"{doc_id} " + " ".join(rng.choices(TINY_WORDS, k=rng.choice((5, 20, 90))))


def _write_model(folder: Path) -> None:
    make_tiny_model(folder / "model")


def _write_files(folder: Path, files: dict[str, Texts]) -> None:
    """Write the files that changed, and remove those that are gone."""
    corpus = folder / "corpus"
    for path in corpus.iterdir():
        if path.stem not in files:
            path.unlink()
    for name, rows in files.items():
        path = corpus / f"{name}.parquet"
        table = pa.table({"id": pa.array(rows, pa.string()), "text": pa.array(rows.values(), pa.string())})
        if not path.exists() or pq.read_table(path) != table:
            pq.write_table(table, path)
    time.sleep(2 * SETTLED_SECONDS)


def _config(folder: Path, *, sync: bool = False, reread: bool = False) -> IngestConfig:
    return IngestConfig(
        encoder=EncoderConfig(
            model=str(folder / "model"), landmark_interval=16, window_tokens=64, window_overlap_tokens=16
        ),
        cluster=ClusterConfig(num_clusters=3),
        context=ContextConfig(context_documents=8, max_document_tokens=32),
        shard_characters=600,
        sync=sync,
        reread=reread,
    )


def _ingest(folder: Path, sync: bool, reread: bool) -> dict[str, int]:
    file_identity.SETTLED_SECONDS = SETTLED_SECONDS
    config = _config(folder, sync=sync, reread=reread)
    report = build_index([str(folder / "corpus")], folder / "root", "notes", config)
    return {name: getattr(report, name) for name in ("indexed", "rows", "deleted", "unread_files")}


def _new_context(folder: Path) -> None:
    """Do what ``cairn plan --apply --force`` does."""
    recontextualise(folder / "root", "notes", _config(folder))


def _layout(folder: Path) -> CollectionLayout:
    return CollectionLayout(folder / "root", "notes")


def _delete(folder: Path, doc_ids: list[str]) -> None:
    if doc_ids:
        delete_documents(_layout(folder), doc_ids)


def _compact(folder: Path) -> None:
    compact_collection(_layout(folder))


def _problems(folder: Path) -> list[str]:
    return [problem.sentence for problem in verify_collection(_layout(folder))]


def _texts(folder: Path) -> Texts:
    generation = open_generation(_layout(folder))
    rows = generation.fetch_documents(range(generation.num_documents), ["doc_id", "text"]).to_pylist()
    ids = [row["doc_id"] for row in rows]
    assert len(ids) == len(set(ids)), "doubled documents"
    assert ids == generation.doc_ids.to_pylist(), "positions of another generation"
    return {row["doc_id"]: row["text"] for row in rows}


def _search(folder: Path, text: str) -> list[str]:
    """Return all documents that a text finds."""
    hits = open_collection("notes", root=folder / "root").search(text, top_k=200).hits
    return sorted(hit.doc_id for hit in hits)


def _difference(seen: Texts, before: Texts, after: Texts) -> str:
    lost = sorted(set(before) & set(after) - set(seen))
    more = sorted(set(seen) - set(before | after))
    other = [doc_id for doc_id in seen if seen[doc_id] not in (before.get(doc_id), after.get(doc_id))]
    return f"lost {lost[:5]}, more {more[:5]}, other {other[:5]} of {len(seen)}"
