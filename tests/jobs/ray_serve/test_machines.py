"""`cairn serve --engine ray` on a cluster of three machines, of which one is lost."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from cairn.jobs.ray_cluster.runtime import RayConnection
from cairn.jobs.ray_serve.settings import ClusterSettings
from cairn.jobs.ray_serve.shard_calls import ShardCalls, await_machines, computing_machines, stop_shards
from cairn.pipeline.errors import StorageError
from cairn.pipeline.index.layout import Checks, CollectionLayout
from cairn.pipeline.search.shards.parts import PartKey, Question
from cairn.pipeline.search.shards.sharded_generation import ShardedGeneration
from cairn.pipeline.serve.settings import ServeSettings

from tests.jobs.ray_serve.served_shards import (
    REPLICAS,
    REQUESTS,
    SHARDS,
    START_SECONDS,
    Searches,
    expected,
    ingest,
    serve_shards,
    shard_processes,
)
from tests.ray_machines import RayCluster
from tests.served_stones import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.xdist_group("ray")]


def test_lost_machine_costs_no_answer(
    ray_cluster: RayCluster, tmp_path: Path, tiny_model_folder: Path
) -> None:
    model, root = tiny_model_folder, tmp_path / "root"
    ingest(root, model, range(60))
    wanted = expected(root)
    with serve_shards(tmp_path, root, model, "--address", ray_cluster.address) as served:
        assert [served.ask(request) for request in REQUESTS] == [(200, each) for each in wanted]
        assert [len(shard_processes(machine)) for machine in ray_cluster.machines()] == [SHARDS, SHARDS]
        lost = ray_cluster.machines()[0]
        with Searches(served) as searches:
            searches.await_answers(5)
            for pid in ray_cluster.processes(lost):
                os.kill(pid, signal.SIGKILL)
            searches.await_answers(2 * len(REQUESTS))
            [left] = ray_cluster.machines()
            wait_until(lambda: len(shard_processes(left)) >= SHARDS * REPLICAS)
            searches.await_answers(len(REQUESTS))
    assert [(status, body) for _, status, body in searches.answers] == [
        (200, wanted[number]) for number, _, _ in searches.answers
    ]


def test_shards_wait_for_machines_that_are_to_come(ray_cluster: RayCluster) -> None:
    with closing(RayConnection(ray_cluster.address)) as connection, ThreadPoolExecutor(1) as thread:
        await_machines(connection.ray, 2)
        for pid in ray_cluster.processes(ray_cluster.machines()[0]):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(computing_machines(connection.ray)) <= 1)
        waiting = thread.submit(await_machines, connection.ray, 2)
        with pytest.raises(TimeoutError):
            waiting.result(1.0)
        ray_cluster.restore()
        waiting.result(START_SECONDS)
        assert len(computing_machines(connection.ray)) == 2


def test_error_that_every_process_gives_is_raised_as_it_is(
    ray_cluster: RayCluster, tmp_path: Path, tiny_model_folder: Path
) -> None:
    root = tmp_path / "root"
    ingest(root, tiny_model_folder, range(60))
    with closing(RayConnection(ray_cluster.address)) as connection:
        cluster = ClusterSettings(engine="ray", shards=SHARDS, shard_replicas=1)
        calls = ShardCalls(connection.ray, ServeSettings(root=root), cluster)
        try:
            opened = calls.open(CollectionLayout(root, "stones"), 1, Checks())
            assert isinstance(opened, ShardedGeneration)
            for shard, key in enumerate(opened.shards.keys):
                other: PartKey = key._replace(manifest="0" * 64)
                with pytest.raises(StorageError, match="must be the same for every process"):
                    calls.ask([Question(shard, other, "facts", ())])
        finally:
            stop_shards(connection.ray)
