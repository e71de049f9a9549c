"""The systems of the table, as records: what a RAG pipeline builds from a base model, and what Cairn builds.

    baselines   bm25 · chunks-128/256 · titled-128/256 · late-128
                {overlap, titled-overlap}-{128, 256} / {dense, convex} · titled-overlap-128/convex+maxsim
    ours        {cls, mean, late, landmarks} / {none, random, corpus context}
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
    UNDESCRIBED,
    ContextConfig,
    EncoderConfig,
    IngestConfig,
)
from cairn.pipeline.encode.encoder import load_cutter, require_encoder_fit
from cairn.pipeline.encode.encoder_fit import prefixes_of, require_context_fit
from cairn.pipeline.encode.given import require_given_fit
from cairn.pipeline.errors import CairnError, ConfigError
from cairn.pipeline.lab.evaluate.encodings import ContextKind, Encoding, row_settings
from cairn.pipeline.model.folders.model_defaults import base_of_folder, encoder_config, given_defaults
from cairn.pipeline.model.folders.names import is_endpoint, model_folder
from cairn.pipeline.model.late_backbone import LateBackbone
from cairn.pipeline.options import did_you_mean, shown
from cairn.pipeline.poolings import PREFIX_POOLINGS, PUBLISHED_POOLINGS

OurRanking = Literal["document", "chunk", "fused", "fused+bm25", "late", "late+bm25"]
"""By document vector, by best chunk, by both; both with BM25 as a search fuses them.

``late`` and ``late+bm25`` are ``fused`` and ``fused+bm25`` judged by token vectors, as a search does.
"""
BaselineRanking = Literal["dense", "bm25", "convex", "convex+maxsim"]
""":mod:`cairn.pipeline.lab.evaluate.baselines` says what each does."""
Ranking = OurRanking | BaselineRanking

Read = Literal["documents", "chunks", "words", "token vectors", "document BM25", "piece BM25", "token states"]
"""Vectors of either kind, words as a search counts them, codes of tokens; what baselines have of pieces."""

READS: Final[Mapping[Ranking, frozenset[Read]]] = {
    "document": frozenset({"documents"}),
    "chunk": frozenset({"chunks"}),
    "fused": frozenset({"documents", "chunks"}),
    "fused+bm25": frozenset({"documents", "chunks", "words"}),
    "late": frozenset({"documents", "chunks", "token vectors"}),
    "late+bm25": frozenset({"documents", "chunks", "words", "token vectors"}),
    "dense": frozenset({"chunks"}),
    "bm25": frozenset({"document BM25", "piece BM25"}),
    "convex": frozenset({"chunks", "piece BM25"}),
    "convex+maxsim": frozenset({"chunks", "piece BM25", "token states"}),
}
"""What each ranking reads of a set."""

BASELINE_TOKENS: Final = (128, 256)

ENCODERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "cls": {"pooling": "cls", "attention": "chunk"},
    "mean": {"pooling": "mean", "attention": "chunk"},
    "late": {"pooling": "mean", "attention": "full"},
    "landmarks": {"pooling": "lmk", "attention": "full"},
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

    def reads(self, what: Read) -> bool:
        """Say whether the ranking reads this of a set."""
        return what in READS[self.ranking]

    @property
    def reads_vectors(self) -> bool:
        """Say whether anything must be encoded."""
        return self.reads("documents") or self.reads("chunks")


def varied(base: EncoderConfig, max_positions: int | None = None, **changes: Any) -> EncoderConfig:
    """Return the configuration with changes, with the window and the prefix's pooling that go with them."""
    attention, pooling = changes.get("attention", base.attention), changes.get("pooling", base.pooling)
    changes["pool_prefix"] = base.pool_prefix and attention != "full" and pooling in PREFIX_POOLINGS
    if attention != "full":
        changes["document_context"] = 0
    config = replace(base, **changes)
    if max_positions is None or config.window_tokens <= max_positions:
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
        use_context=False,
        document_context=0,
        whole_text_tokens=0,
        title_tokens=0,
        token_bytes=0,
        temperature=1.0,
        query_temperature=None,
    )
    # Beside the text a row holds [CLS], the prefix and its end.
    room = min(plain.window_tokens, max_positions) - 2 - prefix_tokens
    sizes = [size for size in BASELINE_TOKENS if size <= room]
    encoders = {size: replace(plain, landmark_interval=size) for size in sizes}
    smallest = min(BASELINE_TOKENS[0], room)
    # Its pieces are texts of their own, which nothing encodes.
    words = Encoding(encoder=replace(plain, landmark_interval=smallest), stride_tokens=smallest)
    systems = [System(name="bm25", encoding=words, ranking="bm25")]
    dense = {f"chunks-{size}": Encoding(encoder=encoder) for size, encoder in encoders.items()}
    dense |= {
        f"titled-{size}": Encoding(encoder=encoder, has_titles=True) for size, encoder in encoders.items()
    }
    for size in sizes[:1]:
        late = varied(encoders[size], max_positions, attention="full", pooling="mean")
        dense[f"late-{size}"] = Encoding(encoder=late)
    systems += [System(name=name, encoding=encoding, ranking="dense") for name, encoding in dense.items()]
    for size in sizes:
        for name, has_titles in (("overlap", False), ("titled-overlap", True)):
            # Overlapping pieces begin every half of their length.
            encoding = Encoding(encoder=encoders[size], has_titles=has_titles, stride_tokens=size // 2)
            rankings: tuple[BaselineRanking, ...] = ("dense", "convex")
            if has_titles and size == sizes[0]:  # it needs a state of every token
                rankings = (*rankings, "convex+maxsim")
            systems += [
                System(name=f"{name}-{size}/{own}", encoding=encoding, ranking=own) for own in rankings
            ]
    return systems


def our_systems(
    base: EncoderConfig,
    contexts: Iterable[ContextKind] = CONTEXTS,
    encoders: Iterable[str] = tuple(ENCODERS),
    max_positions: int | None = None,
) -> list[System]:
    """Return Cairn's own systems on the base configuration's landmark interval."""
    systems: list[System] = []
    base = replace(base, **UNDESCRIBED)
    for context in contexts:
        for encoder in encoders:
            config = varied(base, max_positions, use_context=context != "none", **ENCODERS[encoder])
            encoding = Encoding(encoder=config, context=context)
            systems += [
                System(name=f"{encoder}/{context}/{ranking}", encoding=encoding, ranking=ranking)
                for ranking in OUR_RANKINGS
            ]
    return systems


def configured_systems(base: EncoderConfig) -> list[System]:
    """Return the ways to rank with the base configuration exactly as it is.

    What an ingest with these settings gives: with token vectors unless they are left out. Where a language
    model describes chunks, rows without its lines stand beside.
    """
    context: ContextKind = "corpus" if base.use_context else "none"
    rankings = (*OUR_RANKINGS, *(LATE_RANKINGS if base.token_bytes else ()))
    settings = {"cairn": base}
    if base.describe:
        settings = {"undescribed": replace(base, **UNDESCRIBED), **settings}
    return [
        System(name=f"{name}/{ranking}", encoding=Encoding(encoder=own, context=context), ranking=ranking)
        for name, own in settings.items()
        for ranking in rankings
    ]


def given_systems(chosen: Mapping[str, Any], column: str, vector_dim: int) -> list[System]:
    """Return the ways to rank with the vectors that a set brings, and what a RAG pipeline builds from them.

    Baselines have the same pieces, with titles in front for BM25.
    """
    if "model" in chosen:
        raise ConfigError(
            f"vectors of --vector-column must come with those of queries, got --model {chosen['model']}; "
            "leave it out"
        )
    config = replace(EncoderConfig(**{**given_defaults(chosen), **chosen}), given_dims=vector_dim)
    require_given_fit(replace(config, token_bytes=0))  # whose query side is the set's own
    size = BASELINE_TOKENS[0]
    words = Encoding(encoder=EncoderConfig(landmark_interval=size), stride_tokens=size)
    given = Encoding(encoder=config, vector_column=column)
    return [
        System(name="bm25", encoding=words, ranking="bm25"),
        System(name="vectors/dense", encoding=given, ranking="dense"),
        System(name="vectors/convex", encoding=given, ranking="convex"),
        *(replace(system, encoding=given) for system in configured_systems(config)),
    ]


def select_systems(systems: Sequence[System], patterns: Sequence[str]) -> list[System]:
    """Keep systems whose name matches a pattern (``*``, ``?``), all without any; none to match is refused."""
    names = [system.name for system in systems]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ConfigError(f"no row of the table matches {shown(pattern)}{did_you_mean(pattern, names)}")
    kept = {name for pattern in patterns or ["*"] for name in fnmatch.filter(names, pattern)}
    return [system for system in systems if system.name in kept]


_SHARED_OPTIONS: Final = ("precision", "backend")
_MODEL_OPTIONS: Final = (
    *("model", "dims", "layers", "causal"),
    *("query_prefix", "document_prefix", "pool_prefix"),
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


def choose_systems(
    base: EncoderConfig,
    baseline: EncoderConfig,
    context: ContextConfig,
    patterns: Sequence[str],
    *,
    is_whole_table: bool,
) -> tuple[list[System], dict[str, str]]:
    """Return the systems whose names match a pattern, without those the models have no room or head for.

    Say why these were left out, too, by name. ``is_whole_table`` adds every encoder, with no, random and
    corpus context, ranked in every way. Settings as they were given must fit: all are checked here,
    before anything is encoded.
    """
    backbones = {config.model: load_cutter(config) for config in (base, baseline)}
    own, plain = backbones[base.model], backbones[baseline.model]
    require_encoder_fit(base, own)
    prefix_tokens = max(len(prefix.ids) for prefix in prefixes_of(baseline, plain))
    systems = baseline_systems(baseline, plain.max_positions, prefix_tokens)
    systems += our_systems(base, max_positions=own.max_positions) if is_whole_table else []
    left_out: dict[str, str] = {}
    for system in systems:
        backbone = backbones[system.encoding.encoder.model]
        try:
            require_encoder_fit(system.encoding.encoder, backbone)
            require_encoder_fit(row_settings(system.encoding, backbone), backbone)
            if system.reads("token states"):
                if is_endpoint(system.encoding.encoder.model):
                    raise ConfigError("an endpoint shows no states of tokens")
                if isinstance(backbone, LateBackbone):
                    raise ConfigError("a late-interaction model judges by its own token vectors")
                if backbone.of_queries is not None:
                    raise ConfigError("another model reads queries, whose tokens compare with no document's")
        except CairnError as error:
            left_out[system.name] = str(error)
    systems = [system for system in systems if system.name not in left_out]
    known = {system.encoding for system in systems if not system.is_baseline}
    systems += [system for system in configured_systems(base) if system.encoding not in known]
    chosen = select_systems(systems, patterns)
    for system in chosen:
        require_context_fit(IngestConfig(encoder=system.encoding.encoder, context=context), own)
    return chosen, left_out
