"""The GPU benchmark is a script, run by hand where a card is; here it shows on a CPU that it still runs."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(Path(__file__).with_name("bench_gpu.py")), run_name="bench_gpu")


@pytest.mark.slow
def test_gpu_script_small_on_a_cpu_writes_its_report(script, tmp_path):
    path = tmp_path / "gpu.json"
    assert script["main"](["--device", "cpu", "--small", "--output", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["check of vectors"]["least_cosine_to_cpu_fp32"] >= 0.999
    assert report["faiss ivf_sq8"]["cpu"]["built_seconds"] > 0
    assert all(value > 0 for length in (64, 256) for value in report[f"encode {length}"].values())
    assert report["train"]["eq. 5 against plain"] > 0
    assert "left out" in report["faiss on the card"]


def test_part_that_fails_leaves_the_others_their_figures(script, tmp_path):
    path = tmp_path / "gpu.json"
    report = script["Report"](path, torch.device("cpu"))
    report.add("a", lambda: 1 / 0)
    report.add("b", lambda: 2)
    assert report.failed == ["a"]
    assert json.loads(path.read_text())["a"] == {"failed": "ZeroDivisionError: division by zero"}
    assert json.loads(path.read_text())["b"] == 2


def test_gpu_script_flops_are_those_of_modernbert_base(script):
    assert [round(script["BASE"].flops_a_token(length) / 1e6) for length in (512, 8_192)] == [239, 427]
