"""Which number format the encoder computes in, on this machine.

bf16 halves the cost where the processor multiplies it natively (AVX512-BF16, AMX, CUDA from compute
capability 8.0) and multiplies the cost where it does not. int8 costs less still where the processor has VNNI.
Vectors stay float32 outside the model, and the precision is no part of any fingerprint: all formats give the
same space.
"""

from __future__ import annotations

import logging
import platform
from pathlib import Path
from typing import Final

import torch
from cairn.pipeline.config import Precision

logger = logging.getLogger(__name__)

_CPU_INFO: Final = Path("/proc/cpuinfo")
_NATIVE_BF16_FLAGS: Final = frozenset({"avx512_bf16", "amx_bf16"})
_NATIVE_INT8_FLAGS: Final = frozenset({"avx512_vnni", "avx_vnni", "amx_int8"})


def has_native_bf16(device: torch.device) -> bool:
    """Say whether the device multiplies bf16 matrices natively."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and bool(_NATIVE_BF16_FLAGS & _cpu_flags())


def _cpu_flags() -> frozenset[str]:
    """Return the processor's feature flags; empty where the system does not tell."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    try:
        lines = [line for line in _CPU_INFO.read_text().splitlines() if line.startswith("flags")]
    except OSError:
        return frozenset()
    return frozenset(lines[0].partition(":")[2].split() if lines else ())


def resolve_precision(precision: Precision, device: torch.device) -> torch.dtype:
    """Return the format: ``auto``, and ``int8`` without VNNI, is bf16 where native, else fp32."""
    native = has_native_bf16(device)
    if precision == "int8":
        if device.type == "cpu" and _NATIVE_INT8_FLAGS & _cpu_flags():
            return torch.int8
        logger.warning("precision=int8 is asked of a device without VNNI: going on with precision=auto")
    if precision in ("auto", "int8"):
        return torch.bfloat16 if native else torch.float32
    if precision == "bf16":
        if not native:
            logger.warning(
                "precision=bf16 is asked of a processor without native bf16: it works, several times "
                "slower than fp32; use precision=auto"
            )
        return torch.bfloat16
    return torch.float32


def default_device() -> torch.device:
    """Return the current CUDA device when there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
