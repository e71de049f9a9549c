"""The ready-to-paste files of jobs/configs/schedules: they parse, and the command lines in them are ours."""

import configparser
import os
import shlex
import shutil
import subprocess
import sys
import types
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import yaml
from cairn.cli.main import cairn
from cronsim import CronSim

FOLDER = Path(__file__).resolve().parents[2] / "jobs" / "configs" / "schedules"


def parse_ingest(words: list[str]) -> dict[str, Any]:
    """Parse a command line as the verb would; click raises for a flag that there is not."""
    assert Path(words[0]).name == "ingest"
    verb = cairn.get_command(None, "ingest")  # type: ignore[arg-type]
    assert verb is not None
    return verb.make_context("ingest", words[1:]).params


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
