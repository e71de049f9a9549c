"""Questions to a shard on the same machine, over connections of their own: Ray's calls take far longer.

    DirectLine, in the ingress               Listener, in the shard's process
    where do you listen? ──── Ray ────────▶  node, address
    question             ── Unix socket ──▶
                         ◀──────────────     answer

Nothing is sent to or read from another user's process: the kernel says whose is at the other end.
A connection carries one question at a time, and whatever goes wrong with it closes it.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, NamedTuple

log = logging.getLogger(__name__)

PAUSE_SECONDS: Final = 0.1
"""Before a connection is accepted after one could not be."""
_SIZE: Final = struct.Struct("!Q")
_CREDENTIALS: Final = struct.Struct("3i")
"""Process, user and group at the other end, as Linux gives them."""


class Listening(NamedTuple):
    """Where a shard's process listens: an address without a file, which goes with the process."""

    node: str
    address: bytes


class _Connection:
    """Messages with their size before them."""

    def __init__(self, connected: socket.socket) -> None:
        _, user, _ = _CREDENTIALS.unpack(
            connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if user != os.geteuid():
            connected.close()
            raise ConnectionRefusedError("the other side is another user's process")
        self._socket, self._reader = connected, connected.makefile("rb")

    def send(self, message: bytes) -> None:
        self._socket.sendall(_SIZE.pack(len(message)) + message)

    def receive(self) -> bytearray:
        """Return the next message; raises an OSError where the other side is gone or late."""
        (size,) = _SIZE.unpack(self._read(_SIZE.size))
        return self._read(size)

    def close(self) -> None:
        self._reader.close()
        self._socket.close()

    def _read(self, size: int) -> bytearray:
        read = bytearray(size)
        if self._reader.readinto(read) < size:
            raise ConnectionResetError("the other side has closed the connection")
        return read


class Listener:
    """Answers questions on connections of this machine, each on a thread of its own."""

    def __init__(self, answer: Callable[[bytearray], bytes], node: str) -> None:
        self._answer = answer
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind("")  # Linux gives it an address of its own
        self._socket.listen()
        self.listening = Listening(node, self._socket.getsockname())
        threading.Thread(target=self._accept, name="cairn-listener", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connected, _ = self._socket.accept()
                threading.Thread(target=self._converse, args=(connected,), daemon=True).start()
            except (OSError, RuntimeError) as error:  # no descriptor or thread is left for now
                log.warning("serve.shard_not_accepting error=%s", type(error).__name__)
                time.sleep(PAUSE_SECONDS)

    def _converse(self, connected: socket.socket) -> None:
        try:
            connection = _Connection(connected)
        except ConnectionRefusedError:
            return
        try:
            while True:
                connection.send(self._answer(connection.receive()))
        except OSError:  # it has closed the connection
            pass
        finally:  # after any other error, too: who asked then asks by Ray, which tells the error
            connection.close()


class DirectLine:
    """Connections to one shard's process, as far as it is on this machine; shared between threads."""

    def __init__(self, node: str, answer_seconds: float) -> None:
        self._node, self._answer_seconds = node, answer_seconds
        self._idle: deque[_Connection] = deque()
        self._found: Future[Listening] | None = None

    def send(self, actor: Any, question: bytes) -> Callable[[], bytearray] | None:
        """Send a question and return what waits for its answer; None where Ray has to be asked.

        That is where the process is on another machine, or where it is not known yet where it listens. An
        answer that does not come in time is an OSError.
        """
        try:
            connection = self._connection(actor)
            if connection is None:
                return None
            connection.send(question)
        except OSError:
            self.forget()
            return None

        def answer() -> bytearray:
            try:
                answer = connection.receive()
            except BaseException:
                connection.close()
                raise
            self._idle.append(connection)
            return answer

        return answer

    def forget(self) -> None:
        """Close what is open; the process is asked again where it listens."""
        self._found = None
        while (connection := self._pop()) is not None:
            connection.close()

    def _connection(self, actor: Any) -> _Connection | None:
        found = self._found
        if found is None or (found.done() and found.exception() is not None):
            self._found = actor.listening.remote().future()
            return None
        if not found.done():
            return None
        listening = found.result()
        if listening.node != self._node:
            return None
        return self._pop() or self._connect(listening)

    def _pop(self) -> _Connection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _connect(self, listening: Listening) -> _Connection:
        connected = socket.socket(socket.AF_UNIX)
        connected.settimeout(self._answer_seconds)
        try:
            connected.connect(listening.address)
        except OSError:
            connected.close()
            raise
        return _Connection(connected)
