"""Jobs on a Ray cluster, by its Jobs API: submitted and followed. `ray job` lists and stops them.

A submission's id follows from the job, so a job that is running is joined and not started twice. The job file
travels with the submission; what it names, the cluster must see.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shlex
import tempfile
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast
from urllib.parse import urlsplit

from cairn.jobs.engine import require_ray
from cairn.jobs.job import read_job
from cairn.jobs.ray_cluster.runtime import require_listener
from cairn.pipeline.errors import (
    ClusterError,
    ClusterUnreachableError,
    ConfigError,
    first_line,
)

_CONFIG_NAME: Final = "job.toml"
_OVER: Final = ("SUCCEEDED", "FAILED", "STOPPED")
_POLL_SECONDS: Final = 1.0
AGENT_SECONDS: Final = 120.0
"""How long a cluster that answers may take until it takes jobs."""
_WITHOUT_CLUSTER: Final = (
    "start one with `ray start --head`, or give the dashboard of another with --address; without a cluster, "
    "run the job here with `python -m cairn.jobs.JOB --config FILE`, JOB being the file's `job`"
)
_NO_AGENT: Final = "No available agent"
"""What Ray says while a head that has just been started gets ready."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """A job on the cluster; ``is_new`` says whether this submission started it."""

    submission_id: str
    is_new: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class JobOutcome:
    """How a job ended, and the report it left as the last JSON object of its log."""

    exit_code: int
    report: dict[str, Any] | None


class JobServer:
    """The Jobs API of one cluster."""

    def __init__(self, address: str) -> None:
        require_ray()
        self._address = address
        host, port = _host_and_port(address)
        require_listener(address, host, port, _WITHOUT_CLUSTER)
        if os.environ.get("RAY_AUTH_TOKEN"):
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        from ray.job_submission import JobSubmissionClient

        for handler in logging.getLogger("ray").handlers:
            # Not what it uploads: the last line of stderr is the reason of a failure.
            handler.setLevel(logging.ERROR)
        with self._answers():
            self._client: Any = JobSubmissionClient(address)

    @contextlib.contextmanager
    def _answers(self) -> Generator[None]:
        """Say in one sentence that the cluster gives no answer, or another one than it should."""
        from ray.exceptions import AuthenticationError
        from requests import RequestException

        try:
            yield
        except (ConnectionError, RequestException) as error:
            raise ClusterUnreachableError(
                f"a Ray cluster must answer at {self._address!r}, got {first_line(error)!r}; start it, "
                "or give its address"
            ) from error
        except AuthenticationError as error:
            raise ClusterError(
                f"the Ray cluster at {self._address!r} must accept us, got {first_line(error)!r}; "
                "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to its token"
            ) from error
        except RuntimeError as error:
            raise ClusterError(
                f"the dashboard of a Ray cluster must answer at {self._address!r}, got "
                f"{first_line(error)!r}; look into its log"
            ) from error

    def submit(self, path: Path) -> Submission:
        """Run the job of a file on the cluster; one that runs already is joined."""
        job = read_job(path)
        folder = Path.cwd()
        content = path.read_bytes()
        digest = hashlib.sha256(b"\0".join((content, os.fsencode(folder)))).hexdigest()[:12]
        name = f"cairn-{job.name}-{re.sub('[^A-Za-z0-9_-]', '-', job.subject)}-{digest}"
        before = self._statuses(name)
        for running, status in before.items():
            if status not in _OVER:
                return Submission(submission_id=running)
        submission_id = f"{name}-{len(before) + 1}"
        words = ("python", "-m", f"cairn.jobs.{job.name}", "--config", _CONFIG_NAME, "--folder", str(folder))
        with tempfile.TemporaryDirectory(prefix="cairn-submit-") as packed:
            (Path(packed) / _CONFIG_NAME).write_bytes(content)
            deadline = time.monotonic() + AGENT_SECONDS
            while True:
                try:
                    with self._answers():
                        self._client.submit_job(
                            entrypoint=shlex.join(words),
                            submission_id=submission_id,
                            runtime_env={"working_dir": packed},
                        )
                    return Submission(submission_id=submission_id, is_new=True)
                except (ClusterError, ClusterUnreachableError) as error:
                    # Another process submitted the same job, or our request arrived and its answer was lost.
                    if submission_id in self._statuses(name):
                        return Submission(submission_id=submission_id)
                    if _NO_AGENT not in str(error):
                        raise
                    if time.monotonic() >= deadline:
                        raise ClusterUnreachableError(
                            f"a machine of the cluster must be ready for jobs within {AGENT_SECONDS:.0f} "
                            "seconds, got none; try again, and if that does not help look whether another "
                            "Ray there has the port 52365, or start with --dashboard-agent-listen-port"
                        ) from error
                time.sleep(_POLL_SECONDS)

    def follow(self, submission_id: str, write: Callable[[str], object]) -> JobOutcome:
        """Write a job's log as it grows until the job is over. An interrupt leaves the job to itself."""
        log = ""
        while True:
            with self._answers():
                details = self._client.get_job_info(submission_id)
                before = log
                with contextlib.suppress(RuntimeError):  # the machine that has it may be gone
                    log = self._client.get_job_logs(submission_id)
            write(log[len(before) :])
            if details.status in _OVER:
                break
            time.sleep(_POLL_SECONDS)
        if details.status == "SUCCEEDED" or details.driver_exit_code:
            if re.search(r"No module named '?cairn\b", log):
                raise ClusterError(
                    "every machine of the cluster must have Cairn installed, got one without it; install "
                    "the same version"
                )
            code = details.driver_exit_code or 0
            return JobOutcome(
                exit_code=code if code >= 0 else 128 - code, report=_report(log)
            )  # a signal's, as a shell counts it
        reason = (details.message or "no reason").strip()
        raise ClusterError(f"job {submission_id} must run to its end, got {details.status}: {reason}")

    def _statuses(self, name: str) -> dict[str, str]:
        """Return the states of all submissions of a job, by their ids."""
        with self._answers():
            found = [details for details in self._client.list_jobs() if details.submission_id]
        own = re.compile(rf"{re.escape(name)}-\d+")
        return {each.submission_id: str(each.status) for each in found if own.fullmatch(each.submission_id)}


def _host_and_port(address: str) -> tuple[str, int]:
    parts = urlsplit(address)
    with contextlib.suppress(ValueError):  # a port that is none
        if parts.scheme in ("http", "https") and parts.hostname:
            return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    raise ConfigError(
        "the address of a cluster's jobs must be that of its dashboard, such as http://127.0.0.1:8265, "
        f"got {address!r}"
    )


def _report(log: str) -> dict[str, Any] | None:
    for line in reversed(log.splitlines()):
        with contextlib.suppress(ValueError):
            found: Any = json.loads(line)
            if isinstance(found, dict):
                return cast("dict[str, Any]", found)
    return None
