"""docker-compose.yml, the Dockerfile and .env follow the specification and our rules, and the commands run.

Each service's command runs as a process; no container runs. So these tests cannot show that the images build
and pull, or that a read-only, unprivileged container has every folder its process writes to. moto's server
stands in for SeaweedFS; it checks no key and has no latency.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import httpx2
import pytest
import yaml
from cairn.cli.main import cairn
from cairn.jobs.job import JOBS, read_job
from cairn.jobs.schedule.scheduler import read_history
from cairn.jobs.schedule.schedules import ScheduleFile
from compose_spec import PyCompose
from ray.scripts.scripts import cli as ray_cli

from tests.nightly.served import free_port

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "docker-compose.yml").read_text("utf-8")
SECRET = re.compile(r"\$\{(\w+)(:\?[^}]+)?\}")
SECONDS = 600.0
"""How long a service may take to come up, and a job to run, on a busy machine."""

PROGRAMS: dict[str, click.Group] = {"cairn": cairn, "ray": ray_cli}
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load(TEXT)["services"]
OURS = sorted(name for name, service in SERVICES.items() if service["image"].startswith("cairn:"))


@pytest.mark.parametrize("name", SERVICES)
def test_container_is_unprivileged_bounded_and_watched(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
    assert int(service["user"].split(":")[0]) > 0
    assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory", "pids"}
    assert "healthcheck" in service or service["restart"] == "on-failure"
    assert not {"privileged", "network_mode", "pid", "cap_add"} & set(service)
    repository, _, tag = service["image"].partition(":")
    assert repository
    assert re.match(r"\d+\.\d+", tag), "an image is pinned"


def test_only_the_search_api_is_published_and_to_this_machine_alone() -> None:
    assert {name: service["ports"] for name, service in SERVICES.items() if "ports" in service} == {
        "search": ["127.0.0.1:8400:8400"],
        "search-shards": ["127.0.0.1:8401:8400"],
    }
    outside = {name for name, service in SERVICES.items() if service["networks"] != ["inside"]}
    assert outside == {"search", "search-shards"}
    assert yaml.safe_load(TEXT)["networks"]["inside"] == {"internal": True}


def test_ray_services_have_the_token_memory_and_the_port_that_is_published() -> None:
    """Ray keeps objects in shared memory, of which a container has 64 MB unless it is given more."""
    PyCompose.from_json(json.dumps(yaml.safe_load(TEXT))).validate()  # anchors and merges are YAML's own
    for name in ("head", "worker", "worker-gpu", "scheduler"):
        environment = SERVICES[name]["environment"]
        assert environment["RAY_AUTH_MODE"] == "token"
        assert SECRET.match(environment["RAY_AUTH_TOKEN"])[1] == "RAY_AUTH_TOKEN"
    found = {name for name, service in SERVICES.items() if "shm_size" in service}
    assert found == {"head", "worker", "worker-gpu", "search-shards"}
    gpu, worker, shards = (SERVICES[name] for name in ("worker-gpu", "worker", "search-shards"))
    (device,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert gpu["command"].replace(" --num-gpus 1", "") == worker["command"]
    asked = parse(commands_of(shards)[-1])
    wanted = {"engine": "ray", "shards": 2, "shard_replicas": 2, "host": "0.0.0.0"}
    assert {name: asked[name] for name in wanted} == wanted
    assert shards["ports"] == [f"127.0.0.1:8401:{asked['port']}"]


def commands_of(service: dict[str, Any]) -> list[list[str]]:
    """Return the words of each command line of a service, without those of the shell."""
    words = shlex.split(service["command"])
    lines = [line.split() for line in words[2].split("&&")] if words[:2] == ["sh", "-c"] else [words]
    return [line[1:] if line[0] == "exec" else line for line in lines]


def parse(words: list[str]) -> dict[str, Any]:
    """Parse a command line as its program would; click raises for an option that there is not."""
    command: click.Command = PROGRAMS[words[0]]
    name, *rest = words
    while isinstance(command, click.Group):
        name, *rest = rest
        found = command.get_command(click.Context(command), name)
        assert found is not None, name
        command = found
    return command.make_context(name, rest).params


@pytest.mark.parametrize("name", OURS)
def test_command_lines_of_our_containers_are_taken(name: str) -> None:
    assert all(parse(words) for words in commands_of(SERVICES[name]))


def test_nothing_starts_without_the_secrets_that_the_example_names() -> None:
    used = SECRET.findall(TEXT)
    assert all(refusal for _, refusal in used), "an absent or empty secret is refused"
    assert not re.search(r"\$(?!\{)", TEXT)
    example = dict(
        line.split("=")
        for line in (ROOT / ".env.example").read_text("utf-8").splitlines()
        if line and line[0] != "#"
    )
    assert set(example) == {name for name, _ in used}
    assert set(example.values()) == {""}
    assert ".env" in (ROOT / ".gitignore").read_text("utf-8").splitlines()


def write_secrets(folder: Path) -> dict[str, str]:
    environment = {**os.environ, "PYTHON": sys.executable}
    command = ["make", "--silent", "--file", str(ROOT / "Makefile"), "secrets"]
    subprocess.run(command, cwd=folder, env=environment, check=True)
    return dict(line.split("=", 1) for line in (folder / ".env").read_text().splitlines())


def test_secrets_are_fresh_private_and_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    secrets, other = write_secrets(tmp_path), write_secrets(tmp_path / "other")
    assert set(secrets) == {name for name, _ in SECRET.findall(TEXT)}
    assert {name for name in secrets if secrets[name] == other[name]} == {"AWS_ACCESS_KEY_ID"}
    assert (tmp_path / ".env").stat().st_mode & 0o777 == 0o600
    assert write_secrets(tmp_path) == secrets


def test_image_is_made_of_what_is_there_without_secrets_and_runs_unprivileged() -> None:
    text = (ROOT / "Dockerfile").read_text("utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    copied = [words[1:-1] for line in text.splitlines() if (words := line.split()) and words[0] == "COPY"]
    sources = [word for words in copied for word in words if not word.startswith(("--", "/opt"))]
    assert sources
    assert [source for source in sources if not (ROOT / source).exists()] == []
    extras = re.search(r"'\.\[([a-z,-]+)\]'", text)
    assert extras is not None
    assert set(extras[1].split(",")) <= set(project["optional-dependencies"])
    assert (
        f"torch=={next(d for d in project['dependencies'] if d.startswith('torch')).split('==')[1]}" in text
    )
    ignored = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored
    assert [name for name in kept if not (ROOT / name).exists()] == []
    assert not {".env", ".git", "tests"} & kept
    user = re.findall(r"^USER (.+)$", text, re.MULTILINE)
    assert user == [SERVICES["head"]["user"]]
    assert all(
        re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", image)
        for image in re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    )
    assert {SERVICES[name]["image"] for name in OURS} == {f"cairn:{project['version']}"}


def test_schedules_of_the_image_submit_jobs_that_are_there() -> None:
    folder = ROOT / "jobs" / "configs" / "compose"
    schedules = ScheduleFile(folder / "cairn-schedules.toml").read()
    assert [schedule.run for schedule in schedules.values()] == [("submit", "nightly.toml")]
    for path in (folder / "nightly.toml", folder / "nightly-gpu.toml"):
        verb, *words = *JOBS[read_job(path).name], "--config", str(path)
        command = cairn.get_command(click.Context(cairn), verb)
        assert command is not None
        asked = command.make_context(verb, words, parent=click.Context(cairn)).params
        assert (asked["root"], asked["sources"]) == ("s3://cairn/indexes", ("s3://cairn/corpus",))


class Deployment:
    """The services as processes on loopback.

    Ports and paths put into their own commands, health checks and environments.
    """

    def __init__(self, folder: Path, store_url: str, secrets: dict[str, str]) -> None:
        self.folder = folder
        self.secrets = secrets
        self.ports = {port: str(free_port()) for port in ("6379", "8265", "8400")}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._agents: dict[str, str] = {}
        self._store_url = store_url
        shutil.copytree(ROOT / "jobs" / "configs" / "compose", folder / "schedules")

    def run(self, name: str) -> int:
        return self.start(name).wait(SECONDS)

    def start(self, name: str) -> subprocess.Popen[bytes]:
        self._agents.setdefault(name, str(free_port()))
        self._remove(name)
        command = [self._here(name, word) for word in shlex.split(SERVICES[name]["command"])]
        if command[:2] == ["ray", "start"]:
            command += ["--node-ip-address", "127.0.0.1"]  # else Ray takes this machine's for the containers'
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, **self._place(name)
            )
        return self.processes[name]

    def wait_until_healthy(self, name: str) -> None:
        command = [self._here(name, word) for word in SERVICES[name]["healthcheck"]["test"][1:]]
        check = partial(subprocess.run, command, capture_output=True, check=False, **self._place(name))
        self.wait_until(lambda: check().returncode == 0, name)

    def wait_until(self, condition: Callable[[], object], name: str) -> None:
        """Wait, and restart services that end meanwhile, as the engine does.

        Ray gives itself 30 seconds to start, which may be too few.
        """
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.log(name)
            for other, process in list(self.processes.items()):
                if process.poll() is not None and SERVICES[other]["restart"] == "unless-stopped":
                    self.start(other)
            time.sleep(1.0)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-4000:]

    def stop(self) -> dict[str, int]:
        """Stop everything as `docker compose down` does, and whatever is left of it for good.

        Return the exit codes.
        """
        running = {name: process for name, process in self.processes.items() if process.poll() is None}
        for process in running.values():
            process.send_signal(signal.SIGTERM)
        try:
            return {name: process.wait(SECONDS) for name, process in running.items()}
        finally:
            for name in self.processes:
                self._remove(name)

    def _remove(self, name: str) -> None:
        """Kill what is left of a service, as the engine does with a container."""
        with contextlib.suppress(KeyError, ProcessLookupError):
            os.killpg(self.processes[name].pid, signal.SIGKILL)

    def answer(self, port: str, path: str, body: Any = None, token: str | None = None) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        method, url = "GET" if body is None else "POST", f"http://127.0.0.1:{self.ports[port]}{path}"
        answer = httpx2.request(method, url, json=body, headers=headers, timeout=60)
        return answer.status_code, answer.json() if answer.is_success else {"problem": answer.text}

    def _here(self, name: str, text: str) -> str:
        text = SECRET.sub(lambda match: self.secrets[match[1]], text)
        text = text.replace("http://store:8333", self._store_url)
        text = text.replace("head:", "127.0.0.1:").replace("0.0.0.0", "127.0.0.1")
        for port, free in {**self.ports, "52365": self._agents[name]}.items():
            text = re.sub(rf"\b{port}\b", free, text)
        return text

    def _place(self, name: str) -> dict[str, Any]:
        environment = {key: self._here(name, value) for key, value in SERVICES[name]["environment"].items()}
        image = {
            "CAIRN_CACHE": str(self.folder / f"{name}-cache"),
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "TOKENIZERS_PARALLELISM": "false",
        }
        machine = {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT / "pipeline/face"),
            "HOME": str(self.folder),
            "RAY_TMPDIR": str(self.folder),
            "OMP_NUM_THREADS": "1",
            "NO_PROXY": "127.0.0.1",
            "CAIRN_SAMPLE_MAX_DOCUMENTS": "30",
        }
        place = SERVICES[name].get("working_dir", "")
        place = place.replace("/srv/cairn/schedules", str(self.folder / "schedules"))
        return {"env": {**image, **machine, **environment}, "cwd": place or str(self.folder)}


@pytest.fixture
def deployment(object_store: Any, tmp_path: Path) -> Iterator[Deployment]:
    folder = Path(
        tempfile.mkdtemp(prefix="cairn-")
    )  # Ray's sockets lie below it, and a socket's path must be short
    made = Deployment(folder, object_store.url, write_secrets(tmp_path))
    try:
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_services_run_by_their_own_commands_ingest_at_their_time_and_answer(deployment: Deployment) -> None:
    assert deployment.run("corpus") == 0, deployment.log("corpus")
    deployment.start("head")
    deployment.wait_until_healthy("head")
    token = deployment.secrets["RAY_AUTH_TOKEN"]
    assert [deployment.answer("8265", "/api/jobs/", token=given)[0] for given in (None, token)] == [401, 200]
    deployment.start("worker")
    deployment.wait_until_healthy("worker")
    for name in ("scheduler", "search"):
        deployment.start(name)
        deployment.wait_until_healthy(name)

    history = deployment.folder / "schedules" / "cairn-schedules-history.jsonl"
    deployment.wait_until(lambda: read_history(history), "scheduler")
    runs = read_history(history)
    found = (runs[0].exit_code, runs[0].counts.get("indexed"), runs[0].counts.get("generation"))
    assert found == (0, 30, 1), runs

    path = "/v1/collections/python-docs/search"
    question = {"query": "how do I use a special method", "top_k": 3}
    assert deployment.answer("8400", path, question)[0] == 401
    key, answers = deployment.secrets["CAIRN_API_KEY"], list[tuple[int, Any]]()

    def is_answered() -> bool:
        answers.append(deployment.answer("8400", path, question, key))
        return answers[-1][0] not in (404, 503)  # not followed yet; busy reading the model

    deployment.wait_until(is_answered, "search")
    status, found = answers[-1]
    assert (status, found.get("generation"), len(found.get("hits", ()))) == (200, 1, 3), found
    codes = deployment.stop()
    assert set(codes) == {"head", "worker", "scheduler", "search"}
    deployment.processes.clear()
    deployment.start("search-shards")
    deployment.wait_until_healthy("search-shards")
    deployment.wait_until(is_answered, "search-shards")
    assert answers[-1] == (200, found), "shards answer as one process does"
    assert codes["scheduler"] == 0
