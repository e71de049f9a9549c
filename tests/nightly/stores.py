"""A collection in an object store on loopback: killed writers and readers, and damaged objects and copies.

Machines are cache folders: each has a copy of its own. After a kill every machine sees the state before or
the state after, and the same write again, on any machine, ends in the state after. Of a damaged object or
copy a machine answers rightly or refuses in a sentence, and ``repair`` from a whole copy mends it.
"""

from __future__ import annotations

import atexit
import functools
import os
import random
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from cairn.pipeline.index import lease, replica
from cairn.pipeline.index.generation import open_latest_intact_generation
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import repair_collection, verify_collection
from cairn.pipeline.index.object_folder import ObjectFolder
from cairn.pipeline.index.publish import COMMIT_POINTS
from cairn.pipeline.index.replica import REPLICA_POINTS
from cairn.pipeline.index.tables import lance_errors

from tests.index import stones
from tests.nightly.campaign import Tally, require
from tests.nightly.forks import Worker
from tests.nightly.readings import State

ROOT = Path("s3://cairn/indexes")
URI = "s3://cairn/indexes/stones"
SERVER = Path(__file__).parents[1] / "s3_server.py"
LEASE_SECONDS = 0.1
MACHINES = ("a", "b", "c")
WRITES = 12
KILLED_SHARE = 0.6
DAMAGES = 12


def kill_episode(rng: random.Random, folder: Path, tally: Tally) -> None:
    """Write from two machines, killed more often than not, and read from a third one."""
    _empty_store()
    state = State()
    with Worker() as worker:
        for number in range(WRITES):
            ids = [f"n{number}x{place}" for place in range(rng.randint(1, 6))]
            ids += rng.sample(sorted(state), min(len(state), 3))
            after = state | dict.fromkeys(ids, number)
            kill = rng.choice((*COMMIT_POINTS, *REPLICA_POINTS[:2], rng.uniform(0.01, 0.8)))
            is_killed = bool(state) and rng.random() < KILLED_SHARE
            machine = folder / rng.choice(MACHINES[:2])
            outcome = worker.run(_write, machine, ids, number, kill=kill if is_killed else None)
            tally["operations"] += 1
            if outcome.was_killed:
                tally["kills"] += 1
                time.sleep(2 * LEASE_SECONDS)  # until the lease of the killed has expired
                if rng.random() < 0.3:
                    point = rng.choice(REPLICA_POINTS[2:])
                    tally["kills"] += worker.run(_read, folder / "c", kill=point).was_killed
                seen = worker.run(_read, folder / "c").value_of(f"reading after a kill at {kill}")
                require(seen in (state, after), f"write {number}, killed at {kill}, left {sorted(seen)}")
                machine = folder / rng.choice(MACHINES[:2])
                outcome = worker.run(_write, machine, ids, number)
            outcome.value_of(f"write {number}")
            state = after
            seen = worker.run(_read, folder / rng.choice(MACHINES)).value_of(f"reading after write {number}")
            require(seen == state, f"after write {number} a machine sees {sorted(seen)}")
        for name in MACHINES:
            worker.run(_read, folder / name).value_of("reading at the end")
            problems = worker.run(_problems, folder / name).value_of("verify")
            require(problems == [], f"verify on machine {name} finds {problems}")


def flip_episode(rng: random.Random, folder: Path, tally: Tally) -> None:
    """Damage objects of the store and files of copies, one at a time, and repair each."""
    _empty_store()
    ids = stones.document_ids(8)
    state = State(dict.fromkeys(ids, 0)) | dict.fromkeys([*ids[:2], "new"], 1)
    with Worker() as worker:
        worker.run(_write, folder / "a", ids, 0).value_of("publishing")
        worker.run(_write, folder / "a", [*ids[:2], "new"], 1).value_of("publishing")
        for number in range(DAMAGES):
            fresh = folder / f"fresh{number}"
            is_copy = rng.random() < 0.5
            if is_copy:
                worker.run(_read, fresh).value_of("pulling")
                what = worker.run(_damage_copy, fresh, rng.randrange(2**32)).value_of("damaging a copy")
            else:
                worker.run(_read, folder / "a").value_of("pulling")  # what the repair will write again from
                what = worker.run(_damage_object, rng.randrange(2**32)).value_of("damaging an object")
            tally["flips"] += 1
            seen = worker.run(_read, fresh)
            if seen.refusal is None and seen.value_of(f"{what}: reading") not in (
                state,
                dict.fromkeys(ids, 0),
            ):
                problems = worker.run(_problems, fresh).value_of("verify")
                require(bool(problems), f"{what}: answers {seen.value}, and verify finds nothing")
            require(seen.refusal is None or "\n" not in seen.refusal, f"{what}: {seen.refusal}")
            lost = worker.run(_repair, fresh if is_copy else folder / "a").value_of(f"{what}: repair")
            kept = {doc_id: version for doc_id, version in state.items() if doc_id not in lost}
            for machine in (fresh if is_copy else folder / "a", folder / f"other{number}"):
                seen = worker.run(_read, machine).value_of(f"{what}: reading after the repair")
                is_right = all(seen.get(doc_id) == version for doc_id, version in kept.items())
                require(is_right, f"{what}: after the repair {machine.name} sees {seen}, lost {lost}")
                problems = worker.run(_problems, machine).value_of(f"{what}: verify after the repair")
                require(problems == [], f"{what}: after the repair verify on {machine.name} finds {problems}")
            tally["repairs"] += 1
            if lost:  # from a copy whose rows are gone: what is served is another state now
                tally["lost_and_named"] += len(lost)
                return


def _empty_store() -> None:
    """Empty the store of this process, started at its first use."""
    url = _store_url()
    for method, path in (("POST", "/moto-api/reset"), ("PUT", "/cairn")):
        request = urllib.request.Request(url + path, b"", {"Content-Type": "text/plain"}, method=method)
        with urllib.request.urlopen(request, timeout=60):
            pass


@functools.cache
def _store_url() -> str:
    command = [sys.executable, str(SERVER)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    atexit.register(process.kill)
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": url,
        "NO_PROXY": "127.0.0.1",
    }
    return url


def _layout(machine: Path) -> CollectionLayout:
    """Return the collection as a machine sees it."""
    os.environ["CAIRN_CACHE"] = str(machine)
    lease.LEASE_SECONDS, replica.REFRESH_SECONDS = LEASE_SECONDS, 0.0  # pyright: ignore
    return CollectionLayout.at(ROOT, "stones")


def _write(machine: Path, ids: list[str], version: int) -> None:
    stones.publish_documents(_layout(machine), ids, replaced=ids, version=version, with_tokens=True)


def _read(machine: Path) -> State:
    generation = open_latest_intact_generation(_layout(machine))
    with lance_errors("reading"):
        found = generation.fetch_documents(range(generation.num_documents), ["doc_id", "text", "year"])
    rows = found.to_pylist()
    return {
        row["doc_id"]: row["year"] - 2000
        if row["text"] == stones.text_of(row["doc_id"], row["year"] - 2000)
        else -1
        for row in rows
    }


def _problems(machine: Path) -> list[str]:
    return [problem.sentence for problem in verify_collection(_layout(machine))]


def _repair(machine: Path) -> list[str]:
    return list(repair_collection(_layout(machine)).lost)


def _damage_copy(machine: Path, seed: int) -> str:
    folder, rng = _layout(machine).folder, random.Random(seed)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    path = rng.choice([path for path in files if path.name not in (".lock", "REMOTE")])
    content, how = _damaged(rng, path.read_bytes())
    path.write_bytes(content)
    return f"copy's {path.relative_to(folder)}: {how}"


def _damage_object(seed: int) -> str:
    store, rng = ObjectFolder(URI), random.Random(seed)
    key = rng.choice(sorted(store.list("files")))
    found = store.read(key)
    assert found is not None
    if rng.random() < 0.2:
        store.delete([key])
        return f"object {key} deleted"
    content, how = _damaged(rng, found.content)
    store.write(key, content)
    return f"object {key}: {how}"


def _damaged(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    if content and rng.random() < 0.8:
        bit = rng.randrange(8 * len(content))
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        return bytes(flipped), f"bit {bit} flipped"
    return content[: len(content) // 3], "cut"
