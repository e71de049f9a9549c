"""Rows of unequal length into batches that waste little and fit the memory.

Rows are taken longest first, ties by index, and a batch holds as many as keep ``rows x longest`` within the
budget: neighbours are nearly equally long, so almost nothing is padded, and a batch too large for the device
shows at once. Used by both stages. Results are scattered back by row index, so the order of work never shows.

Windows, whose rows see one another, go whole: the largest first, as many as keep the sum of their tokens
within the budget.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, TypeVar

import numpy as np
import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.ragged import ranges
from jaxtyping import Int64

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
    window_R: Int64[np.ndarray, " R"] | None = None,
) -> Iterator[Done]:
    """Call ``run`` with the row indices of each batch, longest rows first, and yield what it returns.

    ``extra_tokens`` come on top of each row. ``window_R`` numbers windows of rows that stand together: a
    batch has all rows of its windows and costs the sum of their tokens, not ``rows x longest``. A row or
    window larger than the budget is a batch of its own. On a CPU batches run side by side, one a thread; on a
    GPU one after the other, and when its memory runs out the batch is halved, now and for the rest.
    """
    is_padded = window_R is None
    run_units: Callable[[Int64[np.ndarray, " W"]], Done] = run
    if window_R is not None and len(window_R):
        first_row_W1 = np.flatnonzero(np.diff(window_R, prepend=-1, append=-1))
        lengths_R = np.add.reduceat(lengths_R, first_row_W1[:-1])

        def run_windows(windows: Int64[np.ndarray, " W"], /) -> Done:
            num_rows = first_row_W1[windows + 1] - first_row_W1[windows]
            return run(ranges(first_row_W1[windows], num_rows))

        run_units = run_windows

    sizes_R = lengths_R + extra_tokens
    order = np.argsort(-lengths_R, kind="stable")
    if device.type == "cpu":
        return _run_side_by_side(_batches(order, sizes_R, batch_tokens, is_padded=is_padded), run_units)
    return _run_one_by_one(order, sizes_R, batch_tokens * CUDA_BATCH_FACTOR, run_units, is_padded=is_padded)


def _batches(
    order: Int64[np.ndarray, " R"], sizes_R: Int64[np.ndarray, " R"], batch_tokens: int, *, is_padded: bool
) -> list[Int64[np.ndarray, " _"]]:
    batches: list[Int64[np.ndarray, " _"]] = []
    done = 0
    while done < len(order):
        batches.append(_batch(order[done:], sizes_R, batch_tokens, is_padded=is_padded))
        done += len(batches[-1])
    return batches


def _batch(
    order: Int64[np.ndarray, " _"], sizes_R: Int64[np.ndarray, " R"], batch_tokens: int, *, is_padded: bool
) -> Int64[np.ndarray, " B"]:
    """Return the first of the rows in ``order``, one at least, that fit the budget."""
    if is_padded:
        return order[: max(1, batch_tokens // max(1, int(sizes_R[order[0]])))]
    # No row is empty, so a batch never has more rows than tokens.
    return order[
        : max(1, int(np.searchsorted(np.cumsum(sizes_R[order[:batch_tokens]]), batch_tokens, side="right")))
    ]


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
    if num_workers <= 1:
        yield from map(run, batches)
        return
    with ThreadPoolExecutor(
        num_workers, thread_name_prefix="encode", initializer=torch.set_num_threads, initargs=(1,)
    ) as workers:
        yield from workers.map(run, batches)


def _run_one_by_one(
    order: Int64[np.ndarray, " R"],
    sizes_R: Int64[np.ndarray, " R"],
    batch_tokens: int,
    run: Callable[[Int64[np.ndarray, " B"]], Done],
    *,
    is_padded: bool,
) -> Iterator[Done]:
    done = 0
    while done < len(order):
        rows = _batch(order[done:], sizes_R, batch_tokens, is_padded=is_padded)
        try:
            outcome = run(rows)
        except torch.OutOfMemoryError:
            if len(rows) == 1:
                raise ModelError(
                    f"one row must fit the device's memory, got {int(sizes_R[rows[0]])} tokens that do not; "
                    "choose a smaller window or less context"
                ) from None
            half = rows[: len(rows) // 2]
            batch_tokens = len(half) * int(sizes_R[half[0]]) if is_padded else int(sizes_R[half].sum())
        else:
            done += len(rows)
            yield outcome
            continue
        logger.warning("the device ran out of memory: going on with batch_tokens=%d", batch_tokens)
        # Outside the handler: the traceback no longer keeps the failed batch's tensors alive.
        torch.cuda.empty_cache()
