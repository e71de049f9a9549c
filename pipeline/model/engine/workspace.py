"""Memory of a forward pass, kept between passes.

On a CPU a batch's intermediate results are megabytes that the allocator would map and unmap at every layer,
and touching fresh pages costs about a seventh of the whole time. So each thread keeps one buffer a purpose,
as large as its largest batch needed.
"""

from __future__ import annotations

import math
import threading

import torch


class Workspace(threading.local):
    """Buffers by purpose.

    What one ``take`` returned is overwritten by the next of the same purpose in the same thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def take(self, purpose: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory of a shape."""
        size = math.prod(shape)
        buffer = self._buffers.get((purpose, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=dtype, device=self._device)
            self._buffers[purpose, dtype] = buffer
        return buffer[:size].view(shape)
