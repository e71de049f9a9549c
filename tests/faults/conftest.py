"""Killed processes without their imports, which are most of what a killed ingest costs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cairn.pipeline.index.layout import CollectionLayout

from tests.index import stones

SECONDS = 240.0
"""How long a fork may take until its exit, on a busy machine."""

# What is asked for is imported; then each line of stdin is a fork that works and dies: at a commit point, or
# so many seconds later.
FORKS = """
import json, os, signal, sys
from pathlib import Path
from cairn.pipeline import durable
sys.path.insert(0, {folder!r})
{imports}
for line in sys.stdin:
    point, arguments, named = json.loads(line)
    pid = os.fork()
    if pid == 0:
        if isinstance(point, float):
            # Nothing handles the alarm, so it ends the process as SIGKILL does.
            signal.setitimer(signal.ITIMER_REAL, point)
        durable.observe_commit_points(
            lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == point else None
        )
        work(*arguments, **named)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def start_forks() -> Iterator[Callable[[str], Callable[..., int]]]:
    """Return what starts a program, imports and a function ``work``.

    It returns a function that calls ``work`` in a fork which dies at a commit point, and gives its exit code.
    """
    started: list[subprocess.Popen[str]] = []

    def start(imports: str) -> Callable[..., int]:
        program = FORKS.format(folder=str(Path(__file__).parent), imports=imports)
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        # A session of its own: a fork that hangs has to go with the process that waits for it.
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(
            [sys.executable, "-c", program], env=environment, text=True, start_new_session=True, **pipes
        )
        started.append(process)

        def work_and_die(point: str | float, *arguments: str, **named: str) -> int:
            assert process.stdin is not None
            assert process.stdout is not None
            limit = threading.Timer(SECONDS, os.killpg, (process.pid, signal.SIGKILL))
            limit.start()
            process.stdin.write(json.dumps([point, arguments, named]) + "\n")
            process.stdin.flush()
            heard = process.stdout.readline()
            limit.cancel()
            return int(heard)

        return work_and_die

    yield start
    for process in started:
        process.communicate()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two generations, made once; each test damages a copy."""
    root = tmp_path_factory.mktemp("template")
    layout = CollectionLayout(root, "stones")
    stones.publish_documents(layout, stones.document_ids(20))
    stones.publish_change(layout, "n")
    return root


@pytest.fixture
def layout(template: Path, tmp_path: Path) -> CollectionLayout:
    """A copy of the template."""
    shutil.copytree(template, tmp_path / "root")
    return CollectionLayout(tmp_path / "root", "stones")
