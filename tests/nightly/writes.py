"""Clients that write and read beside each other, on a writable server that is killed again and again.

Writers share documents. Now and then a batch ingest, which may be killed too, writes some of its own. What
each client was told is held against every answer, and against what is stored after each start of the server.
A write that a killed server did not answer is sometimes sent again with its idempotency key.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from cairn.cli import main as command_line
from cairn.pipeline.collection import open_collection
from cairn.pipeline.index import tiers
from cairn.pipeline.index.layout import CollectionLayout

from tests.nightly import served
from tests.nightly.acknowledged import Acknowledged, Asked
from tests.nightly.campaign import Tally, require
from tests.nightly.forks import SEGMENT_SIZES, Worker, problems
from tests.tiny_models import make_tiny_model

LIVES = 12
MAX_LIFE_SECONDS = 4.0
MAX_PAUSE_SECONDS = 0.1
CHECKED_SHARE = 0.5
BATCH_SHARE = 0.5
BATCH_KILLED_SHARE = 0.3
SENT_AGAIN_SHARE = 0.5
SEARCHABLE_SHARE = 0.4
WRITERS, READERS = 4, 3
STONES = "/v1/collections/stones"
WRITTEN = [f"w/{number}" for number in range(12)]
BATCH = [f"b/{number}" for number in range(6)]
IDS = [*WRITTEN, *BATCH, "w/last"]
FIELDS = ("step", "patched")

Request = tuple[str, str, Any]


class _Clients:
    """What the clients of all lives of the server share."""

    def __init__(self) -> None:
        self.told = Acknowledged()
        self.steps = itertools.count(1)
        self.killing = threading.Event()
        self.unanswered: dict[int, tuple[Asked, Request, str]] = {}
        """Of each writer, the write that it sends again."""


def episode(rng: random.Random, folder: Path, tally: Tally) -> None:
    """Let a server live twelve times, with other clients each time."""
    root, clients, sizes = folder / "root", _Clients(), {name: getattr(tiers, name) for name in SEGMENT_SIZES}
    with Worker() as worker, ThreadPoolExecutor(WRITERS + READERS + 1) as pool:
        worker.run(make_tiny_model, folder / "model").value_of("making a model")
        _ingest_batch(rng, clients, worker, folder, Tally(), may_die=False)
        for _ in range(LIVES):
            tallies = [Tally() for _ in range(WRITERS + READERS + 1)]
            with served.server(root, _serve, sizes) as (port, _pid):
                if rng.random() < CHECKED_SHARE:
                    _require_kept(clients, port)
                clients.killing.clear()
                running = [
                    pool.submit(
                        _write if place < WRITERS else _read,
                        random.Random(rng.random()), clients, port, place, tallies[place],
                    )
                    for place in range(WRITERS + READERS)
                ]  # fmt: skip
                if rng.random() < BATCH_SHARE:
                    own = random.Random(rng.random())
                    running.append(
                        pool.submit(_ingest_batch, own, clients, worker, folder, tallies[-1], may_die=True)
                    )
                time.sleep(rng.uniform(0.1, MAX_LIFE_SECONDS))
                clients.killing.set()
            for client in running:
                client.result()
            tally["kills"] += 1
            for each in tallies:
                tally.update(each)
        with served.server(root, _serve, sizes) as (port, _pid):
            _require_kept(clients, port)
        found = worker.run(problems, CollectionLayout(root, "stones")).value_of("verify")
        require(found == [], f"verify finds {found}")
        now = clients.told.now()
        stored = worker.run(_stored, root).value_of("opening")
        _require_possible(clients.told, stored, IDS, now, is_reader=False, what="after all")


def _serve(root: Path, port: int, sizes: Mapping[str, Any]) -> None:
    """Run ``cairn serve --writable`` until killed, with these sizes of segments."""
    os.environ["CAIRN_CACHE"] = str(root.parent / "cache")
    for name, size in sizes.items():
        setattr(tiers, name, size)
    options = ["--root", str(root), "--port", str(port), "--deadline-seconds", "60", "--quiet"]
    sys.argv = ["cairn", "serve", "--writable", *options]
    with Path(root.parent / "server.log").open("a") as log, contextlib.redirect_stderr(log):
        command_line.main()


def _ingest(root: Path, source: Path) -> None:
    """Run ``cairn ingest``."""
    options = ["--collection", "stones", "--root", str(root), "--id-column", "doc_id", "--precision", "fp32"]
    said, command = io.StringIO(), ["ingest", str(source), "--model", str(root.parent / "model"), *options]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = command_line.run(command_line.cairn, command, "cairn")
    assert code == 0, said.getvalue()[-400:]


def _stored(root: Path) -> list[tuple[str, str, Mapping[str, Any]]]:
    documents = open_collection("stones", root=root).documents
    return [(document.doc_id, document.text, document.metadata) for document in documents]


def _ingest_batch(
    rng: random.Random, clients: _Clients, worker: Worker, folder: Path, tally: Tally, *, may_die: bool
) -> None:
    step, source = next(clients.steps), folder / "batch.parquet"
    rows = [_row(doc_id, step) for doc_id in BATCH]
    pq.write_table(pa.Table.from_pylist([{**row, **row.pop("metadata")} for row in rows]), source)
    asked = clients.told.ask(_values(BATCH, step))
    kill = rng.uniform(0.1, 3.0) if may_die and rng.random() < BATCH_KILLED_SHARE else None
    outcome = worker.run(_ingest, folder / "root", source, kill=kill)
    tally["batches"] += 1
    if outcome.was_killed:
        tally["kills of batches"] += 1
        clients.told.lose(asked)
    else:
        outcome.value_of("a batch ingest")
        clients.told.keep(asked, is_shown=False)  # the server takes it up within a second


def _row(doc_id: str, step: int) -> dict[str, Any]:
    metadata = {"step": step, "patched": step, "owner": doc_id[0]}
    return {"doc_id": doc_id, "text": _text(doc_id, step), "metadata": metadata}


def _text(doc_id: str, step: int) -> str:
    return f"stone {doc_id} of step {step}"


def _values(doc_ids: Iterable[str], value: int | None, fields: Iterable[str] = FIELDS) -> dict[Any, Any]:
    return {(doc_id, field): value for doc_id in doc_ids for field in fields}


def _write(rng: random.Random, clients: _Clients, port: int, place: int, tally: Tally) -> None:
    """Write until the server is killed."""
    client, told = served.Client(port), clients.told
    asked, request, key = clients.unanswered.pop(place, (None, None, ""))
    while True:
        if request is None or asked is None:
            request, values = _drawn_write(rng, next(clients.steps))
            asked, key = told.ask(values), f"{place}-{next(clients.steps)}"
        try:
            status, reply = client.ask(request[1], request[2], method=request[0], key=key)
        except (OSError, http.client.HTTPException) as error:
            require(clients.killing.is_set(), f"{request} ended in {type(error).__name__}: {error}")
            if rng.random() < SENT_AGAIN_SHARE:
                clients.unanswered[place] = asked, request, key
            else:
                told.lose(asked)
            return
        tally["writes"] += 1
        tally[f"write {status} {served.kind_of(reply)}".rstrip()] += 1
        if status in (200, 202):
            told.keep(asked, is_shown=reply["status"] == "searchable")
        elif status in (404, 429):
            told.refuse(asked)
        else:  # it may happen yet
            _require_shed(status, reply, request)
        asked = request = None


def _drawn_write(rng: random.Random, step: int) -> tuple[Request, dict[Any, Any]]:
    """Draw a write, and the values it leads to."""
    wait = "?wait=searchable" if rng.random() < SEARCHABLE_SHARE else ""
    doc_ids = rng.sample(WRITTEN, rng.choice((1, 1, 1, 3)))
    one, kind = doc_ids[0], rng.choice(("add",) * 5 + ("patch",) * 3 + ("delete", "delete-some", "filter"))
    if kind == "add":
        body: Any = {"documents": [_row(doc_id, step) for doc_id in doc_ids]}
        return ("POST", f"{STONES}/documents{wait}", body), _values(doc_ids, step)
    if kind == "patch":
        body = {"metadata": {"patched": step}}
        return ("PATCH", f"{STONES}/documents/{one}{wait}", body), _values([one], step, ["patched"])
    if kind == "delete":
        return ("DELETE", f"{STONES}/documents/{one}{wait}", None), _values([one], None)
    some = {"filters": _among(doc_ids)} if kind == "filter" else {"doc_ids": doc_ids}
    return ("POST", f"{STONES}/documents/delete{wait}", some), _values(doc_ids, None)


def _among(doc_ids: list[str]) -> dict[str, Any]:
    return {"type": "in", "key": "doc_id", "value": doc_ids}


def _read(rng: random.Random, clients: _Clients, port: int, place: int, tally: Tally) -> None:
    """Read until the server is killed."""
    client = served.Client(port)
    while True:
        reading = rng.choice((_search, _list, _count, _columns, _document))
        try:
            reading(rng, clients.told, client)
        except (OSError, http.client.HTTPException) as error:
            require(clients.killing.is_set(), f"{reading.__name__} ended in {type(error).__name__}: {error}")
            return
        tally["readings"] += 1
        time.sleep(rng.uniform(0, MAX_PAUSE_SECONDS))  # a publication waits for searches


def _ask(client: served.Client, path: str, body: Any = None, allowed: tuple[int, ...] = (200,)) -> Any:
    """Return the answer to a reading, None where the server says that it is busy."""
    status, reply = client.ask(f"{STONES}{path}", body)
    if status in allowed:
        return reply
    _require_shed(status, reply, path)
    return None


def _require_shed(status: int, reply: Any, request: Any) -> None:
    is_told = status in (503, 504) and served.kind_of(reply) in served.SHED
    require(is_told, f"status {status} {reply} to {request}")


def _search(rng: random.Random, told: Acknowledged, client: served.Client) -> None:
    doc_ids, since = rng.sample(IDS, 5), told.now()
    body = {"query": f"stone {doc_ids[0]}", "top_k": 40, "include_text": True, "filters": _among(doc_ids)}
    if (reply := _ask(client, "/search", body)) is not None:
        rows = [
            (hit["doc_id"], " ".join(part["text"] for part in hit["passages"]), hit["metadata"])
            for hit in reply["hits"]
        ]
        _require_possible(told, rows, doc_ids, since, what="a search")


def _list(rng: random.Random, told: Acknowledged, client: served.Client) -> None:
    since = told.now()
    if (reply := _ask(client, "/documents/list", {"limit": 100})) is not None:
        rows = [(row["doc_id"], None, row["metadata"]) for row in reply["documents"]]
        _require_possible(told, rows, IDS, since, what="a list")


def _document(rng: random.Random, told: Acknowledged, client: served.Client) -> None:
    doc_id, since = rng.choice(IDS), told.now()
    if (reply := _ask(client, f"/documents/{doc_id}", allowed=(200, 404))) is not None:
        rows = [(doc_id, reply["text"], reply["metadata"])] if "text" in reply else []
        _require_possible(told, rows, [doc_id], since, what="a document")


def _count(rng: random.Random, told: Acknowledged, client: served.Client) -> None:
    doc_ids, since = rng.sample(IDS, 8), told.now()
    if (reply := _ask(client, "/count", {"filters": _among(doc_ids)})) is not None:
        _require_number(told, reply["documents"], doc_ids, since)


def _columns(rng: random.Random, told: Acknowledged, client: served.Client) -> None:
    since = told.now()
    if (reply := _ask(client, "/columns")) is not None:
        (owners,) = [column for column in reply["columns"] if column["name"] == "owner"]
        found = {each["value"]: each["documents"] for each in owners["values"]}
        for owner in "bw":
            _require_number(told, found.get(owner, 0), [each for each in IDS if each[0] == owner], since)


def _require_number(told: Acknowledged, found: int, doc_ids: list[str], since: int) -> None:
    until = told.now()
    possible = [told.possible((doc_id, "step"), since, until, is_reader=True) for doc_id in doc_ids]
    low, high = sum(None not in each for each in possible), sum(each != {None} for each in possible)
    require(low <= found <= high, f"{found} of {doc_ids} are counted, not {low} to {high}")


def _require_possible(
    told: Acknowledged,
    rows: Sequence[tuple[str, str | None, Mapping[str, Any]]],
    doc_ids: list[str],
    since: int,
    *,
    is_reader: bool = True,
    what: str,
) -> None:
    """Hold documents that were found, of all that would be, to what was told before."""
    until, found = told.now(), {doc_id: metadata for doc_id, _, metadata in rows}
    require(len(found) == len(rows), f"{what} doubles {[doc_id for doc_id, *_ in rows]}")
    require(found.keys() <= {*doc_ids}, f"{what} has {sorted(found)} of {doc_ids}")
    torn = [row for row in rows if row[1] not in (None, _text(row[0], row[2]["step"]))]
    require(not torn, f"{what} tears {torn[:3]}")
    for doc_id, field in itertools.product(doc_ids, FIELDS):
        value = found.get(doc_id, {}).get(field)
        possible = told.possible((doc_id, field), since, until, is_reader=is_reader)
        require(value in possible, f"{what}: {field} of {doc_id} is {value}, not of {possible}")
        if value is not None:
            told.see((doc_id, field), value)


def _require_kept(clients: _Clients, port: int) -> None:
    """Hold what is found once all is published to all that was acknowledged."""
    client, step = served.Client(port), next(clients.steps)
    asked = clients.told.ask(_values(["w/last"], step))
    body = {"documents": [_row("w/last", step)]}
    status, reply = client.ask(f"{STONES}/documents?wait=searchable", body)
    require(status == 200, f"status {status} {reply} to the only client")
    clients.told.keep(asked, is_shown=True)
    since = clients.told.now()
    status, reply = client.ask(f"{STONES}/documents/list", {"limit": 100})
    require(status == 200, f"status {status} {reply} to the only client")
    rows = [(row["doc_id"], None, row["metadata"]) for row in reply["documents"]]
    _require_possible(clients.told, rows, IDS, since, is_reader=False, what="after a start")
