"""S3-compatible servers on this machine that a test may kill or make fail."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cairn.pipeline.index.layout import CollectionLayout

STORE_ROOT = "s3://cairn/indexes"


@dataclass
class ObjectStore:
    """An S3-compatible server in its own process (``s3_server.py``) with one empty bucket, ``cairn``."""

    url: str
    process: subprocess.Popen[str]

    def request(self, method: str, path: str, body: bytes = b"") -> bytes:
        headers = {"Content-Type": "application/octet-stream"}
        with urllib.request.urlopen(
            urllib.request.Request(self.url + path, body, headers, method=method), timeout=30
        ) as answer:
            return answer.read()

    def put(self, key: str, content: bytes) -> None:
        import obstore
        from obstore.store import from_url

        obstore.put(from_url("s3://cairn"), key, content)

    def fault(
        self,
        method: str,
        path: str,
        fault: str,
        times: int = 1,
        access_key: str = "",
        *,
        seconds: float = 2.0,
        every: int = 1,
    ) -> None:
        """Make the next requests that match fail: ``refuse``, ``forbid``, ``lose-reply`` or ``stall``.

        That is, ``every`` so manieth of them.
        """
        rule: dict[str, object] = {
            "method": method,
            "path": path,
            "fault": fault,
            "times": times,
            "access_key": access_key,
        }
        rule |= {"seconds": seconds, "every": every}
        self.request("PUT", "/-/faults", json.dumps([rule]).encode())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def object_stores() -> Generator[list[ObjectStore]]:
    """Hold the servers that :func:`object_store` started in this session; the last one is in use."""
    stores: list[ObjectStore] = []
    yield stores
    for store in stores:
        store.kill()


@pytest.fixture
def object_store(object_stores: list[ObjectStore], monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """Return an empty S3-compatible server on loopback, and set the environment to use it.

    The tests of a session share one server. Another is started after a test has killed it.
    """
    if not object_stores or object_stores[-1].process.poll() is not None:
        command = [sys.executable, str(Path(__file__).with_name("s3_server.py"))]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        with process.stdout:
            object_stores.append(ObjectStore(process.stdout.readline().strip(), process))
    store = object_stores[-1]
    store.request("PUT", "/-/faults", b"[]")
    store.request("POST", "/moto-api/reset")
    store.request("PUT", "/cairn")
    for name, value in {
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": store.url,
        "AWS_ALLOW_HTTP": "true",
        "NO_PROXY": "127.0.0.1",
    }.items():
        monkeypatch.setenv(name, value)
    return store


@pytest.fixture
def machine(
    object_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], CollectionLayout]:
    """Return a maker of layouts of one collection, each with the copies of the machine it names."""
    from cairn.pipeline.index import replica
    from cairn.pipeline.index.layout import CollectionLayout

    monkeypatch.setattr(replica, "REFRESH_SECONDS", 0.0)

    def on(name: str) -> CollectionLayout:
        monkeypatch.setenv("CAIRN_CACHE", str(tmp_path / name))
        return CollectionLayout.at(Path(STORE_ROOT), "stones")

    return on
