"""SIGKILL writers and readers of a collection in an object store.

Others see the old or the new generation, and a rerun converges.
"""

from __future__ import annotations

import http.client
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from cairn.cli import main as command_line
from cairn.pipeline.collection import open_collection
from cairn.pipeline.config import EncoderConfig, IngestConfig
from cairn.pipeline.index import replica as replica_module
from cairn.pipeline.index.generation import open_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.replica import REPLICA_POINTS
from cairn.pipeline.index.verify import verify_collection
from cairn.pipeline.line.build_index import build_index

from tests.index import stones
from tests.index.stones import served
from tests.nightly import served as served_forks
from tests.nightly.acknowledged import Acknowledged
from tests.nightly.forks import forked
from tests.served_stones import wait_until

pytestmark = pytest.mark.slow

ROOT = "s3://cairn/indexes"
Machine = Callable[[str], CollectionLayout]
Kill = Callable[[str, Callable[[], None]], None]


def write() -> None:
    replica_module.LEASE_SECONDS = 0.1
    stones.publish_change(CollectionLayout.at(Path(ROOT), "stones"), "n")


def read() -> None:
    open_generation(CollectionLayout.at(Path(ROOT), "stones"))


@pytest.fixture
def kill() -> Kill:
    def kill_at(point: str, work: Callable[[], None]) -> None:
        assert forked(work, kill=point).signal == signal.SIGKILL
        time.sleep(0.2)  # until its lease has expired

    return kill_at


@pytest.mark.parametrize("same_machine", [True, False], ids=["rerun-here", "rerun-elsewhere"])
@pytest.mark.parametrize(
    "point", ["chunks-added", "generation-renamed", *REPLICA_POINTS[:2], "current-replaced"]
)
def test_killed_writer_shows_old_or_new_to_all_and_a_rerun_converges(
    machine: Machine,
    kill: Kill,
    point: str,
    same_machine: bool,
) -> None:
    stones.publish_documents(machine("a"), stones.document_ids(20))
    old = served(machine("reader"))
    new = sorted({*old, *stones.document_ids(10, "n")})
    machine("a")
    kill(point, write)
    is_new = point in ("store-current-swapped", "current-replaced")
    assert served(machine("reader")) == (new if is_new else old)
    stones.publish_change(machine("a" if same_machine else "b"), "n")
    for name in ("a", "b", "reader"):
        assert served(machine(name)) == new
        assert verify_collection(machine(name)) == []


@pytest.mark.parametrize("point", REPLICA_POINTS[2:])
def test_killed_reader_leaves_a_copy_that_the_next_one_completes(
    machine: Machine,
    kill: Kill,
    point: str,
) -> None:
    stones.publish_documents(machine("a"), stones.document_ids(20))
    old = served(machine("reader"))
    stones.publish_change(machine("a"), "n")
    machine("reader")
    kill(point, read)
    assert served(machine("reader")) == sorted({*old, *stones.document_ids(10, "n")})
    assert verify_collection(machine("reader")) == []


def test_first_writer_killed_before_the_swap_leaves_nothing_to_see(machine: Machine, kill: Kill) -> None:
    machine("a")
    kill("store-files-written", write)
    assert not machine("reader").exists()
    stones.publish_documents(machine("b"), stones.document_ids(20))
    assert served(machine("reader")) == sorted(stones.document_ids(20))


DOCUMENTS = "/v1/collections/stones/documents"
KILLS = 8
MAX_LIFE_SECONDS = 3.0
NUM_IDS = 6


def test_two_servers_of_one_store_killed_in_turn_lose_and_double_nothing(
    machine: Machine, tmp_path: Path, tiny_model_folder: Path
) -> None:
    machine("maker")
    source = tmp_path / "stones.parquet"
    pq.write_table(pa.table({"id": ["first"], "text": ["a stone on the path"]}), source)
    encoder = EncoderConfig(model=str(tiny_model_folder), landmark_interval=16, precision="fp32")
    build_index([str(source)], ROOT, "stones", IngestConfig(encoder=encoder))
    rng, told, steps, is_over = Random(33), Acknowledged(), count(1), threading.Event()
    lives, ports = [ExitStack(), ExitStack()], [0, 0]

    def live(place: int) -> None:
        names = [name for name in os.environ if name.startswith("AWS_")]
        environment = {name: os.environ[name] for name in [*names, "NO_PROXY"]}
        environment["CAIRN_CACHE"] = str(tmp_path / f"server-{place}")
        server = served_forks.server(Path(ROOT), serve_store, environment)
        ports[place], _ = lives[place].enter_context(server)

    def write_on(place: int) -> None:
        own = Random(place)
        while not is_over.is_set():
            doc_id, text = f"{place}/{own.randrange(NUM_IDS)}", f"stone {next(steps)}"
            is_kept = own.random() < 0.7
            asked = told.ask({doc_id: text if is_kept else None})
            documents = {"documents": [{"doc_id": doc_id, "text": text}]}
            path, body = (DOCUMENTS, documents) if is_kept else (f"{DOCUMENTS}/delete", {"doc_ids": [doc_id]})
            try:
                status, reply = served_forks.ask(ports[place], path, body)
            except (OSError, http.client.HTTPException):
                told.lose(asked)
                time.sleep(0.05)
                continue
            if status == 202:
                told.keep(asked, is_shown=False)
            else:
                assert status == 429 or served_forks.kind_of(reply) in served_forks.SHED, reply
                told.refuse(asked)

    with ThreadPoolExecutor(2) as pool, lives[0], lives[1]:
        live(0)
        live(1)
        writing = [pool.submit(write_on, place) for place in (0, 1)]
        for kill in range(KILLS):
            time.sleep(rng.uniform(0.2, MAX_LIFE_SECONDS))
            lives[kill % 2].close()  # by SIGKILL
            live(kill % 2)
        is_over.set()
        assert [each.result() for each in writing] == [None, None]
        for place in (0, 1):
            asked = (
                ports[place],
                f"{DOCUMENTS}?wait=searchable",
                {"documents": [{"doc_id": f"last/{place}", "text": "stone"}]},
            )
            wait_until(lambda asked=asked: served_forks.ask(*asked)[0] == 200)
    now, layout = told.now(), machine("reader")
    stored = [(each.doc_id, each.text) for each in open_collection("stones", root=ROOT).documents]
    assert len(stored) == len(dict(stored))
    assert len(told.keys) == 2 * NUM_IDS
    assert {"first", "last/0", "last/1"} <= set(dict(stored))
    for doc_id in told.keys:
        assert dict(stored).get(str(doc_id)) in told.possible(doc_id, now, now, is_reader=False)
    assert verify_collection(layout) == []


def serve_store(root: Path, port: int, environment: Mapping[str, str]) -> None:
    """Run ``cairn serve --writable`` over the store until killed; its leases end soon after it."""
    os.environ.update(environment)
    replica_module.LEASE_SECONDS = 1.0
    options: list[Any] = ["--root", ROOT, "--port", port, "--deadline-seconds", 60, "--quiet"]
    sys.argv = ["cairn", "serve", "--writable", *map(str, options)]
    command_line.main()
