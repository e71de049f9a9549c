"""The GPU benchmark is a script, run by hand where a card is; here it shows on a CPU that it still runs."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def script():
    return runpy.run_path(str(Path(__file__).with_name("bench_gpu.py")), run_name="bench_gpu")


@pytest.mark.slow
def test_gpu_script_small_on_a_cpu_writes_its_report(script, tmp_path):
    script["main"](["--device", "cpu", "--small", "--output", str(tmp_path / "gpu.json")])
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["checks"]["least_cosine_to_cpu_fp32"] >= 0.999
    assert report["faiss"]["ivf_sq8 cpu"]["built_seconds"] > 0
    assert set(report["by_row_length"]) == {"64", "256"}
    assert all(value > 0 for row in report["by_row_length"].values() for value in row.values())


def test_gpu_script_flops_are_those_of_modernbert_base(script):
    assert [round(script["BASE"].flops_a_token(length) / 1e6) for length in (512, 8_192)] == [239, 427]
