"""Questions over a connection of their own: answers, strangers and silence."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from cairn.jobs.ray_serve.direct_line import DirectLine, Listener, Listening

ANSWER_SECONDS = 60.0


class Actor:
    """A handle as Ray has it, whose process listens at ``here``; ``asked`` counts questions about where."""

    def __init__(self, here: Listening) -> None:
        self.here, self.asked, self.listening = here, 0, self

    def remote(self) -> Actor:
        self.asked += 1
        return self

    def future(self) -> Future[Listening]:
        found = Future[Listening]()
        found.set_result(self.here)
        return found


def answer(question: bytearray) -> bytes:
    if question == b"fails":
        os.stat("/no/such/file")  # noqa: PTH116 - an OSError that is not one of the connection
    if question == b"late":
        time.sleep(5.0)
    return bytes(question)


@pytest.fixture
def actor() -> Actor:
    return Actor(Listener(answer, "here").listening)


@pytest.fixture
def line(actor: Actor) -> Iterator[DirectLine]:
    line = DirectLine("here", ANSWER_SECONDS)
    assert line.send(actor, b"any") is None  # asks where the process listens
    yield line
    line.forget()


def ask(line: DirectLine, actor: Actor, question: bytes) -> bytearray:
    wait = line.send(actor, question)
    assert wait is not None
    return wait()


def test_questions_of_several_threads_get_their_own_answers(line: DirectLine, actor: Actor) -> None:
    found: list[bytearray] = []
    questions = [b"%d" % each for each in range(50)]
    threads = [
        threading.Thread(target=lambda: found.extend(ask(line, actor, each) for each in questions))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(questions * 4)
    assert actor.asked == 1


@pytest.mark.parametrize("question", [b"fails", b"late"])
def test_no_answer_is_an_error_of_the_connection(
    line: DirectLine, actor: Actor, question: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    if question == b"late":
        monkeypatch.setattr(line, "_answer_seconds", 0.2)
    with pytest.raises(OSError, match=r"closed the connection|timed out"):
        ask(line, actor, question)
    monkeypatch.undo()
    assert ask(line, actor, b"any") == b"any"


def test_line_to_another_machine_is_not_opened(actor: Actor) -> None:
    line = DirectLine("elsewhere", ANSWER_SECONDS)
    assert [line.send(actor, b"any") for _ in range(3)] == [None] * 3


def test_process_that_is_gone_is_asked_for_again(actor: Actor) -> None:
    here, actor.here = actor.here, actor.here._replace(address=b"\0nobody")
    line = DirectLine("here", ANSWER_SECONDS)
    assert [line.send(actor, b"any") for _ in range(2)] == [None] * 2
    actor.here = here
    assert line.send(actor, b"any") is None
    assert ask(line, actor, b"any") == b"any"
    line.forget()


def test_another_users_process_is_neither_answered_nor_asked(
    actor: Actor, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = DirectLine("here", ANSWER_SECONDS)
    line.send(actor, b"any")
    with monkeypatch.context() as patch, socket.socket(socket.AF_UNIX) as stranger:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        stranger.connect(actor.here.address)
        assert stranger.recv(1) == b""
        assert line.send(actor, b"any") is None
    assert line.send(actor, b"any") is None  # asks again where the process listens
    assert ask(line, actor, b"any") == b"any"
    line.forget()


def test_listener_without_a_descriptor_goes_on_when_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, failed = socket.socket.accept, threading.Event()

    def scarce(self: socket.socket) -> Any:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    actor = Actor(Listener(answer, "here").listening)
    assert failed.wait(60.0)
    line = DirectLine("here", ANSWER_SECONDS)
    assert line.send(actor, b"any") is None
    assert ask(line, actor, b"any") == b"any"
    line.forget()
