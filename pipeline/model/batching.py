"""Rows of unequal length into batches that waste little and fit the memory.

Rows are taken longest first, ties by index, and a batch holds as many as keep ``rows x longest`` within the
budget: neighbours are nearly equally long, so almost nothing is padded, and a batch too large for the device
shows at once. Used by both stages. Results are scattered back by row index, so the order of work never shows.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Final, TypeVar

import numpy as np
import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.types import BETWEEN_BATCHES
from jaxtyping import Int64

# OpenMP's threads do not outlive a fork: a child that asked for several would wait for them for ever.
os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))

logger = logging.getLogger(__name__)

Done = TypeVar("Done")

CUDA_BATCH_FACTOR: Final = 64
"""A GPU is given this many times the tokens of a CPU's batch.

Below some tens of thousands it waits for launches.
"""


def run_in_batches(
    lengths_R: Int64[np.ndarray, " R"],
    batch_tokens: int,
    run: Callable[[Int64[np.ndarray, " B"]], Done],
    device: torch.device,
    *,
    extra_tokens: int = 0,
) -> Iterator[Done]:
    """Call ``run`` with the row indices of each batch, longest rows first, and yield what it returns.

    ``extra_tokens`` come on top of each row. A row larger than the budget is a batch of its own. On a CPU
    batches run side by side, one a thread; on a GPU one after the other, and when its memory runs out the
    batch is halved, now and for the rest. What :data:`BETWEEN_BATCHES` raises ends it.
    """
    check = BETWEEN_BATCHES.get(None)
    done = _in_batches(lengths_R + extra_tokens, batch_tokens, run, device)
    return done if check is None else _checked(done, check)


def _checked(batches: Iterator[Done], check: Callable[[], None]) -> Iterator[Done]:
    for done in batches:
        yield done
        check()


def _in_batches(
    sizes_R: Int64[np.ndarray, " R"],
    batch_tokens: int,
    run: Callable[[Int64[np.ndarray, " B"]], Done],
    device: torch.device,
) -> Iterator[Done]:
    if not len(sizes_R):
        return iter(())
    order = np.argsort(-sizes_R, kind="stable")
    if device.type != "cpu":
        return _run_one_by_one(order, sizes_R, batch_tokens * CUDA_BATCH_FACTOR, run)
    batches: list[Int64[np.ndarray, " _"]] = []
    while len(order):
        num_first = _fitting(order, sizes_R, batch_tokens)
        batches.append(order[:num_first])
        order = order[num_first:]
    return _run_side_by_side(batches, run)


def _fitting(order: Int64[np.ndarray, " _"], sizes_R: Int64[np.ndarray, " R"], batch_tokens: int) -> int:
    """Return how many rows in ``order``, longest first, fit the budget: one at least."""
    return max(1, batch_tokens // max(1, int(sizes_R[order[0]])))


@contextmanager
def one_torch_thread() -> Generator[None]:
    """Let this thread's tensor operations run on one thread during the block.

    Threads that share a small product wait for each other at its end, spinning.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run_side_by_side(
    batches: Sequence[Int64[np.ndarray, " _"]], run: Callable[[Int64[np.ndarray, " B"]], Done]
) -> Iterator[Done]:
    # Two threads that share one product wait for each other at its end: with a busy neighbour on the machine
    # that made them five to ten times slower, while threads with a batch each lost nothing.
    num_workers = min(torch.get_num_threads(), len(batches))
    return map(run, batches) if num_workers <= 1 else _run_in_threads(num_workers, batches, run)


def _run_in_threads(
    num_workers: int,
    batches: Sequence[Int64[np.ndarray, " _"]],
    run: Callable[[Int64[np.ndarray, " B"]], Done],
) -> Iterator[Done]:
    with ThreadPoolExecutor(
        num_workers, thread_name_prefix="encode", initializer=torch.set_num_threads, initargs=(1,)
    ) as workers:
        yield from workers.map(run, batches)


def _run_one_by_one(
    order: Int64[np.ndarray, " _"],
    sizes_R: Int64[np.ndarray, " R"],
    batch_tokens: int,
    run: Callable[[Int64[np.ndarray, " B"]], Done],
) -> Iterator[Done]:
    while len(order):
        batch = order[: _fitting(order, sizes_R, batch_tokens)]
        longest = int(sizes_R[batch[0]])
        try:
            outcome = run(batch)
        except torch.OutOfMemoryError:
            if len(batch) == 1:
                raise ModelError(
                    f"one row must fit the device's memory, got {longest} tokens that do "
                    "not; choose a smaller window or less context"
                ) from None
            batch_tokens = len(batch) // 2 * longest
        else:
            order = order[len(batch) :]
            yield outcome
            continue
        logger.warning("the device ran out of memory: going on with batch_tokens=%d", batch_tokens)
        # Outside the handler: the traceback no longer keeps the failed batch's tensors alive.
        torch.cuda.empty_cache()
