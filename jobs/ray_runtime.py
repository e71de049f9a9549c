"""A connection to Ray: to a running cluster, or to a Ray of our own on this machine, which no one without its token can use.

Ray is imported here, when a connection is asked for, and nowhere before: it reads its token from the environment once.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
from logging import ERROR
from types import ModuleType
from typing import Final

from pipeline.errors import ClusterError, ClusterUnreachableError, ConfigError

PROBE_SECONDS: Final = 5.0
"""How long an address may take to accept a connection; Ray itself tries for minutes and then ends the process."""

STOP_SECONDS: Final = 30.0
"""How long a Ray of our own may take to stop."""


class RayConnection:
    """Ray, connected; ``close`` disconnects, and stops a Ray that was started here.

    ``address`` = None starts one. Who is connected already stays so, whatever the address.
    """

    def __init__(self, address: str | None) -> None:
        self._started: subprocess.Popen[str] | None = None
        if os.environ.get("RAY_AUTH_TOKEN") or address is None:
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        import ray

        self.ray: ModuleType = ray
        self._is_ours = not ray.is_initialized()
        if not self._is_ours:
            return
        try:
            self._connect(self._start() if address is None else _answering(address))
        except BaseException:
            self._stop()
            raise

    def close(self) -> None:
        """Disconnect, unless the caller was connected before."""
        if self._is_ours:
            self.ray.shutdown()
            self._stop()

    def _connect(self, address: str) -> None:
        try:
            self.ray.init(address=address, log_to_driver=False, logging_level=ERROR)
        except (ConnectionError, RuntimeError, ValueError, self.ray.exceptions.RayError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise ClusterUnreachableError(
                f"a Ray cluster must answer at {address!r}, got {reason!r}; "
                "start it, or set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to its token"
            ) from error

    def _start(self) -> str:
        command = [sys.executable, "-m", "jobs.ray_local"]
        with tempfile.TemporaryFile("w+") as errors:
            # A session of its own: an interrupt from the terminal is the ingest's to handle.
            self._started = subprocess.Popen(  # noqa: S603, our own module
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
            assert self._started.stdout is not None
            address = self._started.stdout.readline().strip()
            if not address:
                self._started.wait()
                errors.seek(0)
                reason = errors.read().strip().rpartition("\n")[2]
                raise ClusterError(f"Ray must start on this machine, got {reason!r}; use engine local, or start it by hand")
        return address

    def _stop(self) -> None:
        if self._started is not None:
            self._started.communicate(timeout=STOP_SECONDS)  # ends its stdin
            self._started = None


def _answering(address: str) -> str:
    """Return an address where something listens; a wrong one must not cost minutes."""
    if address == "auto":
        return address
    match = re.fullmatch(r"(?:ray://)?([^/:]+|\[[0-9a-fA-F:]+\]):(\d{1,5})", address)
    if not match:
        raise ConfigError(
            f"the address of a Ray cluster must be HOST:PORT, ray://HOST:PORT or auto, got {address!r}; "
            "addresses of its dashboard are for `cairn submit`"
        )
    try:
        socket.create_connection((match.group(1).strip("[]"), int(match.group(2))), timeout=PROBE_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ClusterUnreachableError(
            f"a Ray cluster must answer at {address!r}, got {reason}; start it, or leave the address out"
        ) from error
    return address
