"""The systems of the table, as records: what a RAG pipeline builds from a base model, and what Cairn builds.

    baselines   bm25 · chunks-128/256 · titled-128/256 · late-128 · document-N · rrf-128/256
                {overlap, titled-overlap}-{128, 256} / {dense, bm25, rrf, convex}
                titled-overlap-128 / {whitened, convex+maxsim}
    ours        {cls, mean, late, landmarks, landmark-attention} / {none, random, corpus context}
                / {document, chunk, fused, fused+bm25}

A new encoder is one more entry of :data:`ENCODERS` (or another base configuration), a new way to rank one
more :data:`Ranking`. Chunk sizes are in tokens of the base model. A system whose chunks the model has no room
for is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final, Literal, get_args

from cairn.pipeline.config import WINDOW_TOKENS, WITHOUT_CONTEXT, EncoderConfig
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.evaluate.encodings import ContextKind, Encoding
from cairn.pipeline.model.backbone_loader import brings_projection
from cairn.pipeline.options import did_you_mean, shown
from cairn.pipeline.poolings import PREFIX_POOLINGS, PUBLISHED_POOLINGS
from cairn.pipeline.search.windows import default_window

PieceRanking = Literal["dense", "piece-bm25", "piece-rrf", "convex", "whitened", "convex+maxsim"]

LateRanking = Literal["late", "late+bm25"]

Ranking = Literal["document", "chunk", "fused", "fused+bm25", "bm25", "rrf"] | LateRanking | PieceRanking
"""By document vector, by best chunk, by both; both with BM25 as a search fuses them; BM25 alone.

``late`` and ``late+bm25`` are ``fused`` and ``fused+bm25`` judged by token vectors, as a search does.

BM25 and chunks by reciprocal rank; overlapping pieces as :mod:`cairn.pipeline.lab.evaluate.piece_ranking`
says.
"""

BASELINE_TOKENS: Final = (128, 256)
OVERLAP: Final = 2
"""Overlapping pieces begin every half of their length."""
PIECE_RANKINGS: Final[Sequence[tuple[str, PieceRanking]]] = (
    ("dense", "dense"),
    ("bm25", "piece-bm25"),
    ("rrf", "piece-rrf"),
    ("convex", "convex"),
)
LATE_RANKINGS: Final[Sequence[tuple[str, PieceRanking]]] = (
    ("whitened", "whitened"),
    ("convex+maxsim", "convex+maxsim"),
)
"""Asked of the titled pieces of the first size alone: the second needs a state of every token."""

ENCODERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "cls": {"pooling": "cls", "attention": "chunk"},
    "mean": {"pooling": "mean", "attention": "chunk"},
    "late": {"pooling": "mean", "attention": "full"},
    "landmarks": {"pooling": "lmk", "attention": "full"},
    "landmark-attention": {"pooling": "lmk", "attention": "landmark"},
}
"""Our encoders by name: what differs from the base configuration."""

OUR_RANKINGS: Final[tuple[Ranking, ...]] = ("document", "chunk", "fused", "fused+bm25")
CONTEXTS: Final[tuple[ContextKind, ...]] = ("none", "random", "corpus")


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """One row of the table: an encoding and a way to rank with it.

    ``window_chunks`` neighbouring chunks make a passage.
    """

    name: str
    encoding: Encoding
    ranking: Ranking
    window_chunks: int = 1
    is_baseline: bool = False

    @property
    def needs_document_bm25(self) -> bool:
        """Whether documents are ranked with BM25 of their text alone, as an index over one column does."""
        return self.ranking in ("bm25", "rrf")

    @property
    def needs_chunk_bm25(self) -> bool:
        """Whether passages are single chunks ranked with BM25, as a full-text index over chunks does."""
        return self.ranking in ("bm25", "rrf")

    @property
    def reads_document_vectors(self) -> bool:
        """Say whether document vectors are compared with the query."""
        return self.ranking == "document" or self.ranking.startswith(("fused", "late"))

    @property
    def reads_chunk_vectors(self) -> bool:
        """Say whether chunk vectors are compared with the query."""
        return self.ranking not in ("document", "bm25", "piece-bm25")

    @property
    def ranks_pieces(self) -> bool:
        """Say whether overlapping pieces are ranked, each a text of its own."""
        return self.ranking in get_args(PieceRanking)

    @property
    def needs_piece_bm25(self) -> bool:
        """Say whether pieces are ranked with BM25 of the text that is encoded."""
        return self.ranks_pieces and self.ranking not in ("dense", "whitened")

    @property
    def needs_max_sim(self) -> bool:
        """Say whether the best pieces are judged by the base model's token states."""
        return self.ranking == "convex+maxsim"

    @property
    def needs_lexicon(self) -> bool:
        """Whether words count as in a search: BM25 of title and text, and of windows of chunks."""
        return self.ranking in ("fused+bm25", "late+bm25")

    @property
    def judges_tokens(self) -> bool:
        """Whether token vectors judge the best windows, as in a search."""
        return self.ranking in get_args(LateRanking)


def varied(base: EncoderConfig, max_positions: int | None = None, **changes: Any) -> EncoderConfig:
    """Return the configuration with changes, and what hangs on them.

    The window's length, what runs it, whether a prefix is pooled.
    """
    attention, pooling = changes.get("attention", base.attention), changes.get("pooling", base.pooling)
    changes["pool_prefix"] = base.pool_prefix and attention != "full" and pooling in PREFIX_POOLINGS
    if attention != base.attention and base.window_tokens == WINDOW_TOKENS[base.attention]:
        changes["window_tokens"] = 0
    if attention == "landmark":
        changes["backend"] = "torch"
    config = replace(base, **changes)
    if max_positions is None or attention == "landmark" or config.window_tokens <= max_positions:
        return config
    return replace(
        config,
        window_tokens=max_positions,
        window_overlap_tokens=min(config.window_overlap_tokens, max_positions // 2),
    )


def baseline_systems(base: EncoderConfig, max_positions: int, prefix_tokens: int = 0) -> list[System]:
    """Return what a RAG pipeline builds from the base model; chunks are encoded apart but for late chunking.

    The model's own pooling is kept where published models use it, else the mean is taken. Temperatures and
    contexts are ours, so baselines have none.
    """
    plain = varied(
        base,
        max_positions,
        pooling=base.pooling if base.pooling in PUBLISHED_POOLINGS else "mean",
        attention="chunk",
        landmarks="fixed",
        **WITHOUT_CONTEXT,
        whole_text_tokens=0,
        temperature=1.0,
        query_temperature=None,
        temperature_by_length=(),
    )
    # Beside the text a row holds [CLS], the prefix and its end.
    room = min(plain.window_tokens, max_positions) - 2 - prefix_tokens
    systems = [
        _baseline(
            "bm25", Encoding(encoder=replace(plain, landmark_interval=min(BASELINE_TOKENS[0], room))), "bm25"
        )
    ]
    sizes = [size for size in BASELINE_TOKENS if size <= room]
    encoders = {size: replace(plain, landmark_interval=size) for size in sizes}
    systems += [_baseline(f"chunks-{size}", Encoding(encoder=encoders[size]), "chunk") for size in sizes]
    systems += [_baseline(f"rrf-{size}", Encoding(encoder=encoders[size]), "rrf") for size in sizes]
    systems += [
        _baseline(f"titled-{size}", Encoding(encoder=encoders[size], has_titles=True), "chunk")
        for size in sizes
    ]
    systems += [
        _baseline(
            f"late-{size}",
            Encoding(encoder=varied(encoders[size], max_positions, attention="full", pooling="mean")),
            "chunk",
        )
        for size in sizes[:1]
    ]
    systems += [
        _baseline(
            f"document-{size}",
            Encoding(encoder=replace(plain, landmark_interval=size), max_document_tokens=size),
            "document",
        )
        for size in dict.fromkeys(min(room, size) for size in (256, room))
    ]
    for size in sizes:
        for name, has_titles in (("overlap", False), ("titled-overlap", True)):
            encoding = Encoding(encoder=encoders[size], has_titles=has_titles, stride_tokens=size // OVERLAP)
            rankings = (*PIECE_RANKINGS, *(LATE_RANKINGS if has_titles and size == sizes[0] else ()))
            systems += [_baseline(f"{name}-{size}/{key}", encoding, own) for key, own in rankings]
    return systems


def our_systems(
    base: EncoderConfig,
    contexts: Iterable[ContextKind] = CONTEXTS,
    encoders: Iterable[str] = tuple(ENCODERS),
    max_positions: int | None = None,
) -> list[System]:
    """Return Cairn's own systems on the base configuration's landmark interval."""
    window = default_window(base.landmark_interval)
    return [
        System(
            name=f"{encoder}/{context}/{ranking}",
            encoding=Encoding(
                encoder=varied(base, max_positions, **_reading(context, base), **ENCODERS[encoder]),
                context=context,
            ),
            ranking=ranking,
            window_chunks=window,
        )
        for context in contexts
        for encoder in encoders
        for ranking in OUR_RANKINGS
    ]


def _reading(context: ContextKind, base: EncoderConfig) -> dict[str, Any]:
    if context == "none":
        return WITHOUT_CONTEXT
    return {"use_context": True, "whitening": base.whitening}


def configured_systems(base: EncoderConfig) -> list[System]:
    """Return the ways to rank with the base configuration exactly as it is.

    What an ingest with these settings gives: with token vectors where the model brings a projection.
    """
    window = default_window(base.landmark_interval)
    encoding = Encoding(encoder=base, context="corpus" if base.needs_context else "none")
    return [
        System(name=f"cairn/{ranking}", encoding=encoding, ranking=ranking, window_chunks=window)
        for ranking in (*OUR_RANKINGS, *(get_args(LateRanking) if brings_projection(base) else ()))
    ]


def select_systems(systems: Sequence[System], patterns: Sequence[str]) -> list[System]:
    """Keep the systems whose name matches one of the patterns (``*``, ``?``), all without any.

    A pattern that matches none is refused.
    """
    for pattern in patterns:
        if not any(fnmatchcase(system.name, pattern) for system in systems):
            names = [system.name for system in systems]
            raise ConfigError(f"no row of the table matches {shown(pattern)}{did_you_mean(pattern, names)}")
    return [
        system
        for system in systems
        if not patterns or any(fnmatchcase(system.name, pattern) for pattern in patterns)
    ]


def _baseline(name: str, encoding: Encoding, ranking: Ranking) -> System:
    return System(name=name, encoding=encoding, ranking=ranking, is_baseline=True)
