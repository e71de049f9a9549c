"""A connection to Ray: to a running cluster, or to a Ray started on this machine and guarded by a token.

Ray is imported when a connection is asked for and nowhere before, because it reads its token from the
environment at import.
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

from cairn.jobs.engine import require_ray
from cairn.pipeline.errors import (
    ClusterError,
    ClusterUnreachableError,
    ConfigError,
    first_line,
)

PROBE_SECONDS: Final = 5.0
"""How long an address may take to accept a connection.

Ray itself tries for minutes and then ends the process.
"""

STOP_SECONDS: Final = 30.0
"""How long a Ray of our own may take to stop."""

OBJECT_STORE_BYTES: Final = 512 << 20
"""Shards are a few MB and two a worker are under way; a sample of documents is some 70 MB."""

STARTS: Final = 3
"""Ray gives its parts 30 seconds to start, which a busy machine may exceed.

What they loaded is there the next time.
"""


class RayConnection:
    """Ray, connected; ``close`` disconnects, and stops a Ray that was started here.

    ``address`` = None starts one. Who is connected already stays so, whatever the address.
    """

    def __init__(self, address: str | None) -> None:
        self._started: subprocess.Popen[str] | None = None
        if os.environ.get("RAY_AUTH_TOKEN") or address is None:
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        require_ray()
        import ray

        self.ray: ModuleType = ray
        self._is_ours = not ray.is_initialized()
        if not self._is_ours:
            return
        try:
            if address is None:
                self._started, address = start_ray()
            else:
                address = _answering(address)
            self._connect(address)
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
            raise ClusterUnreachableError(
                f"a Ray cluster must answer at {address!r}, got {first_line(error)!r}; start it, and set "
                "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to its token"
            ) from error

    def _stop(self) -> None:
        if self._started is not None:
            self._started.communicate(timeout=STOP_SECONDS)  # ends its stdin
            self._started = None


def start_ray() -> tuple[subprocess.Popen[str], str]:
    """Start a Ray; return the process that keeps it, as long as its stdin is open, and the address."""
    reason = ""
    for _ in range(STARTS):
        with tempfile.TemporaryFile("w+") as errors:
            # A session of its own: an interrupt from the terminal is the ingest's to handle.
            keeper = subprocess.Popen(
                [sys.executable, "-m", "cairn.jobs.ray_cluster.runtime"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
            assert keeper.stdout is not None
            address = keeper.stdout.readline().strip()
            if address:
                return keeper, address
            keeper.communicate()
            errors.seek(0)
            reason = errors.read().strip().rpartition("\n")[2]
    raise ClusterError(
        f"Ray must start on this machine, got {reason!r}; use engine local, or start it by hand"
    )


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
    require_listener(address, match.group(1).strip("[]"), int(match.group(2)))
    return address


def require_listener(
    address: str, host: str, port: int, advice: str = "start it, or leave the address out"
) -> None:
    """Raise :class:`ClusterUnreachableError` where nothing accepts a connection within ``PROBE_SECONDS``."""
    try:
        socket.create_connection((host, port), timeout=PROBE_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ClusterUnreachableError(
            f"a Ray cluster must answer at {address!r}, got {reason}; {advice}"
        ) from error


def keep_ray() -> None:
    """Start a Ray, print its address on stdout, and stop it when stdin ends.

    A process of its own for two reasons. Starting Ray forks, which a process with an open LanceDB table must
    not do. And stdin ends when the parent does, even by a kill, so that no Ray is left behind.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing about an ingest leaves this machine
    import ray

    ray.init(
        address="local",
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=ERROR,
    )
    sys.stdout.write(f"{ray.get_runtime_context().gcs_address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    keep_ray()
