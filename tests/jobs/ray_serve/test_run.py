"""`cairn serve --engine ray`: answers are those of one process, whatever dies and whatever is published."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.ray_serve.served_shards import (
    REPLICAS,
    REQUESTS,
    SHARDS,
    Searches,
    Served,
    expected,
    ingest,
    serve_shards,
)
from tests.served_stones import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.xdist_group("ray")]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_model_folder: Path) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    model, root = tiny_model_folder, folder / "root"
    ingest(root, model, range(60))
    with serve_shards(folder, root, model) as served:
        yield served


def test_answers_of_shards_are_those_of_one_process(served: Served) -> None:
    assert [served.ask(request) for request in REQUESTS] == [(200, each) for each in expected(served.root)]
    assert len(served.shards()) == SHARDS * REPLICAS


def test_shards_of_this_machine_are_asked_directly(served: Served) -> None:
    wait_until(lambda: served.ask(REQUESTS[0])[0] == 200 and served.lines() == served.shards())


def test_several_replicas_answer_as_one_process(served: Served, tmp_path: Path) -> None:
    with serve_shards(tmp_path, served.root, served.model, "--replicas", "2") as several:
        answers = [several.ask(request) for request in REQUESTS]
    assert answers == [(200, each) for each in expected(served.root)]


def test_killed_shards_cost_no_answer_and_are_replaced(served: Served) -> None:
    wanted = expected(served.root)
    killed: set[int] = set()
    with Searches(served) as searches:
        searches.await_answers(5)
        for pid in sorted(served.shards()):
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
            searches.await_answers(10)
            served.await_shards(without=killed)
    assert len(killed) == SHARDS * REPLICAS
    assert [(status, body) for _, status, body in searches.answers] == [
        (200, wanted[number]) for number, _, _ in searches.answers
    ]


def test_all_shards_killed_at_once_answer_again(served: Served) -> None:
    killed = served.shards()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    assert served.ask(REQUESTS[0]) == (200, expected(served.root)[0])
    served.await_shards(without=killed)


def test_frozen_shard_costs_no_answer(served: Served) -> None:
    wanted = expected(served.root)
    frozen = min(served.shards())
    os.kill(frozen, signal.SIGSTOP)
    try:
        answers = [served.ask(request) for request in REQUESTS]
    finally:
        os.kill(frozen, signal.SIGCONT)
    assert answers == [(200, each) for each in wanted]


def test_lost_partition_is_left_out_only_where_a_search_asks_for_the_others(served: Served) -> None:
    whole, moved = expected(served.root)[0], served.root.parent / "moved"
    lost = min((served.root / "stones/partitions").iterdir())
    partial = {**REQUESTS[0], "partial": True}
    assert served.ask(partial) == (200, whole)
    lost.rename(moved)
    try:
        for pid in served.shards():  # else they answer from what they hold open
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: "partitions-missing" in str(served.ask(REQUESTS[0])))
        status, body = served.ask(partial)
        assert status == 200
        assert any(lost.name in warning for warning in body["warnings"])
    finally:
        moved.rename(lost)
    wait_until(lambda: served.ask(REQUESTS[0]) == (200, whole))


def test_a_new_generation_is_taken_up_between_answers(served: Served) -> None:
    before = expected(served.root)
    with Searches(served) as searches:
        searches.await_answers(5)
        ingest(served.root, served.model, range(30, 90))
        wait_until(lambda: served.ask(REQUESTS[0])[1]["generation"] != 1)
        searches.await_answers(5)
    wanted = {1: before, 2: expected(served.root)}
    assert [(status, body) for _, status, body in searches.answers] == [
        (200, wanted[body["generation"]][number]) for number, _, body in searches.answers
    ]
    assert {body["generation"] for _, _, body in searches.answers} == {1, 2}
