"""Ray clusters whose machines and workers a test may kill, see ``ray_cluster.py``."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


class RayCluster:
    """Machines on this one, in processes that can be killed: a head that computes nothing and two others."""

    STARTS = 3
    """Ray gives a machine 30 seconds to start, which a busy one may exceed."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("ray_cluster.py"))]
        # What a job calls `python` is the cluster's.
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        for left in reversed(range(self.STARTS)):
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            try:
                self._hear()
                break
            except json.JSONDecodeError:
                self.close()
                if not left:
                    raise

    def _hear(self) -> None:
        assert self._process.stdout is not None
        heard = json.loads(self._process.stdout.readline())
        self.address: str = heard["address"]
        self.dashboard = f"http://{heard['dashboard']}"
        self.raylets: list[int] = heard["raylets"]

    def machines(self) -> list[int]:
        """Return the raylets of living machines other than the head."""
        import psutil

        return [
            pid
            for pid in self.raylets[1:]
            if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        ]

    def processes(self, raylet: int) -> list[int]:
        """Return all processes of a machine, its raylet first."""
        import psutil

        return [raylet, *(child.pid for child in psutil.Process(raylet).children(recursive=True))]

    def workers(self, class_name: str) -> list[int]:
        """Return the processes of living actors of a class, the oldest first."""
        import psutil

        found: list[tuple[float, int]] = []
        for raylet in self.machines():
            for process in psutil.Process(raylet).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):  # it died just now
                    if process.name().startswith(f"ray::{class_name}"[:15]):
                        found.append((process.create_time(), process.pid))
        return [pid for _, pid in sorted(found)]

    def machine_at_work(self, class_name: str) -> int:
        """Return the machine of the oldest actor of a class."""
        import psutil

        parents = {process.pid for process in psutil.Process(self.workers(class_name)[0]).parents()}
        (machine,) = parents.intersection(self.machines())
        return machine

    def restore(self, machines: int = 2) -> None:
        """Bring the cluster back to so many machines."""
        assert self._process.stdin is not None
        while len(self.machines()) < machines:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            self._hear()

    def close(self) -> None:
        """Stop everything."""
        self._process.communicate(timeout=600)


@pytest.fixture(scope="session")
def started_ray_cluster() -> Iterator[RayCluster]:
    """Start one cluster for all tests; :func:`ray_cluster` restores what a test has broken."""
    cluster = RayCluster()
    yield cluster
    cluster.close()


@pytest.fixture
def ray_cluster(started_ray_cluster: RayCluster) -> RayCluster:
    """Return a whole cluster."""
    started_ray_cluster.restore()
    return started_ray_cluster
