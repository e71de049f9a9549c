"""SIGKILL a writer of a server again and again: what it acknowledged is there once, and is what came last."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from cairn.pipeline.collection import open_collection
from cairn.pipeline.errors import WritesWaitingError
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.line.live import LiveWriter
from cairn.pipeline.serve.writers import ServedDocuments

from tests.nightly.acknowledged import Acknowledged
from tests.nightly.forks import FORKS, PATIENCE_SECONDS, start

MAX_LIFE_SECONDS = 1.2
NUM_IDS = 12


@pytest.mark.parametrize(
    "kills", [3, pytest.param(20, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.faults)]
)
def test_killed_server_keeps_what_it_acknowledged(
    tmp_path: Path, tiny_model_folder: Path, kills: int
) -> None:
    rng = Random(kills)
    told = Acknowledged()
    for seed in range(kills):
        ours, theirs = FORKS.Pipe()
        process = start(write_on, theirs, tmp_path, tiny_model_folder, seed)
        theirs.close()
        assert ours.poll(PATIENCE_SECONDS)
        life = rng.uniform(0, MAX_LIFE_SECONDS)
        process.join(life)
        assert process.exitcode is None, "it writes until it is killed"
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        asked = None
        with contextlib.suppress(EOFError):
            while True:
                is_kept, doc_id, text = ours.recv()
                if is_kept:
                    assert asked is not None
                    told.keep(asked, is_shown=False)
                else:
                    asked = told.ask({doc_id: text})
        if asked is not None:
            told.lose(asked)
    publish_all(tmp_path, tiny_model_folder)
    stored = [(document.doc_id, document.text) for document in open_collection("c", root=tmp_path).documents]
    assert len(stored) == len(dict(stored))
    now = told.now()
    for doc_id in told.keys:
        assert dict(stored).get(doc_id) in told.possible(doc_id, now, now, is_reader=False)
    assert verify_collection(CollectionLayout(tmp_path, "c")) == []


def write_on(pipe: Connection, root: Path, model: Path, seed: int) -> None:
    """Write and delete until the end; tell before and after each write."""
    rng, writer, step = Random(seed), opened(root, model), 0
    while True:
        step += 1
        doc_id = f"d{rng.randrange(NUM_IDS)}"
        text = f"stone {seed} {step}" if rng.random() < 0.7 else None
        pipe.send((False, doc_id, text))
        is_table = rng.random() < 0.5
        while not write_once(writer, root, doc_id, text, step, is_table=is_table):
            time.sleep(0.01)
        pipe.send((True, doc_id, text))


def write_once(
    writer: LiveWriter, root: Path, doc_id: str, text: str | None, step: int, *, is_table: bool
) -> bool:
    """Write a document, or delete it; False where too many writes wait, since no server lives for long."""
    document = {"doc_id": doc_id, "title": None, "text": text, "metadata": {"step": step}}
    try:
        if text is None:
            writer.delete([doc_id], stored(root))
        else:
            table = pa.table({"doc_id": [doc_id], "text": [text], "step": [step]})
            writer.write(table if is_table else [document], stored(root))
    except WritesWaitingError:
        return False
    return True


def publish_all(root: Path, model: Path) -> None:
    writer = opened(root, model)
    receipt = writer.write([{"doc_id": "last", "title": None, "text": "stone", "metadata": {}}], stored(root))
    assert receipt.published.result(PATIENCE_SECONDS).state == "searchable"
    writer.stop(PATIENCE_SECONDS)


def opened(root: Path, model: Path) -> LiveWriter:
    layout = CollectionLayout(root, "c")
    is_new = not layout.writes_path.exists()
    writer = LiveWriter(layout, backbone=lambda: None, take_up=lambda _: None)
    if is_new:
        writer.create({"encoder": {"model": str(model), "precision": "fp32"}}, {})
    return writer


def stored(root: Path) -> ServedDocuments:
    if not CollectionLayout(root, "c").exists():
        return ServedDocuments(None)
    return ServedDocuments(open_collection("c", root=root)._searcher())
