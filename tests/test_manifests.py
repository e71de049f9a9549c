"""The policy that all pods of our Kubernetes manifests keep: no root, no privileges, nothing of the host.

And the image of this version.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cairn
import pytest
import yaml

CONFIGS = Path(__file__).parents[1] / "jobs" / "configs"


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
        assert container["image"] == f"cairn:{cairn.__version__}"


def test_kustomize_gives_pods_the_image_of_this_version() -> None:
    kustomization = yaml.safe_load((CONFIGS / "kustomize/kustomization.yaml").read_text("utf-8"))
    assert kustomization["images"] == [{"name": "cairn", "newTag": cairn.__version__}]
