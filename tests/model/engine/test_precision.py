from __future__ import annotations

import logging

import pytest
import torch
from cairn.pipeline.model.engine import precision
from cairn.pipeline.model.engine.precision import resolve_precision

CPU = torch.device("cpu")


@pytest.fixture
def cpu_info(tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    monkeypatch.setattr(precision, "_CPU_INFO", path)
    monkeypatch.setattr(precision.platform, "machine", lambda: "x86_64")
    return path


@pytest.mark.parametrize(
    ("precision", "flags", "expected"),
    [
        ("auto", "fpu avx2 avx512_bf16 sse", torch.bfloat16),
        ("auto", "fpu avx2 amx_bf16 sse", torch.bfloat16),
        ("auto", "fpu avx2 avx512f", torch.float32),
        ("auto", None, torch.float32),
        ("fp32", "avx512_bf16", torch.float32),
    ],
)
def test_resolve_follows_the_setting_and_what_the_system_tells(cpu_info, precision, flags, expected):
    if flags is not None:
        cpu_info.write_text(f"processor : 0\nflags\t\t: {flags}\n")
    assert resolve_precision(precision, CPU) == expected


def test_resolve_bf16_on_a_cpu_without_it_warns_and_obeys(cpu_info, caplog):
    cpu_info.write_text("flags\t\t: fpu avx2\n")
    with caplog.at_level(logging.WARNING):
        resolved = resolve_precision("bf16", CPU)
    assert (resolved, len(caplog.records)) == (torch.bfloat16, 1)
