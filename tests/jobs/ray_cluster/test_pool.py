import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cairn.jobs.ray_cluster import pool as ray_pool
from cairn.jobs.ray_cluster.pool import WorkerPool
from cairn.jobs.ray_cluster.runtime import RayConnection
from cairn.pipeline.errors import ClusterError, ConfigError

from tests.served_stones import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]


class Squarer:
    """Squares numbers; what goes wrong with which number is told by files, so that it goes wrong once."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def load(self) -> str:
        return "ready"

    def who(self) -> int:
        return os.getpid()

    def square(self, number: int) -> int:
        with (self._folder / f"began-{number}").open("a") as stream:
            stream.write("x")
        for trouble in ("die", "hang"):
            cause = self._folder / f"{trouble}-{number}"
            if cause.exists():
                if not (self._folder / "always").exists():
                    cause.unlink()
                if trouble == "die":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(600)
        if (self._folder / f"refuse-{number}").exists():
            raise ConfigError(f"{number} must not be squared, got it; leave it out")
        if (self._folder / f"break-{number}").exists():
            raise ZeroDivisionError("one over nothing")
        return number * number


@pytest.fixture(scope="module")
def ray(started_ray_cluster: Any) -> Iterator[Any]:
    """Connect; the class lives in a test module, which no worker can import."""
    connection = RayConnection(started_ray_cluster.address)
    connection.ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield connection.ray
    connection.close()


@pytest.fixture
def make_pool(ray: Any, ray_cluster: Any, tmp_path: Path) -> Iterator[Any]:
    pools: list[WorkerPool] = []

    def make(**settings: Any) -> WorkerPool:
        cpus = settings.pop("num_cpus", 1)
        sizes = {"min_workers": 1, "max_workers": 2, "deadline_seconds": None, **settings}
        pools.append(WorkerPool(ray, Squarer, (str(tmp_path),), {"num_cpus": cpus}, **sizes))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def squares(pool: WorkerPool, count: int) -> dict[int, int]:
    found: dict[int, int] = {}
    for number, answer in pool.map("square", lambda number: (number,), [1] * count):
        assert number not in found
        found[number] = answer
    return found


def test_map_answers_every_number_once_and_has_no_more_begun_than_workers_and_answers(
    make_pool: Any, tmp_path: Path
) -> None:
    """What is lost with a driver that is killed is one shard a worker."""
    pool = make_pool()
    assert pool.step("load") == "ready"
    found: dict[int, int] = {}
    for number, answer in pool.map("square", lambda number: (number,), [1] * 20):
        assert len(list(tmp_path.glob("began-*"))) <= len(found) + 2
        found[number] = answer
    assert found == {number: number * number for number in range(20)}
    assert [(tmp_path / f"began-{number}").read_text() for number in range(20)] == ["x"] * 20


def test_map_makes_a_call_again_whose_answer_says_so(make_pool: Any, tmp_path: Path) -> None:
    pool, again = make_pool(), [9]
    found = dict(
        pool.map(
            "square", lambda number: (number,), [1] * 6, lambda answer: answer in again and bool(again.pop())
        )
    )
    assert found == {number: number * number for number in range(6)}
    assert (tmp_path / "began-3").read_text() == "xx"


@pytest.mark.slow
def test_map_with_workers_that_die_and_one_that_hangs_past_its_deadline_answers_every_number_once(
    make_pool: Any, tmp_path: Path
) -> None:
    for trouble in ("die-3", "die-4", "hang-7"):
        (tmp_path / trouble).touch()
    pool = make_pool(deadline_seconds=3.0)
    pool.step("load")
    assert squares(pool, 10) == {number: number * number for number in range(10)}
    assert (tmp_path / "began-7").read_text() == "xx"


@pytest.mark.slow
def test_map_whose_caller_was_busy_past_the_deadline_takes_the_answers_that_came_meanwhile(
    ray: Any, make_pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(deadline_seconds=200.0)
    pool.step("load")
    while sum(worker.steps_passed for worker in pool._workers) < 2:
        squares(pool, 4)
    answers = pool.map("square", lambda number: (100 + number,), [1] * 8)
    next(answers)
    under_way = [worker.call.reference for worker in pool._workers if worker.call]
    assert len(ray.wait(under_way, num_returns=len(under_way), timeout=100)[0]) == 1
    real = time.monotonic
    monkeypatch.setattr(ray_pool, "time", SimpleNamespace(monotonic=lambda: real() + 1_000.0))
    assert len(list(answers)) == 7
    assert [(tmp_path / f"began-{100 + number}").read_text() for number in range(8)] == ["x"] * 8


@pytest.mark.slow
def test_map_learns_a_deadline_from_the_numbers_before(
    make_pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_pool, "LEAST_DEADLINE_SECONDS", 1.0)
    (tmp_path / "hang-0").touch()
    pool = make_pool()
    pool.step("load")
    assert squares(pool, 8) == {number: number * number for number in range(8)}


@pytest.mark.slow
def test_number_that_kills_every_worker_ends_the_run_with_a_sentence(make_pool: Any, tmp_path: Path) -> None:
    (tmp_path / "die-1").touch()
    (tmp_path / "always").touch()
    with pytest.raises(
        ClusterError,
        match=r"call \d of `square` must be answered by a worker, got 4 that failed, the last because: "
        "The actor is dead",
    ):
        squares(make_pool(max_workers=1), 3)


def test_error_in_a_worker_arrives_as_it_is_or_as_a_sentence(make_pool: Any, tmp_path: Path) -> None:
    pool = make_pool(max_workers=1)
    (tmp_path / "refuse-1").touch()
    with pytest.raises(ConfigError, match=r"^1 must not be squared, got it; leave it out$"):
        squares(pool, 3)
    pool.close()
    (tmp_path / "break-0").touch()
    with pytest.raises(ClusterError, match=r"a worker at [\d.]+ failed: ZeroDivisionError: one over nothing"):
        squares(make_pool(max_workers=1), 1)


@pytest.mark.slow
def test_workers_that_give_different_answers_to_a_step_are_refused(make_pool: Any, tmp_path: Path) -> None:
    (tmp_path / "hang-0").touch()  # keeps the first worker busy until the second is there
    pool = make_pool()
    pool.step("who")
    with pytest.raises(ClusterError, match="all workers must have the same model and version"):
        squares(pool, 20)


def test_cluster_without_room_for_a_worker_is_told_so(ray: Any, make_pool: Any) -> None:
    wait_until(lambda: ray.cluster_resources()["CPU"] == 2)  # a lost machine is noticed after seconds
    with pytest.raises(
        ClusterError,
        match=r"1 worker\(s\) within 1 seconds, got 0; each asks for 64 CPUs and 0 GPUs, and of 2 CPUs",
    ):
        make_pool(num_cpus=64, start_seconds=1.0).step("load")


def test_cluster_without_the_module_is_told_what_to_install(
    ray: Any, ray_cluster: Any, tmp_path: Path
) -> None:
    (tmp_path / "only_here.py").write_text("class Worker:\n    def load(self): return 'ready'\n")
    sys.path.insert(0, str(tmp_path))
    try:
        import only_here
    finally:
        sys.path.remove(str(tmp_path))
    pool = WorkerPool(
        ray, only_here.Worker, (), {"num_cpus": 1}, min_workers=1, max_workers=1, deadline_seconds=None
    )
    with pytest.raises(
        ClusterError, match="must have Cairn installed, got one that says \"No module named 'only_here'\""
    ):
        pool.step("load")
