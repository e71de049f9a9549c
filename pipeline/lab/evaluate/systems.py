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

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, get_args

from cairn.pipeline.config import (
    DEFAULT_MODEL,
    WINDOW_TOKENS,
    WITHOUT_CONTEXT,
    ContextConfig,
    EncoderConfig,
    IngestConfig,
)
from cairn.pipeline.encode.encoder_fit import prefixes_of, require_context_fit, require_fit
from cairn.pipeline.errors import CairnError, ConfigError
from cairn.pipeline.lab.evaluate.encodings import ContextKind, Encoding
from cairn.pipeline.model.backbone_loader import brings_projection, load_backbone
from cairn.pipeline.model.folders.model_defaults import base_of_folder, encoder_config
from cairn.pipeline.model.folders.names import model_folder
from cairn.pipeline.options import did_you_mean, shown
from cairn.pipeline.poolings import PREFIX_POOLINGS, PUBLISHED_POOLINGS

OurRanking = Literal["document", "chunk", "fused", "fused+bm25", "late", "late+bm25"]
"""By document vector, by best chunk, by both; both with BM25 as a search fuses them.

``late`` and ``late+bm25`` are ``fused`` and ``fused+bm25`` judged by token vectors, as a search does.
"""
BaselineRanking = Literal[
    "dense", "bm25", "rrf", "piece-bm25", "piece-rrf", "convex", "whitened", "convex+maxsim"
]
""":mod:`cairn.pipeline.lab.evaluate.baselines` says what each does."""
Ranking = OurRanking | BaselineRanking

BASELINE_TOKENS: Final = (128, 256)
OVERLAP: Final = 2
"""Overlapping pieces begin every half of their length."""
PIECE_RANKINGS: Final[Mapping[str, BaselineRanking]] = {
    "dense": "dense",
    "bm25": "piece-bm25",
    "rrf": "piece-rrf",
    "convex": "convex",
}
JUDGED_RANKINGS: Final[Mapping[str, BaselineRanking]] = {
    "whitened": "whitened",
    "convex+maxsim": "convex+maxsim",
}
"""Asked of the titled pieces of the first size alone: the second needs a state of every token."""

ENCODERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "cls": {"pooling": "cls", "attention": "chunk"},
    "mean": {"pooling": "mean", "attention": "chunk"},
    "late": {"pooling": "mean", "attention": "full"},
    "landmarks": {"pooling": "lmk", "attention": "full"},
    "landmark-attention": {"pooling": "lmk", "attention": "landmark"},
}
"""Our encoders by name: what differs from the base configuration."""

OUR_RANKINGS: Final[tuple[OurRanking, ...]] = ("document", "chunk", "fused", "fused+bm25")
LATE_RANKINGS: Final[tuple[OurRanking, ...]] = ("late", "late+bm25")
CONTEXTS: Final[tuple[ContextKind, ...]] = ("none", "random", "corpus")


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """One row of the table: an encoding and a way to rank with it."""

    name: str
    encoding: Encoding
    ranking: Ranking

    @property
    def is_baseline(self) -> bool:
        """Say whether a search has no such ranking."""
        return self.ranking in get_args(BaselineRanking)

    @property
    def needs_document_bm25(self) -> bool:
        """Say whether whole documents are ranked with BM25 of their text alone."""
        return self.ranking in ("bm25", "rrf")

    @property
    def needs_piece_bm25(self) -> bool:
        """Say whether pieces are ranked with BM25 of the text that is encoded."""
        return self.is_baseline and self.ranking not in ("dense", "whitened")

    @property
    def needs_words(self) -> bool:
        """Say whether words count as in a search: BM25 of title and text, and of passages."""
        return self.ranking in ("fused+bm25", "late+bm25")

    @property
    def reads_document_vectors(self) -> bool:
        """Say whether document vectors are compared with the query."""
        return not self.is_baseline and self.ranking != "chunk"

    @property
    def reads_chunk_vectors(self) -> bool:
        """Say whether chunk vectors are compared with the query."""
        return self.ranking not in ("document", "bm25", "piece-bm25")

    @property
    def reads_vectors(self) -> bool:
        """Say whether anything must be encoded."""
        return self.reads_document_vectors or self.reads_chunk_vectors

    @property
    def needs_max_sim(self) -> bool:
        """Say whether the best pieces are judged by the base model's token states."""
        return self.ranking == "convex+maxsim"

    @property
    def judges_tokens(self) -> bool:
        """Say whether token vectors judge the best passages, as in a search."""
        return self.ranking in LATE_RANKINGS


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
    sizes = [size for size in BASELINE_TOKENS if size <= room]
    encoders = {size: replace(plain, landmark_interval=size) for size in sizes}
    smallest = min(BASELINE_TOKENS[0], room)
    # Its pieces are texts of their own, which nothing encodes.
    words = Encoding(encoder=replace(plain, landmark_interval=smallest), stride_tokens=smallest)
    systems = [System(name="bm25", encoding=words, ranking="bm25")]
    for size, encoder in encoders.items():
        systems += [System(name=f"rrf-{size}", encoding=Encoding(encoder=encoder), ranking="rrf")]
    dense = {f"chunks-{size}": Encoding(encoder=encoder) for size, encoder in encoders.items()}
    dense |= {
        f"titled-{size}": Encoding(encoder=encoder, has_titles=True) for size, encoder in encoders.items()
    }
    for size in sizes[:1]:
        late = varied(encoders[size], max_positions, attention="full", pooling="mean")
        dense[f"late-{size}"] = Encoding(encoder=late)
    for size in dict.fromkeys(min(room, size) for size in (256, room)):
        whole = replace(plain, landmark_interval=size)
        dense[f"document-{size}"] = Encoding(encoder=whole, max_document_tokens=size)
    systems += [System(name=name, encoding=encoding, ranking="dense") for name, encoding in dense.items()]
    for size in sizes:
        for name, has_titles in (("overlap", False), ("titled-overlap", True)):
            encoding = Encoding(encoder=encoders[size], has_titles=has_titles, stride_tokens=size // OVERLAP)
            rankings: dict[str, BaselineRanking] = dict(PIECE_RANKINGS)
            if has_titles and size == sizes[0]:
                rankings |= JUDGED_RANKINGS
            systems += [
                System(name=f"{name}-{size}/{key}", encoding=encoding, ranking=own)
                for key, own in rankings.items()
            ]
    return systems


def our_systems(
    base: EncoderConfig,
    contexts: Iterable[ContextKind] = CONTEXTS,
    encoders: Iterable[str] = tuple(ENCODERS),
    max_positions: int | None = None,
) -> list[System]:
    """Return Cairn's own systems on the base configuration's landmark interval."""
    return [
        System(
            name=f"{encoder}/{context}/{ranking}",
            encoding=Encoding(
                encoder=varied(base, max_positions, **_reading(context, base), **ENCODERS[encoder]),
                context=context,
            ),
            ranking=ranking,
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
    encoding = Encoding(encoder=base, context="corpus" if base.needs_context else "none")
    rankings = (*OUR_RANKINGS, *(LATE_RANKINGS if brings_projection(base) else ()))
    return [System(name=f"cairn/{ranking}", encoding=encoding, ranking=ranking) for ranking in rankings]


def select_systems(systems: Sequence[System], patterns: Sequence[str]) -> list[System]:
    """Keep the systems whose name matches one of the patterns (``*``, ``?``), all without any.

    A pattern that matches none is refused.
    """
    names = [system.name for system in systems]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f"no row of the table matches {shown(pattern)}{did_you_mean(pattern, names)}")
    kept = {name for pattern in patterns or ["*"] for name in fnmatch.filter(names, pattern)}
    return [system for system in systems if system.name in kept]


_SHARED_OPTIONS: Final = ("precision", "backend")
_MODEL_OPTIONS: Final = (
    "model",
    "dims",
    "layers",
    "causal",
    "query_prefix",
    "document_prefix",
    "pool_prefix",
)


def baseline_config(chosen: Mapping[str, Any], baseline_model: str | None) -> EncoderConfig:
    """Return the settings of the baselines: their model's own, without Cairn's chunks and pooling.

    Without ``baseline_model`` it is the model the evaluated one was trained on, else that model itself.
    """
    base = base_of_folder(model_folder(chosen.get("model", DEFAULT_MODEL)))
    model = baseline_model or (base.model if base else None)
    kept = _SHARED_OPTIONS if baseline_model else (*_SHARED_OPTIONS, *_MODEL_OPTIONS)
    options = {name: chosen[name] for name in kept if name in chosen}
    return encoder_config({**options, **({"model": model} if model else {})})


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The systems to score, and why others, by name, were left out."""

    systems: Sequence[System]
    left_out: Mapping[str, str]


def choose_systems(
    base: EncoderConfig,
    baseline: EncoderConfig,
    context: ContextConfig,
    patterns: Sequence[str],
    *,
    is_whole_table: bool,
) -> Selection:
    """Return the systems whose names match a pattern, without those the models have no room or head for.

    ``is_whole_table`` adds every encoder, with no, random and corpus context, ranked in every way. Settings
    as they were given must fit: all are checked here, before anything is encoded.
    """
    backbones = {config.model: load_backbone(config) for config in (base, baseline)}
    own, plain = backbones[base.model], backbones[baseline.model]
    require_fit(base, own)
    prefix_tokens = max(len(prefix.ids) for prefix in prefixes_of(baseline, plain))
    systems = baseline_systems(baseline, plain.max_positions, prefix_tokens)
    systems += our_systems(base, max_positions=own.max_positions) if is_whole_table else []
    left_out: dict[str, str] = {}
    for system in systems:
        config = system.encoding.encoder
        try:
            require_fit(config, backbones[config.model])
        except CairnError as error:
            left_out[system.name] = str(error)
    systems = [system for system in systems if system.name not in left_out]
    known = {system.encoding for system in systems if not system.is_baseline}
    systems += [system for system in configured_systems(base) if system.encoding not in known]
    chosen = select_systems(systems, patterns)
    for system in chosen:
        require_context_fit(IngestConfig(encoder=system.encoding.encoder, context=context), own)
    return Selection(systems=chosen, left_out=left_out)
