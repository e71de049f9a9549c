"""The kustomize base: its resources are there, fit each other, and run commands that exist."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml
from cairn.cli.main import cairn
from cairn.pipeline.serve.middleware import OPEN_PATHS

ROOT = Path(__file__).parents[2]
BASE = ROOT / "jobs/configs/kustomize"


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


def test_server_takes_its_command_line() -> None:
    program, verb, *arguments = CONTAINER["command"]
    assert program == "cairn"
    command = cairn.get_command(click.Context(cairn), verb)
    assert command is not None
    options = command.make_context(verb, arguments).params
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
