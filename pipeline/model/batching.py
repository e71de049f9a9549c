"""Rows of unequal length into batches that waste little and fit the memory.

Rows are taken longest first, ties by index, and a batch holds as many as keep ``rows x longest`` within the budget: neighbours are nearly
equally long, so almost nothing is padded, and a batch too large for the device shows at once. Used by both stages. Results are scattered
back by row index, so the order of work never shows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import numpy as np
import torch
from jaxtyping import Int64

from pipeline.errors import ModelError

logger = logging.getLogger(__name__)

Done = TypeVar("Done")

CUDA_BATCH_FACTOR: Final = 64
"""A GPU is given this many times the tokens of a CPU's batch: below some tens of thousands it waits for launches."""


def run_in_batches(
    lengths_R: Int64[np.ndarray, " R"],
    batch_tokens: int,
    run: Callable[[Int64[np.ndarray, " B"]], Done],
    device: torch.device,
    *,
    extra_tokens: int = 0,
) -> Iterator[Done]:
    """Call ``run`` with the row indices of each batch, longest rows first, and yield what it returns.

    ``extra_tokens`` come on top of each row.
    A row longer than the budget is a batch of its own. On a CPU batches run side by side, one a thread; on a GPU one after the other, and
    when its memory runs out the batch is halved, now and for the rest.
    """
    order = np.argsort(-lengths_R, kind="stable")
    if device.type == "cpu":
        return _run_side_by_side(_batches(order, lengths_R, batch_tokens, extra_tokens), run)
    return _run_one_by_one(order, lengths_R, batch_tokens * CUDA_BATCH_FACTOR, extra_tokens, run)


def _batches(
    order: Int64[np.ndarray, " R"], lengths_R: Int64[np.ndarray, " R"], batch_tokens: int, extra_tokens: int
) -> list[Int64[np.ndarray, " _"]]:
    batches: list[Int64[np.ndarray, " _"]] = []
    done = 0
    while done < len(order):
        longest = int(lengths_R[order[done]]) + extra_tokens
        batches.append(order[done : done + max(1, batch_tokens // max(1, longest))])
        done += len(batches[-1])
    return batches


def _run_side_by_side(batches: Sequence[Int64[np.ndarray, " _"]], run: Callable[[Int64[np.ndarray, " B"]], Done]) -> Iterator[Done]:
    # Two threads that share one product wait for each other at its end: with a busy neighbour on the machine that made them five to ten
    # times slower, while threads with a batch each lost nothing.
    num_workers = min(torch.get_num_threads(), len(batches))
    if num_workers <= 1:
        yield from map(run, batches)
        return
    with ThreadPoolExecutor(num_workers, thread_name_prefix="encode", initializer=torch.set_num_threads, initargs=(1,)) as workers:
        yield from workers.map(run, batches)


def _run_one_by_one(
    order: Int64[np.ndarray, " R"],
    lengths_R: Int64[np.ndarray, " R"],
    batch_tokens: int,
    extra_tokens: int,
    run: Callable[[Int64[np.ndarray, " B"]], Done],
) -> Iterator[Done]:
    done = 0
    while done < len(order):
        longest = int(lengths_R[order[done]]) + extra_tokens
        rows = order[done : done + max(1, batch_tokens // max(1, longest))]
        try:
            outcome = run(rows)
        except torch.OutOfMemoryError:
            if len(rows) == 1:
                raise ModelError(
                    f"one row must fit the device's memory, got {longest} tokens that do not; choose a smaller window or less context"
                ) from None
            batch_tokens = len(rows) // 2 * longest
        else:
            done += len(rows)
            yield outcome
            continue
        logger.warning("the device ran out of memory: going on with batch_tokens=%d", batch_tokens)
        # Outside the handler: the traceback no longer keeps the failed batch's tensors alive.
        torch.cuda.empty_cache()
