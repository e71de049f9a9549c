"""M2: rows of token ids, in batches, to one embedding a chunk (CDE §4.2, eq. 5 and 6).

The corpus's context stands in front where there is one. Embeddings are float32 and not normalised.

Rows of unequal length go in batches that waste little and fit the memory. They are taken longest first, ties
by index, and a batch holds as many as keep ``rows x longest`` within the budget: neighbours are nearly
equally long, so almost nothing is padded, and a batch too large for the device shows at once. Every result is
put back in its chunk's place, so the order of work never shows.

A backbone divides every attention logit of a call by one τ (TempScale), in all layers: one for documents,
the same or another for queries. Source: Zhou et al., "Length-Induced Embedding Collapse in Transformer-based
Models", eq. 6; §5.1 takes τ = 0.8 out of 0.1 to 1.0. Not here: a τ that falls with a row's length (E.6).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
import torch
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.model.engine.backbone import Backbone, ContextRows
from cairn.pipeline.model.landmarks import Rows
from cairn.pipeline.ragged import ranges
from cairn.pipeline.types import BETWEEN_BATCHES
from jaxtyping import Float, Float32, Int64

# OpenMP's threads do not outlive a fork: a child that asked for several would wait for them for ever.
os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))

logger = logging.getLogger(__name__)

SMALL_BATCH_TOKENS: Final = 1_024
WIDTH_STEP: Final = 8
"""A small batch, such as the queries of a server, is this many tokens wide or a multiple.

oneDNN builds and keeps its products shape by shape, which costs a query of a new length milliseconds and the
process megabytes.
"""


OnChunks = Callable[[Int64[np.ndarray, " m"]], None]
KeepOwn = Callable[[Int64[np.ndarray, " m"], Float[torch.Tensor, "T D"]], None]


def embed_chunks(
    backbone: Backbone,
    rows: Rows,
    *,
    batch_tokens: int,
    temperature: float = 1.0,
    context_CD: ContextRows = None,
    token_head: Callable[[torch.Tensor], torch.Tensor] | None = None,
    on_chunks: OnChunks | None = None,
    keep_own: KeepOwn | None = None,
) -> Float32[np.ndarray, "M E"]:
    """Embed every chunk of a layout, in the layout's order, behind one context or one for each row.

    ``on_chunks`` hears the indices of each batch's chunks when they are done. ``temperature`` divides
    attention logits (TempScale).
    ``token_head`` rewrites hidden states, position by position, before they are pooled (latent attention).
    ``keep_own`` hears the chunks of each batch and the last states of their own tokens, one chunk after
    another.
    """
    embeddings_ME = np.empty((len(rows.pooled_row), backbone.embedding_dim), np.float32)
    lengths_R = np.diff(rows.row_offsets)
    chunks_by_row = np.argsort(rows.pooled_row, kind="stable")
    first_chunk_R1 = np.searchsorted(rows.pooled_row[chunks_by_row], np.arange(len(lengths_R) + 1))

    def run(batch_B: Int64[np.ndarray, " B"]) -> Int64[np.ndarray, " m"]:
        width = int(lengths_R[batch_B].max())
        if len(batch_B) * width <= SMALL_BATCH_TOKENS:
            width = min(-(-width // WIDTH_STEP) * WIDTH_STEP, max(width, backbone.max_positions))
        ids_BT, lengths_B = pad_rows(rows, batch_B, backbone.pad_id, width)
        read = context_CD if context_CD is None or context_CD.ndim == 2 else context_CD[batch_B]
        hidden_BTD = backbone.hidden_states(ids_BT, lengths_B, read, temperature)
        num_chunks_B = first_chunk_R1[batch_B + 1] - first_chunk_R1[batch_B]
        chunk_M = chunks_by_row[ranges(first_chunk_R1[batch_B], num_chunks_B)]
        row_M = np.repeat(np.arange(len(batch_B)), num_chunks_B)
        spans = (
            torch.from_numpy(x).to(hidden_BTD.device)
            for x in (row_M, rows.pooled_start[chunk_M], rows.pooled_end[chunk_M])
        )
        if keep_own is not None:
            places = ranges(row_M * hidden_BTD.shape[1] + rows.own_start[chunk_M], rows.num_own[chunk_M])
            keep_own(chunk_M, hidden_BTD.flatten(0, 1)[torch.from_numpy(places).to(hidden_BTD.device)])
        if token_head is not None:
            hidden_BTD = token_head(hidden_BTD)
        embeddings_ME[chunk_M] = backbone.project(pool_spans(hidden_BTD, *spans)).cpu().numpy()
        return chunk_M

    extra_tokens = 0 if context_CD is None else context_CD.shape[-2]
    for finished in run_in_batches(lengths_R, batch_tokens, run, backbone.device, extra_tokens=extra_tokens):
        if on_chunks is not None:
            on_chunks(finished)
    return embeddings_ME


def embed_windows(
    backbone: Backbone,
    rows: Rows,
    text_M: Int64[np.ndarray, " M"],
    most: int,
    *,
    on_chunks: OnChunks | None = None,
    keep_own: KeepOwn | None = None,
    **settings: Any,
) -> Float32[np.ndarray, "M E"]:
    """Embed texts' first windows, then the others behind up to ``most`` landmarks of their text's first.

    ``text_M`` says whose each chunk is. The landmarks are those that are pooled in the first window, as they
    are pooled, before any normalisation. They stand as input vectors before the row, as a context does (CDE,
    eq. 5 and 6), and cost a text of one window nothing. ``settings`` are those of :func:`embed_chunks`.
    """
    embeddings_ME = np.empty((len(rows.pooled_row), backbone.embedding_dim), np.float32)
    text_R = np.zeros(len(rows), np.int64)
    text_R[rows.pooled_row] = text_M
    # A row that pools nothing is not its text's first, which pools the first chunk.
    text_R = np.maximum.accumulate(text_R)
    is_first_R = np.diff(text_R, prepend=-1) > 0

    def embed(row_r: Int64[np.ndarray, " r"], context_rCD: ContextRows) -> None:
        some, chunk_m = rows.take(row_r)

        def done(own_m: Int64[np.ndarray, " m"]) -> None:
            if on_chunks is not None:
                on_chunks(chunk_m[own_m])

        def keep(own_m: Int64[np.ndarray, " m"], states_TD: Float[torch.Tensor, "T D"]) -> None:
            if keep_own is not None:
                keep_own(chunk_m[own_m], states_TD)

        embeddings_ME[chunk_m] = embed_chunks(
            backbone, some, context_CD=context_rCD, on_chunks=done, keep_own=keep, **settings
        )

    embed(np.flatnonzero(is_first_R), None)
    is_read_M = is_first_R[rows.pooled_row]
    begin_N = np.searchsorted(text_M, np.arange(int(text_M[-1]) + 1)) if len(text_M) else text_M
    num_read_N = np.minimum(np.bincount(text_M[is_read_M], minlength=len(begin_N)), most)
    others_r = np.flatnonzero(~is_first_R)
    for count in np.unique(num_read_N[text_R[others_r]]).tolist():
        own_r = others_r[num_read_N[text_R[others_r]] == count]
        embed(own_r, embeddings_ME[begin_N[text_R[own_r], None] + np.arange(count)])
    return embeddings_ME


def pad_rows(
    rows: Rows, batch_B: Int64[np.ndarray, " B"], pad_id: int, width: int | None = None
) -> tuple[Int64[np.ndarray, "B T"], Int64[np.ndarray, " B"]]:
    """Gather rows into a rectangle; validity is by true length, as texts may use the padding token."""
    starts_B, lengths_B = rows.row_offsets[batch_B], rows.row_offsets[batch_B + 1] - rows.row_offsets[batch_B]
    positions_T = np.arange(int(lengths_B.max()) if width is None else width)
    source_BT = np.minimum(starts_B[:, None] + positions_T, len(rows.ids) - 1)
    return np.where(positions_T < lengths_B[:, None], rows.ids[source_BT], pad_id).astype(np.int64), lengths_B


def pool_spans(
    hidden_BTD: Float[torch.Tensor, "B T D"],
    row_M: Int64[torch.Tensor, " M"],
    start_M: Int64[torch.Tensor, " M"],
    end_M: Int64[torch.Tensor, " M"],
) -> Float32[torch.Tensor, "M D"]:
    """Average positions ``start:end`` of each chunk's row, in float32 whatever the model computes in.

    ``row`` must not decrease, spans are never empty. Every pooling is such a mean; ``pipeline/poolings.py``
    says over which span. LMK pooling (algorithm 2) is kept per landmark: a document's vector is the mean of
    its chunks' vectors, taken later.
    """
    num_rows, num_tokens, _ = hidden_BTD.shape
    if bool((end_M - start_M == 1).all()):
        return hidden_BTD[row_M, start_M].float()
    # The rank of a chunk among those of its row, to lay ragged rows of chunks out as one rectangle.
    rank_M = torch.arange(len(row_M), device=row_M.device) - torch.searchsorted(row_M, row_M)
    positions_T = torch.arange(num_tokens, device=row_M.device)
    inside_MT = (positions_T >= start_M[:, None]) & (positions_T < end_M[:, None])
    inside_BLT = hidden_BTD.new_zeros((num_rows, int(rank_M.max()) + 1, num_tokens), dtype=torch.float32)
    inside_BLT[row_M, rank_M] = inside_MT.float()
    # Positions after a row's length may hold anything finite; a zero weight silences them.
    sums_BLD = inside_BLT @ hidden_BTD.float()
    return sums_BLD[row_M, rank_M] / (end_M - start_M)[:, None]


def require_dims(truncate_dim: int | None, model_dim: int) -> int:
    """Return the width of the vectors; raise :class:`ConfigError` for more dimensions than the model has."""
    if truncate_dim is None:
        return model_dim
    if not 1 <= truncate_dim <= model_dim:
        raise ConfigError(
            f"dims must lie between 1 and the model's {model_dim}, got {truncate_dim}; "
            "leave it out to keep all"
        )
    return truncate_dim


def first_dims(embeddings_ND: Float32[np.ndarray, "N D"], vector_dim: int) -> Float32[np.ndarray, "N V"]:
    """Keep the first dimensions of every row and divide it by its length (Matryoshka; m³BERT §2.1).

    A row of zeros becomes NaN, which no caller lets pass.
    """
    vectors_NV = embeddings_ND[:, :vector_dim]
    with np.errstate(invalid="ignore", over="ignore"):
        return vectors_NV / np.linalg.norm(vectors_NV, axis=1, keepdims=True)


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
