"""A text's rows written with plain loops: the oracle of layouts, and of what is pooled in them."""

from __future__ import annotations

from collections.abc import Sequence

Span = tuple[int, int]
Row = tuple[list[int], dict[int, Span]]
"""Token ids, and what is pooled here: the span of each chunk by its number."""


def naive_rows(
    pieces: Sequence[Sequence[int]],
    *,
    attention: str,
    pooling: str,
    cls_id: int | None,
    landmark_id: int,
    prefix: Sequence[int] = (),
    title: Sequence[int] = (),
    window: int = 0,
    overlap: int = 0,
    pool_prefix: bool = False,
) -> list[Row]:
    """Lay out the chunks of one text; arguments as ``lay_out`` has them."""
    opening = [] if cls_id is None else [cls_id]
    mark = {"multi_cls": opening, "mean_at_k": []}.get(pooling, [landmark_id])
    tail = [landmark_id] if pooling == "mean_at_k" else []
    is_open = pooling == "own"  # no mark ends a row, unless there is nothing else in it
    head = [*opening, *prefix, *title, *(mark if title else [])]
    sizes = [len(piece) + len(mark) for piece in pieces]
    windows = [(place, place + 1) for place in range(len(pieces))]
    if attention == "full":
        windows = _windows(sizes, window - len(head) - len(tail) + is_open, overlap)
    rows: list[Row] = []
    for first, end in windows:
        row, spans = [*head], dict[int, Span]()
        for chunk in range(first, end):
            start, stop = len(row), len(row) + len(pieces[chunk])
            row += [*pieces[chunk], *mark]
            if windows[_roomiest(windows, sizes, chunk)] == (first, end):
                whole = attention == "chunk" and (pool_prefix or head == opening)
                spans[chunk] = _span(pooling, start, stop, 0 if whole else start)
        if is_open and len(row) > len(head) + 1:
            row.pop()
        rows.append(([*row, *tail], spans))
    return rows


def _windows(sizes: Sequence[int], room: int, overlap: int) -> list[Span]:
    windows, first = list[Span](), 0
    while True:
        end = first
        while end < len(sizes) and sum(sizes[first : end + 1]) <= room:
            end += 1
        windows.append((first, end))
        if end == len(sizes):
            return windows
        following, first = first + 1, end
        while first > following:
            shared = sum(sizes[first - 1 : end])
            if shared > overlap or shared + sizes[end] > room:
                break
            first -= 1


def _roomiest(windows: Sequence[Span], sizes: Sequence[int], chunk: int) -> int:
    """Return the window in which a chunk's end has the most tokens on its scarcer side, else the first."""
    room = [
        min(sum(sizes[first : chunk + 1]), sum(sizes[chunk + 1 : end])) if first <= chunk < end else -1
        for first, end in windows
    ]
    return room.index(max(room))


def _span(pooling: str, start: int, stop: int, first: int) -> Span:
    """Return the rule of each pooling for a chunk whose own tokens stand at ``start:stop`` of its row."""
    last = stop - 1 if stop > start else stop
    rules = {
        "mean": (first, stop + 1),
        "latent": (first, stop + 1),
        "own": (start, max(stop, start + 1)),
        "lmk": (stop, stop + 1),
        "last": (stop, stop + 1),
        "multi_cls": (stop, stop + 1),
        "mean_at_k": (last, last + 1),
        "cls": (0, 1),
    }
    return rules[pooling]
