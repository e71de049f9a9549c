"""What a silent machine costs a search over shards, with machines that a fake Ray has."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cairn.jobs.ray_serve import shard_calls
from cairn.jobs.ray_serve.settings import ClusterSettings
from cairn.jobs.ray_serve.shard_calls import LATE_SECONDS, PAUSE_SECONDS, ShardCalls
from cairn.jobs.ray_serve.wire import pack
from cairn.pipeline.search.shards.parts import PartKey, Question
from cairn.pipeline.serve.settings import ServeSettings


class RayError(Exception):
    pass


class FakeRay:
    """Two machines; an answer is the machine that gave it, and that of ``silent`` never comes.

    ``waited_seconds`` are all that was waited for it, by a clock that does not run else.
    """

    exceptions = SimpleNamespace(
        RayError=RayError,
        ActorDiedError=type("ActorDiedError", (RayError,), {}),
        ActorUnschedulableError=type("ActorUnschedulableError", (RayError,), {}),
    )
    util = SimpleNamespace(
        scheduling_strategies=SimpleNamespace(NodeAffinitySchedulingStrategy=lambda machine, soft: machine)
    )
    silent: str | None = None
    waited_seconds = 0.0

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "NodeID": name, "Resources": {"CPU": 1}} for name in ("a", "b")]

    def remote(self, *, scheduling_strategy: str, **_: Any) -> Any:
        def method(answer: Any) -> Any:
            return SimpleNamespace(remote=lambda *_: answer)

        pending = SimpleNamespace(future=Future[Any])
        actor = SimpleNamespace(answer=method(scheduling_strategy), listening=method(pending))
        made = SimpleNamespace(remote=lambda *_, **__: actor)
        return lambda _: SimpleNamespace(options=lambda **_: made)

    def wait(self, *_: Any, **__: Any) -> None:
        pass

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: "head")

    def get(self, machine: str, timeout: float) -> bytes:
        if machine == self.silent:
            self.waited_seconds += timeout
            raise RayError
        return pack(machine)


@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("first_turn", [0, 1])
def test_search_in_three_rounds_waits_once_for_a_lost_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_shards: int, first_turn: int
) -> None:
    ray = FakeRay()
    monkeypatch.setattr(shard_calls, "time", SimpleNamespace(monotonic=lambda: ray.waited_seconds))
    cluster = ClusterSettings(engine="ray", shards=num_shards, shard_replicas=2)
    calls = ShardCalls(ray, ServeSettings(root=tmp_path), cluster)
    key: Any = PartKey
    questions = [Question(shard, key, "facts", ()) for shard in range(num_shards)]
    monkeypatch.setattr(shard_calls, "pack", lambda _: b"")
    for _ in range(first_turn):
        calls.ask(questions)
    ray.silent = "a"
    assert [calls.ask(questions) for _ in range(3)] == [["b"] * num_shards] * 3
    assert ray.waited_seconds <= LATE_SECONDS + num_shards * PAUSE_SECONDS
