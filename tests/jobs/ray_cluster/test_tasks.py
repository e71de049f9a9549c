"""Tasks of a cluster: how long one may take."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
from cairn.jobs.ray_cluster.pool import WorkerPool, _Work
from cairn.jobs.ray_cluster.tasks import TaskPool


def test_long_task_is_not_given_up_because_another_was_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WorkerPool, "step", lambda *_: None)
    tasks = TaskPool(SimpleNamespace(remote=lambda **_: lambda made: made), 2, 1)
    tasks._pool._slowest_seconds_a_byte = 0.1
    work = _Work(method="run", arguments=lambda _: (), sizes=[1, 1], waiting=deque([1]))
    assert tasks._pool._deadline(work, 1) > 3_600.0
