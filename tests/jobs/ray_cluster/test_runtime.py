from __future__ import annotations

from pathlib import Path

import pytest
from cairn.jobs.ray_cluster import runtime as ray_runtime
from cairn.jobs.ray_cluster.runtime import STARTS, start_ray
from cairn.pipeline.errors import ClusterError


def python_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *lines: str) -> Path:
    """Put a program in the place of Python, which notes each start in the file that is returned."""
    starts, program = tmp_path / "starts", tmp_path / "python"
    program.write_text("\n".join(["#!/bin/sh", f"echo start >> {starts}", *lines]))
    program.chmod(0o755)
    monkeypatch.setattr(ray_runtime.sys, "executable", str(program))
    return starts


def test_ray_that_does_not_start_is_tried_again_and_then_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = python_that(tmp_path, monkeypatch, "echo 'Exception: timed out' >&2", "exit 1")
    with pytest.raises(
        ClusterError, match="Ray must start on this machine, got 'Exception: timed out'; use engine local"
    ):
        start_ray()
    assert len(starts.read_text().split()) == STARTS


def test_ray_that_starts_late_gives_its_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = python_that(
        tmp_path,
        monkeypatch,
        f"[ $(wc -l < {tmp_path}/starts) -gt 1 ] || exit 1",
        "echo here:1",
        "cat > /dev/null",
    )
    keeper, address = start_ray()
    keeper.communicate(timeout=300)
    assert (address, keeper.returncode, len(starts.read_text().split())) == ("here:1", 0, 2)
