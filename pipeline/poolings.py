"""Every pooling in one table: which positions of a row its mean is taken over, and what goes with it.

A chunk's embedding is the mean of hidden states over one span of positions. A new pooling is a name in
``Pooling`` and an entry of :data:`POOLING_RULES`, in the same order. ``docs/contributing.md`` lists what
describes and tests it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from cairn.pipeline.errors import ConfigError

if TYPE_CHECKING:  # settings read this table, and the command line starts without NumPy
    import numpy as np
    from jaxtyping import Int64

    Spans = tuple[Int64[np.ndarray, " M"], Int64[np.ndarray, " M"]]
    """First position of each chunk's span, and the one after its last."""

Pooling = Literal["mean", "own", "lmk", "cls", "last", "mean_at_k", "multi_cls", "latent"]
Attention = Literal["chunk", "full"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkPlaces:
    """Positions of M chunks within their rows.

    ``first_M`` is the first token that counts to the chunk, [CLS] included where the row is the chunk's alone
    and no prefix is left out. ``mark_M`` is the landmark after its ``num_own_M`` own tokens, which may be 0.
    In a window without marks it is the position after them: the next chunk's first, or the row's closing
    landmark.
    """

    first_M: Int64[np.ndarray, " M"]
    mark_M: Int64[np.ndarray, " M"]
    num_own_M: Int64[np.ndarray, " M"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolingRule:
    """What a pooling is.

    ``span`` gives each chunk at least one position, also where it has no tokens of its own. ``attentions``
    are those it goes with: `cls` and `last` need a row of the chunk's own, so not `full`.
    ``window_mark`` is what stands after each chunk of a window, None for nothing; ``separator`` is a landmark
    between chunks and not at the row's end.
    ``takes_prefix``: it is over many tokens and can take those of a prefix in. ``saved_as`` is its name in a
    Sentence-Transformers folder, None where that library has no such pooling. ``read_from`` are the names
    there that it stands for.
    """

    span: Callable[[ChunkPlaces], Spans]
    attentions: tuple[Attention, ...]
    window_mark: Literal["landmark", "cls", "separator"] | None = "landmark"
    takes_prefix: bool = False
    needs_cls: bool = False
    needs_latent_attention: bool = False
    saved_as: str | None = None
    read_from: tuple[str, ...] = ()


def _whole(places: ChunkPlaces) -> Spans:
    return places.first_M, places.mark_M + 1


def _one(position_M: Int64[np.ndarray, " M"]) -> Spans:
    return position_M, position_M + 1


def _mark(places: ChunkPlaces) -> Spans:
    return _one(places.mark_M)


def _row_start(places: ChunkPlaces) -> Spans:
    return _one(0 * places.mark_M)


def _own(places: ChunkPlaces) -> Spans:
    """Return each chunk's own tokens, or the landmark of an empty chunk."""
    return places.mark_M - places.num_own_M, places.mark_M + (places.num_own_M == 0)


def _last_own(places: ChunkPlaces) -> Spans:
    """Return each chunk's last own token, or the landmark of an empty chunk."""
    return _one(places.mark_M - (places.num_own_M > 0))


POOLING_RULES: Final[Mapping[Pooling, PoolingRule]] = {
    "mean": PoolingRule(
        span=_whole,
        attentions=("chunk", "full"),
        takes_prefix=True,
        saved_as="mean",
        read_from=("mean", "mean_sqrt_len_tokens"),
    ),
    "own": PoolingRule(span=_own, attentions=("chunk", "full"), window_mark="separator"),
    "lmk": PoolingRule(span=_mark, attentions=("chunk", "full"), saved_as="lasttoken"),
    "cls": PoolingRule(
        span=_row_start,
        attentions=("chunk",),
        needs_cls=True,
        saved_as="cls",
        read_from=("cls",),
    ),
    "last": PoolingRule(span=_mark, attentions=("chunk",), saved_as="lasttoken", read_from=("lasttoken",)),
    "mean_at_k": PoolingRule(span=_last_own, attentions=("chunk", "full"), window_mark=None),
    "multi_cls": PoolingRule(span=_mark, attentions=("full",), window_mark="cls", needs_cls=True),
    "latent": PoolingRule(
        span=_whole,
        attentions=("chunk", "full"),
        takes_prefix=True,
        needs_latent_attention=True,
    ),
}

POOLINGS: Final[Mapping[Attention, tuple[Pooling, ...]]] = {
    attention: tuple(name for name, rule in POOLING_RULES.items() if attention in rule.attentions)
    for attention in ("chunk", "full")
}
"""What goes with each attention."""

PUBLISHED_POOLINGS: Final = tuple(
    name
    for name, rule in POOLING_RULES.items()
    if rule.read_from or rule.needs_latent_attention or rule.window_mark == "separator"
)
"""Poolings that published models were trained with."""

PREFIX_POOLINGS: Final = tuple(name for name, rule in POOLING_RULES.items() if rule.takes_prefix)
"""Poolings over many tokens, which can take those of a prefix in."""


def pooling_rule(name: str) -> PoolingRule:
    """Return the rule of a pooling; an unknown one raises :class:`ConfigError`."""
    for pooling, rule in POOLING_RULES.items():
        if pooling == name:
            return rule
    raise ConfigError(f"pooling must be one of {', '.join(POOLING_RULES)}, got {name!r}; choose one of them")
