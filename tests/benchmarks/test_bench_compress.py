"""What a product costs whose weight is kept in few bits, by processor time, against a packed bf16 weight."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cairn.pipeline.lab.compress.rounding import rounded_to_nearest
from cairn.pipeline.model.engine.in_place import project
from cairn.pipeline.model.engine.weights import Linear, QuantizedLinear
from cairn.pipeline.model.engine.workspace import Workspace

ROWS, COLUMNS, REPEATS = 1_536, 384, 20


def fastest_ms(run: Callable[[], Any]) -> float:
    run()
    found: list[float] = []
    for _ in range(REPEATS):
        started = time.process_time()
        run()
        found.append(time.process_time() - started)
    return 1e3 * min(found)


@pytest.mark.bench
@pytest.mark.parametrize("num_tokens", [16, 512, 4_096])
@torch.inference_mode()
def test_bench_products_of_quantised_weights(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_tokens, COLUMNS, generator=generator).bfloat16()
    weight, bias = torch.randn(ROWS, COLUMNS, generator=generator), torch.zeros(ROWS, dtype=torch.bfloat16)
    workspace = Workspace(torch.device("cpu"))
    packed = Linear(weight=weight.bfloat16(), bias=bias).packed()
    plain = fastest_ms(lambda: project(packed, x, workspace, "inner"))
    print(f"\n{num_tokens} tokens: packed bf16 {plain:.3f} ms")
    for kind, group_size in (("int8", COLUMNS), ("int4", 64), ("fp8", COLUMNS)):
        matrix = rounded_to_nearest(weight, kind, group_size)
        quantized = QuantizedLinear(matrix=matrix, dtype=torch.bfloat16, bias=bias)
        took = fastest_ms(lambda linear=quantized: project(linear, x, workspace, "inner"))
        print(f"  {kind}: {took / plain:.2f} x, {matrix.nbytes / (2 * weight.numel()):.3f} x the memory")
    codes = rounded_to_nearest(weight, "int8", COLUMNS).codes
    scales = torch.ones(ROWS, dtype=torch.bfloat16)
    took = fastest_ms(lambda: torch.ops.aten._weight_int8pack_mm(x, codes, scales))
    print(f"  torch's own product of int8 weights: {took / plain:.2f} x")
    fours = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int() & 15, 2)
    scales = torch.ones(COLUMNS // 64, ROWS, 2, dtype=torch.bfloat16)
    took = fastest_ms(lambda: torch.ops.aten._weight_int4pack_mm_for_cpu(x, fours, 64, scales))
    print(f"  torch's own product of int4 weights: {took / plain:.2f} x")
