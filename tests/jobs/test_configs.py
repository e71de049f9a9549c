"""The ready-to-paste files of jobs/configs: they parse, fit each other, and run commands that exist.

Every pod of Kubernetes has no root, no privileges and nothing of the host, and the image of this version.
"""

from __future__ import annotations

import configparser
import os
import shlex
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import cairn as library
import click
import pytest
import yaml
from cairn.cli.main import cairn
from cairn.jobs.ray_serve.ingress import build
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.serve.keys import KeyFile
from cairn.pipeline.serve.middleware import OPEN_PATHS
from cronsim import CronSim
from ray.serve.schema import ServeDeploySchema

CONFIGS = Path(__file__).resolve().parents[2] / "jobs" / "configs"
FOLDER, BASE = CONFIGS / "schedules", CONFIGS / "kustomize"


def parse(verb: str, words: list[str]) -> dict[str, Any]:
    """Parse a command line as the verb would; click raises for a flag that there is not."""
    command = cairn.get_command(click.Context(cairn), verb)
    assert command is not None
    return command.make_context(verb, words).params


def parse_ingest(words: list[str]) -> dict[str, Any]:
    assert Path(words[0]).name == "ingest"
    return parse("ingest", words[1:])


def exit_code(script: str, ingest_exit_code: int, folder: Path) -> int:
    """Run a shell script whose ``ingest`` only exits."""
    (folder / "ingest").write_text(f"#!/bin/sh\nexit {ingest_exit_code}\n")
    (folder / "ingest").chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(["/bin/sh", "-c", script], env=environment, check=False).returncode


def require_exit_codes(script: str, folder: Path, codes: tuple[int, ...] = (0, 1, 2, 3, 75)) -> None:
    """Quarantined rows are no failure; any other exit code is handed on."""
    assert [exit_code(script, code, folder) for code in codes] == [0 if code == 3 else code for code in codes]


def require_times(schedule: dict[str, Any]) -> None:
    assert next(CronSim(schedule["schedule"], datetime.now(UTC)))
    assert ZoneInfo(schedule["timeZone"])


def unit(name: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string((FOLDER / name).read_text("utf-8"))
    return parser


def test_systemd_service_runs_an_ingest_tries_again_on_75_and_its_timer_makes_up_for_missed_runs() -> None:
    service = unit("cairn-ingest.service")["Service"]
    assert parse_ingest(shlex.split(service["ExecStart"]))["sync"] is True
    assert (service["SuccessExitStatus"], service["RestartForceExitStatus"]) == ("3", "75")
    assert unit("cairn-ingest.timer")["Timer"]["Persistent"] == "true"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_units_pass_systemds_own_check(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "cairn-ingest.timer", tmp_path)
    # systemd looks for the program, which stands elsewhere on the machine the file is for.
    service = (
        (FOLDER / "cairn-ingest.service")
        .read_text("utf-8")
        .replace("/srv/cairn/.venv/bin/ingest", "/bin/true")
    )
    (tmp_path / "cairn-ingest.service").write_text(service)
    units = [str(tmp_path / f"cairn-ingest.{kind}") for kind in ("service", "timer")]
    checked = subprocess.run(
        ["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, [line for line in checked.stderr.splitlines() if "cairn-ingest" in line]) == (
        0,
        [],
    )


def test_kubernetes_cronjob_runs_one_ingest_at_a_time_and_tries_75_again(tmp_path: Path) -> None:
    job = yaml.safe_load((FOLDER / "cronjob.yaml").read_text("utf-8"))
    spec = job["spec"]
    assert (job["apiVersion"], job["kind"], spec["concurrencyPolicy"]) == ("batch/v1", "CronJob", "Forbid")
    require_times(spec)
    job = spec["jobTemplate"]["spec"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    (script,) = container["args"]
    assert parse_ingest(shlex.split(script.splitlines()[0]))["root"] == "/data"
    require_exit_codes(script, tmp_path)
    rules = {rule["action"]: rule["onExitCodes"] for rule in job["podFailurePolicy"]["rules"]}
    assert {action: rule["values"] for action, rule in rules.items()} == {"Ignore": [75], "FailJob": [2]}
    assert {rule["containerName"] for rule in rules.values()} == {"ingest"}
    assert pod["restartPolicy"] == "Never"  # what a policy by exit code requires


def test_ray_jobs_run_an_ingest_that_may_quarantine_rows_and_try_75_again(tmp_path: Path) -> None:
    job, cron = (
        yaml.safe_load((FOLDER / name).read_text("utf-8")) for name in ("rayjob.yaml", "raycronjob.yaml")
    )
    entrypoint = job["spec"]["entrypoint"]
    words = shlex.split(entrypoint.splitlines()[1])
    assert parse_ingest(words)["root"] == "s3://indexes"
    require_exit_codes(entrypoint, tmp_path, (0, 1, 2, 3))
    waited = tmp_path / "waited"
    (tmp_path / "sleep").write_text(
        f'#!/bin/sh\necho "$1" >> {waited}\nsed -i "s/exit .*/exit 3/" {tmp_path}/ingest\n'
    )
    (tmp_path / "sleep").chmod(0o755)
    assert (exit_code(entrypoint, 75, tmp_path), waited.read_text()) == (0, "60\n")
    assert (cron["apiVersion"], cron["kind"]) == ("ray.io/v1", "RayCronJob")
    assert set(cron["spec"]) == {"schedule", "timeZone", "jobTemplate"}
    assert cron["spec"]["jobTemplate"] == job["spec"]
    require_times(cron["spec"])


def test_airflow_dag_runs_one_ingest_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, dict[str, Any]] = {}

    class Recorded:
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            made[self.__class__.__name__] = {"arguments": arguments, **settings}

        def __enter__(self) -> None: ...
        def __exit__(self, *error: object) -> None: ...

    for module, name in (
        ("airflow.sdk", "DAG"),
        ("airflow.providers.standard.operators.bash", "BashOperator"),
        ("airflow.timetables.trigger", "CronTriggerTimetable"),
    ):
        stub = types.ModuleType(module)
        setattr(stub, name, type(name, (Recorded,), {}))
        monkeypatch.setitem(sys.modules, module, stub)
    exec(compile((FOLDER / "airflow_nightly.py").read_text("utf-8"), "airflow_nightly.py", "exec"), {})
    assert (made["DAG"]["max_active_runs"], made["DAG"]["catchup"]) == (1, False)
    assert next(CronSim(made["CronTriggerTimetable"]["arguments"][0], datetime.now(UTC)))
    command = made["BashOperator"]["bash_command"]
    assert parse_ingest(shlex.split(command.split(";")[0]))["sync"] is True
    require_exit_codes(command, tmp_path)


def resources_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the resources of a base and of the bases it takes, as ``kubectl apply --kustomize`` does."""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text("utf-8"))
    assert kustomization["kind"] == "Kustomization"
    for name in kustomization["resources"]:
        path = folder / name
        if path.is_dir():
            yield from resources_of(path)
        else:
            assert path.parent == folder, "kustomize reads no single file beside a base"
            yield from yaml.safe_load_all(path.read_text("utf-8"))


RESOURCES = list(resources_of(BASE))


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [resource for resource in RESOURCES if resource["kind"] == kind]


[DEPLOYMENT], [SERVICE], [CRON_JOB] = map(of_kind, ("Deployment", "Service", "CronJob"))
POD = DEPLOYMENT["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]


def test_server_of_kustomize_takes_its_command_line_in_the_image_of_this_version() -> None:
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text("utf-8"))
    assert kustomization["images"] == [{"name": "cairn", "newTag": library.__version__}]
    program, verb, *arguments = CONTAINER["command"]
    assert program == "cairn"
    options = parse(verb, arguments)
    assert options["port"] == CONTAINER["ports"][0]["containerPort"]
    mounts = {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert {str(options["root"]), str(Path(options["keys_file"]).parent)} <= mounts


def test_server_and_ingest_share_the_collections() -> None:
    job = CRON_JOB["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    claims = [
        {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in pod["volumes"]
            if "persistentVolumeClaim" in volume
        }
        for pod in (POD, job)
    ]
    assert claims == [{"cairn-data"}, {"cairn-data", "articles"}]
    assert {claim["metadata"]["name"] for claim in of_kind("PersistentVolumeClaim")} == claims[1]
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == {each["name"] for each in POD["volumes"]}


def test_service_leads_to_the_server() -> None:
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert SERVICE["spec"]["selector"] == labels == DEPLOYMENT["spec"]["selector"]["matchLabels"]
    names = {port["name"] for port in CONTAINER["ports"]}
    assert {port["targetPort"] for port in SERVICE["spec"]["ports"]} <= names
    for probe in ("readinessProbe", "livenessProbe"):
        assert CONTAINER[probe]["httpGet"]["path"] in OPEN_PATHS
        assert CONTAINER[probe]["httpGet"]["port"] in names


MANIFEST: dict[str, Any] = yaml.safe_load((CONFIGS / "kuberay/search.yaml").read_text("utf-8"))
SERVE = ServeDeploySchema.model_validate(yaml.safe_load(MANIFEST["spec"]["serveConfigV2"]))
[APPLICATION] = SERVE.applications
CLUSTER = MANIFEST["spec"]["rayClusterConfig"]
RAY_PODS = [CLUSTER["headGroupSpec"]["template"], *(each["template"] for each in CLUSTER["workerGroupSpecs"])]


def test_application_of_kuberay_is_built_from_its_arguments_and_needs_a_key(tmp_path: Path) -> None:
    assert APPLICATION.import_path == f"{build.__module__}:{build.__name__}"
    keys = KeyFile(tmp_path / "keys.json")
    arguments = {**APPLICATION.args, "root": str(tmp_path), "keys_file": str(keys.path)}
    with pytest.raises(ConfigError, match="no API key"):
        build(arguments)
    keys.create("search")
    assert build(arguments)._bound_deployment.name == "ingress"


def test_arguments_of_kuberay_that_are_no_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got 'shard'"):
        build({"root": str(tmp_path), "shard": 2})
    with pytest.raises(ConfigError, match="must name the root"):
        build({"shards": 2})
    with pytest.raises(ConfigError, match="shards must be"):
        build({"root": str(tmp_path), "shards": 0})


def test_every_pod_of_kuberay_has_the_keys_and_the_port() -> None:
    assert CLUSTER["authOptions"] == {"mode": "token"}
    for pod in RAY_PODS:
        [container] = pod["spec"]["containers"]
        assert SERVE.http_options.port in [port["containerPort"] for port in container["ports"]]
        mounts = {each["name"]: Path(each["mountPath"]) for each in container["volumeMounts"]}
        assert mounts["keys"] == Path(APPLICATION.args["keys_file"]).parent
        assert {each["name"] for each in pod["spec"]["volumes"]} == set(mounts)
        assert pod["spec"]["securityContext"]["runAsUser"] == 10001


def pods_of(node: Any) -> Iterator[dict[str, Any]]:
    """Yield what holds containers, however deep it stands."""
    if isinstance(node, dict) and "containers" in node:
        yield node
    children = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    for child in children:
        yield from pods_of(child)


PODS = [
    pytest.param(pod, id=f"{path.name}-{number}")
    for path in sorted(CONFIGS.rglob("*.yaml"))
    for number, pod in enumerate(pods_of(list(yaml.safe_load_all(path.read_text("utf-8")))))
]


def test_every_kind_of_manifest_has_pods() -> None:
    found = {str(each.id).rpartition("-")[0] for each in PODS}
    assert found == {"search.yaml", "serve.yaml", "cronjob.yaml", "rayjob.yaml", "raycronjob.yaml"}


@pytest.mark.parametrize("pod", PODS)
def test_pod_is_unprivileged_and_read_only(pod: dict[str, Any]) -> None:
    own = pod["securityContext"]
    assert (own["runAsNonRoot"], own["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
    assert own["runAsUser"] > 0
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    assert not [volume for volume in pod["volumes"] if "hostPath" in volume]
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert "memory" in container["resources"]["limits"]
        assert container["image"] == f"cairn:{library.__version__}"
