"""The collection ``stones``, made by an ingest with a tiny model, and a server over it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

STONES = ("granite", "basalt", "slate", "marble", "flint", "chalk", "quartz", "gneiss", "shale", "chert")


def stone(number: int, num_words: int, said: str = "stone") -> dict[str, Any]:
    """Return a document: its id holds slashes, its title may be missing, its text is of several chunks."""
    name = STONES[number % 10]
    words = " ".join(STONES[(number + step * step) % 10] for step in range(num_words))
    title = f"{name.title()} {number}" if number % 4 else None
    return {"id": f"stones/{name}/{number}", "title": title, "text": f"{said} {number} é: {words}"}


@pytest.fixture(scope="session")
def stones_root(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Path:
    """A root with the collection ``stones``.

    12 documents of several chunks, ids with slashes, a number and a date to filter by.
    """
    import datetime as dt

    from tests.small_ingests import WINDOWS, ingest_rows, settings

    root = tmp_path_factory.mktemp("stones") / "root"
    rows = [
        {**stone(number, 20 + number), "year": 2000 + number, "found": dt.date(2000 + number, 1, 1)}
        for number in range(12)
    ]
    ingest_rows(rows, root, settings(tiny_model_folder, precision="fp32", **WINDOWS), "stones")
    return root


def wait_until(claim: Callable[[], object]) -> None:
    """Wait until a claim holds, five minutes at most on a busy machine."""
    ends = time.monotonic() + 300.0
    while not claim():
        assert time.monotonic() < ends, "it never came to hold"
        time.sleep(0.01)


def let_happen_before(patch: pytest.MonkeyPatch, owner: Any, name: str, act: Callable[..., object]) -> None:
    """Let something happen before each call of a function or method; it is given its arguments."""
    call = getattr(owner, name)

    def preceded(*given: Any, **options: Any) -> Any:
        act(*given)
        return call(*given, **options)

    patch.setattr(owner, name, preceded)


def raising(faults: list[Exception]) -> Callable[..., None]:
    """Return what raises these errors, one a call, and nothing after them."""

    def act(*_: Any, **__: Any) -> None:
        if faults:
            raise faults.pop(0)

    return act


class Held:
    """A method whose calls wait until they may go on."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.thread = threading.current_thread()
        call = getattr(owner, name)

        def held(*given: Any, **options: Any) -> Any:
            self.thread = threading.current_thread()
            self.began.set()
            assert self.goes_on.wait(300)
            return call(*given, **options)

        patch.setattr(owner, name, held)


@contextlib.contextmanager
def serving(settings: Any, app: Any = None, *, is_forced: bool = False) -> Iterator[str]:
    """Give the address of a server on a thread; one that is forced to end waits for no connection."""
    from cairn.pipeline.serve.app import create_app
    from cairn.pipeline.serve.server import bind, server_of

    with bind(settings) as listener:
        server = server_of(app or create_app(settings), settings)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="stones-server")
        thread.start()
        try:
            while not server.started and thread.is_alive():
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit, server.force_exit = True, is_forced
            thread.join()


@pytest.fixture(scope="session")
def stones_address(stones_root: Path) -> Iterator[str]:
    """The address of a server over that root, in a thread of this process."""
    from cairn.pipeline.serve.settings import ServeSettings

    with serving(ServeSettings(root=stones_root, port=0, deadline_seconds=300.0)) as address:
        yield address


@contextlib.contextmanager
def serving_process(folder: Path, *words: str | Path) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """Run `cairn serve` in a process of its own until the block ends, once its collections are open.

    Give the process, its address and the file of what it says.
    """
    command = [sys.executable, "-m", "cairn.cli.main", "serve", "--port", "0", "--deadline-seconds", "300"]
    face, said = Path(__file__).parents[1] / "pipeline/face", folder / f"served-{time.monotonic_ns()}.log"
    environment = {**os.environ, "PYTHONPATH": str(face), "PYTHONWARNINGS": "ignore"}
    with said.open("wb") as log:
        process = subprocess.Popen([*command, *map(str, words)], cwd=folder, env=environment, stderr=log)
    try:
        tells = re.compile(r"serving .* at (http://\S+)\n")  # Ray tells of addresses of its own
        wait_until(lambda: tells.search(said.read_text("utf-8")) or process.poll() is not None)
        found = tells.search(said.read_text("utf-8"))
        assert found is not None, said.read_text("utf-8")
        wait_until(lambda: _is_ready(found[1]))
        yield process, found[1], said
    finally:
        process.kill()
        process.wait()


def _is_ready(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/readyz") as answer:
            return answer.status == 200
    except urllib.error.HTTPError:
        return False
