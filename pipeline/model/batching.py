"""Rows of unequal length into batches that waste little and fit the memory.

Rows are taken longest first, ties by index, and a batch holds as many as keep ``rows x longest`` within the budget: neighbours are nearly
equally long, so almost nothing is padded, and a batch too large for the device shows at once. Used by both stages. Results are scattered
back by row index, so the order of work never shows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import numpy as np
import torch
from jaxtyping import Int64

from pipeline.errors import ModelError

logger = logging.getLogger(__name__)

CUDA_BATCH_FACTOR: Final = 64
"""A GPU is given this many times the tokens of a CPU's batch: below some tens of thousands it waits for launches."""


def device_batch_tokens(batch_tokens: int, device: torch.device) -> int:
    """Return the budget of one batch on a device."""
    return batch_tokens * CUDA_BATCH_FACTOR if device.type == "cuda" else batch_tokens


def run_in_batches(
    lengths_R: Int64[np.ndarray, " R"], batch_tokens: int, run: Callable[[Int64[np.ndarray, " B"]], None], *, extra_tokens: int = 0
) -> None:
    """Call ``run`` with the row indices of each batch, longest rows first; ``extra_tokens`` come on top of every row's length.

    A row longer than the budget is a batch of its own. When the device runs out of memory the batch is halved, now and for the rest.
    """
    order = np.argsort(-lengths_R, kind="stable")
    done = 0
    while done < len(order):
        longest = int(lengths_R[order[done]]) + extra_tokens
        rows = order[done : done + max(1, batch_tokens // max(1, longest))]
        if _fits(run, rows):
            done += len(rows)
            continue
        if len(rows) == 1:
            raise ModelError(
                f"one row must fit the device's memory, got {longest} tokens that do not; choose a smaller window or less context"
            )
        batch_tokens = len(rows) // 2 * longest
        logger.warning("the device ran out of memory: going on with batch_tokens=%d", batch_tokens)
        # Outside the handler: the traceback no longer keeps the failed batch's tensors alive.
        torch.cuda.empty_cache()


def _fits(run: Callable[[Int64[np.ndarray, " B"]], None], rows: Int64[np.ndarray, " B"]) -> bool:
    try:
        run(rows)
    except torch.OutOfMemoryError:
        return False
    return True
