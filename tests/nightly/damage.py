"""Flips, cuts and removals in the files of a collection while it is served.

Every answer to the damaged collection is right, by one of its generations, or a refusal that names the
damage. The server mends by itself what costs no row. Rows of Lance are read without hashes, so a wrong text
may be answered where ``verify`` names the file. After ``repair`` the collection is whole, and what it lacks
is what the repair named.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from cairn.pipeline.errors import CollectionBusyError
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.recovery import repair_collection

from tests.faults.test_damage_matrix import CHANGED, OLD
from tests.index import stones
from tests.nightly import served
from tests.nightly.campaign import Tally, require
from tests.nightly.forks import Worker, problems

ALL = sorted({*OLD, *CHANGED})
VERSIONS = (0, 1)
DAMAGES = 15
QUERIES = 5
TAKEN_UP_SECONDS = 30.0


def episode(rng: random.Random, folder: Path, tally: Tally) -> None:
    """Damage a served collection fifteen times, repairing it each time."""
    root = folder / "root"
    layout = CollectionLayout(root, "stones")
    with Worker() as worker:
        worker.run(_publish, root).value_of("publishing")
        with served.server(root) as (port, _):
            client, lost = served.Client(port), set[str]()
            for _ in range(DAMAGES):
                what = _damage(rng, root, tally)
                wrong = [sentence for _ in range(QUERIES) if (sentence := _ask(rng, client, tally))]
                found = worker.run(problems, layout).value_of(f"verify after {what}")
                require(not wrong or bool(found), f"{what}: {wrong[:1]}, and verify finds nothing")
                lost |= set(worker.run(_repair, root).value_of(f"repair after {what}"))
                tally["repairs"] += 1
                left = worker.run(problems, layout).value_of(f"verify after {what} and its repair")
                require(left == [], f"{what}: after the repair verify finds {left}")
                _wait_until_right(client, set(ALL) - lost, what)
            tally["lost_and_named"] += len(lost)


def _publish(root: Path) -> None:
    layout = CollectionLayout(root, "stones")
    stones.publish_documents(layout, OLD, with_tokens=True)
    stones.publish_change(layout, "n")


def _repair(root: Path) -> list[str]:
    while True:
        try:
            return list(repair_collection(CollectionLayout(root, "stones")).lost)
        except CollectionBusyError:  # the server is mending it
            time.sleep(0.05)


def _damage(rng: random.Random, root: Path, tally: Tally) -> str:
    """Damage one file; return what was done to which."""
    files = sorted(path for path in (root / "stones").rglob("*") if path.is_file() and path.stat().st_size)
    path = rng.choice([path for path in files if path.suffix != ".lock"])
    content = bytearray(path.read_bytes())
    how = rng.choice(("flip", "flip", "flip", "cut", "empty", "remove", "replace"))
    tally["flips" if how == "flip" else "other damages"] += 1
    if how == "flip":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    elif how == "cut":
        path.write_bytes(content[: rng.randrange(len(content))])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "remove":
        path.unlink()
    else:
        beside = path.with_name(f"{path.name}.new")
        beside.write_bytes(rng.randbytes(len(content)))
        beside.replace(path)
    return f"{how} {path.relative_to(root)}"


def _ask(rng: random.Random, client: served.Client, tally: Tally) -> str | None:
    """Ask once; return what was wrong with the text of an answer."""
    body: dict[str, Any] = {"query": f"stone {rng.choice(ALL)}", "top_k": 40, "include_text": True}
    if rng.random() < 0.4:
        body["filters"] = {"type": "gte", "key": "year", "value": 2000}
    status, reply = client.ask(served.SEARCH, body)
    tally["requests"] += 1
    tally[f"status {status} {served.kind_of(reply)}".rstrip()] += 1
    if status != 200:
        told = {*served.SHED, "collection-damaged", "storage-failed"}  # the last of a file of Lance
        is_told = status in (503, 504) and served.kind_of(reply) in told
        require(is_told, f"status {status} {served.kind_of(reply)}")
        return None
    hits = {hit["doc_id"]: hit for hit in reply["hits"]}
    require(len(hits) == len(reply["hits"]), "doubled hits")
    require(set(hits) <= set(ALL), f"hits that were never there: {sorted(set(hits) - set(ALL))[:3]}")
    wrong = [doc_id for doc_id, hit in hits.items() if not served.is_right(hit, VERSIONS)]
    return f"{wrong[:3]} are answered with other texts" if wrong else None


def _wait_until_right(client: served.Client, expected: set[str], what: str) -> None:
    """Wait until the server answers with all that is left, by itself."""
    limit = time.monotonic() + TAKEN_UP_SECONDS
    while True:
        status, reply = client.ask(served.SEARCH, {"query": "stone d1", "top_k": 60, "include_text": True})
        found = {hit["doc_id"] for hit in reply["hits"]} if status == 200 else set[str]()
        if status == 200 and expected <= found:
            require(all(served.is_right(hit, VERSIONS) for hit in reply["hits"]), f"{what}: wrong texts")
            return
        require(
            time.monotonic() < limit,
            f"{what}: half a minute after the repair {status} {served.kind_of(reply)}, "
            f"without {sorted(expected - found)[:5]}",
        )
        time.sleep(0.1)
