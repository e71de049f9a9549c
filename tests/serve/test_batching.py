"""Texts of concurrent requests share passes.

A single text does not wait for others, a long list does not delay others, and a failing text fails alone.
"""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from cairn.pipeline.serve import collections
from cairn.pipeline.serve.collections import EncoderQueue
from cairn.pipeline.serve.problems import ProblemError

DIM = 4
pytestmark = pytest.mark.anyio


class Gate:
    """An encoder that waits until it is let go, notes its passes and fails on texts with ``poison``."""

    fingerprint = "g" * 64
    vector_dim = DIM

    def __init__(self):
        self.passes: list[list[str]] = []
        self.threads: list[str] = []
        self.is_open = threading.Event()
        self.has_begun = threading.Event()

    def vector(self, text):
        return np.full(DIM, np.nan if "nan" in text else len(text), np.float32)

    def encode_queries(self, texts):
        self.passes.append(list(texts))
        self.has_begun.set()
        self.is_open.wait()
        if any("poison" in text for text in texts):
            raise RuntimeError("the model broke on a text")
        return np.stack([self.vector(text) for text in texts])

    def encode_documents(self, texts):
        return -self.encode_queries(texts)

    def count_tokens(self, texts):
        return len(texts)


@pytest.fixture
def gate():
    return Gate()


@pytest.fixture
def queue(gate):
    queue = EncoderQueue(gate, on_start=lambda: gate.threads.append(threading.current_thread().name))
    yield queue
    gate.is_open.set()
    queue.stop()


async def begun(queue, gate):
    """Return a first request whose pass has begun."""
    first = asyncio.create_task(queue.encode(["first"]))
    await asyncio.to_thread(gate.has_begun.wait)
    return first


async def behind_a_first(queue, gate, *waiting, then=lambda: None):
    """Start requests while a first one is being encoded, do something, and return what they got."""
    first = await begun(queue, gate)
    tasks = [asyncio.create_task(each) for each in waiting]
    await asyncio.sleep(0)
    then()
    gate.is_open.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    await first
    return found


def problem_of(outcome):
    assert isinstance(outcome, ProblemError), outcome
    return outcome.kind.code


async def test_texts_that_gather_during_a_pass_share_the_next_with_those_of_their_kind(queue, gate):
    found = await behind_a_first(
        queue, gate, queue.encode(["a"]), queue.encode(["bb"], "document"), queue.encode(["ccc", "dddd"])
    )
    assert [vectors[:, 0].tolist() for vectors in found] == [[1.0], [-2.0], [3.0, 4.0]]
    assert gate.passes == [["first"], ["a", "ccc", "dddd"], ["bb"]]
    assert gate.threads == ["cairn-encoder"]


async def test_long_list_gives_way_to_a_single_text(queue, gate, monkeypatch):
    monkeypatch.setattr(collections, "MAX_PASS_BYTES", 4)
    found = await behind_a_first(queue, gate, queue.encode(["aa", "bb", "cc", "dd"]), queue.encode(["x"]))
    assert [vectors[:, 0].tolist() for vectors in found] == [[2.0] * 4, [1.0]]
    assert "x" in gate.passes[1]
    assert [len(taken) for taken in gate.passes] == [1, 2, 2, 1]


@pytest.mark.parametrize("bad", ["poison", "nan"])
async def test_request_with_a_text_the_encoder_fails_on_fails_alone(queue, gate, bad):
    found = await behind_a_first(
        queue, gate, queue.encode(["a"]), queue.encode(["b", bad]), queue.encode(["ccc"])
    )
    assert [found[0][0, 0], found[2][0, 0]] == [1.0, 3.0]
    assert problem_of(found[1]) == "encoder-failed"
    assert (await queue.encode(["again"])).shape == (1, DIM)


async def test_full_queue_refuses_and_serves_again_when_it_is_empty(queue, gate, monkeypatch):
    monkeypatch.setattr(collections, "MAX_WAITING_BYTES", 8)
    found = await behind_a_first(
        queue, gate, queue.encode(["12345"]), queue.encode(["1234"]), queue.encode(["123"])
    )
    assert found[0].shape == found[2].shape == (1, DIM)
    assert problem_of(found[1]) == "overloaded"
    assert (await queue.encode(["larger than the queue"])).shape == (1, DIM)


async def test_request_whose_caller_has_gone_is_not_encoded_and_leaves_its_room(queue, gate, monkeypatch):
    monkeypatch.setattr(collections, "MAX_WAITING_BYTES", 16)
    first = await begun(queue, gate)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue.encode(["gone", "too"]), 0.01)
    stays = asyncio.create_task(queue.encode(["stays"]))
    await asyncio.sleep(0)
    gate.is_open.set()
    await asyncio.gather(first, stays)
    assert gate.passes == [["first"], ["stays"]]
    assert (await queue.encode(["larger than the queue"])).shape == (1, DIM)


async def test_stop_fails_what_waits_and_what_comes(queue, gate):
    first = await begun(queue, gate)
    waiting = asyncio.create_task(queue.encode(["waiting"]))
    await asyncio.sleep(0)
    stopping = asyncio.create_task(asyncio.to_thread(queue.stop))
    while not queue._is_stopping:
        await asyncio.sleep(0.001)
    late = asyncio.create_task(queue.encode(["late"]))
    await asyncio.sleep(0)
    gate.is_open.set()
    await stopping
    first, waiting, late = await asyncio.gather(first, waiting, late, return_exceptions=True)
    assert first.shape == (1, DIM)
    assert problem_of(waiting) == problem_of(late) == "stopping"


async def test_retired_queue_ends_after_what_waits(queue, gate):
    (waiting,) = await behind_a_first(queue, gate, queue.encode(["waiting"]), then=queue.retire)
    assert waiting.shape == (1, DIM)
    queue._thread.join(300.0)
    assert not queue._thread.is_alive()


async def test_request_with_more_text_than_its_deadline_allows_is_refused(queue):
    with pytest.raises(ProblemError, match="131,072 bytes together"):
        await queue.encode(["x" * 8_190] * 32)
