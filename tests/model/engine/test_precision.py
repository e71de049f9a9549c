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


@pytest.mark.parametrize("flag", ["avx512_bf16", "amx_bf16"])
def test_resolve_auto_on_a_cpu_with_native_bf16_is_bf16(cpu_info, flag):
    cpu_info.write_text(f"processor : 0\nflags\t\t: fpu avx2 {flag} sse\n")
    assert resolve_precision("auto", CPU) == torch.bfloat16


def test_resolve_auto_on_a_cpu_without_native_bf16_is_fp32(cpu_info):
    cpu_info.write_text("processor : 0\nflags\t\t: fpu avx2 avx512f\n")
    assert resolve_precision("auto", CPU) == torch.float32


def test_resolve_auto_where_the_system_does_not_tell_is_fp32(cpu_info):
    assert resolve_precision("auto", CPU) == torch.float32


def test_resolve_bf16_on_a_cpu_without_it_warns_and_obeys(cpu_info, caplog):
    cpu_info.write_text("flags\t\t: fpu avx2\n")
    with caplog.at_level(logging.WARNING):
        resolved = resolve_precision("bf16", CPU)
    assert (resolved, len(caplog.records)) == (torch.bfloat16, 1)


def test_resolve_fp32_on_a_cpu_with_native_bf16_is_fp32(cpu_info):
    cpu_info.write_text("flags\t\t: avx512_bf16\n")
    assert resolve_precision("fp32", CPU) == torch.float32
