"""The manifest for KubeRay: Ray Serve takes its configuration, and the application its options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from cairn.jobs.ray_serve.ingress import build
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.serve.keys import KeyFile
from ray.serve.schema import ServeDeploySchema

ROOT = Path(__file__).resolve().parents[3]
MANIFEST: dict[str, Any] = yaml.safe_load((ROOT / "jobs/configs/kuberay/search.yaml").read_text("utf-8"))
SERVE = ServeDeploySchema.model_validate(yaml.safe_load(MANIFEST["spec"]["serveConfigV2"]))
[APPLICATION] = SERVE.applications
CLUSTER = MANIFEST["spec"]["rayClusterConfig"]
PODS = [CLUSTER["headGroupSpec"]["template"], *(each["template"] for each in CLUSTER["workerGroupSpecs"])]


def test_application_is_built_from_its_arguments_and_needs_a_key(tmp_path: Path) -> None:
    assert APPLICATION.import_path == f"{build.__module__}:{build.__name__}"
    keys = KeyFile(tmp_path / "keys.json")
    arguments = {**APPLICATION.args, "root": str(tmp_path), "keys_file": str(keys.path)}
    with pytest.raises(ConfigError, match="no API key"):
        build(arguments)
    keys.create("search")
    assert build(arguments)._bound_deployment.name == "ingress"


def test_arguments_that_are_no_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="got 'shard'"):
        build({"root": str(tmp_path), "shard": 2})
    with pytest.raises(ConfigError, match="must name the root"):
        build({"shards": 2})
    with pytest.raises(ConfigError, match="shards must be"):
        build({"root": str(tmp_path), "shards": 0})


def test_every_pod_has_the_keys_and_the_port() -> None:
    assert CLUSTER["authOptions"] == {"mode": "token"}
    for pod in PODS:
        [container] = pod["spec"]["containers"]
        assert SERVE.http_options.port in [port["containerPort"] for port in container["ports"]]
        mounts = {each["name"]: Path(each["mountPath"]) for each in container["volumeMounts"]}
        assert mounts["keys"] == Path(APPLICATION.args["keys_file"]).parent
        assert {each["name"] for each in pod["spec"]["volumes"]} == set(mounts)
        assert pod["spec"]["securityContext"]["runAsUser"] == 10001
