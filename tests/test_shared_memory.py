"""Ray keeps objects in shared memory, of which a container has 64 MB unless it is given more."""

from __future__ import annotations

from pathlib import Path

import yaml

COMPOSE = Path(__file__).parents[1] / "docker-compose.yml"


def test_ray_services_have_shared_memory_of_their_own() -> None:
    services = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    assert {name for name, service in services.items() if "shm_size" in service} == {
        "head",
        "worker",
        "worker-gpu",
        "search-shards",
    }
