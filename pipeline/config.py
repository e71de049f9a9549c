"""Settings of every stage, as frozen dataclasses with units in their names.

``IngestConfig`` is what a run stores, resolved, in its manifest. Reading flags, environment and
``cairn.toml`` into these classes is the CLI's business, not this module's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, Final, Literal

from cairn.pipeline.errors import ConfigError
from cairn.pipeline.options import MAX_SEED, About, check_options, option
from cairn.pipeline.poolings import POOLINGS, PREFIX_POOLINGS, Attention, Pooling

Landmarks = Literal["fixed", "sentence", "structure"]
Precision = Literal["auto", "fp32", "bf16", "int8"]
Backend = Literal["torch", "openvino"]
IndexKind = Literal["auto", "flat", "ivf_sq8", "ivf_rabitq"]
Surrogate = Literal["static", "encoder"]
Tour = Literal["random", "greedy"]
SampleKind = Literal["topic", "module", "class", "function", "method", "distribution"]

DEFAULT_ROOT = "cairn-data"
"""Default folder of collections, in the working folder."""
BASE_MODEL = "all-MiniLM-L6-v2"
"""The transformer that comes as a package, as published; the defaults of :class:`EncoderConfig` are its."""

DEFAULT_MODEL = "cairn-minilm"
"""Default model of an ingest.

The base model with the landmark mixer trained for it, which ships with Cairn.
"""

WINDOW_TOKENS: Final[Mapping[Attention, int]] = {"chunk": 512, "full": 512, "landmark": 8_192}
"""How long a window is where nothing else is asked.

Landmark attention is linear in it and reads positions inside a chunk only.
"""

WINDOW_OVERLAP_TOKENS: Final = 128
"""What neighbouring windows share where nothing else is asked; half of a shorter window."""

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 100.0
"""Far beyond what helps any model: below, logits leave what bf16 sums; above, attention is a plain mean."""

MACHINE_SETTINGS: Final = frozenset({"model", "precision", "backend", "batch_tokens"})
"""Encoder settings that say where a model lies and how it runs.

No folder brings them, and no fingerprint has them. All others move vectors, and are in both.
"""

WITHOUT_CONTEXT: Final = {"use_context": False, "whitening": 0.0}
"""The encoder's settings under which no vector depends on a context."""

_SEED: Final = About(low=-MAX_SEED - 1, high=MAX_SEED)


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ConfigError(sentence)


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusConfig:
    """The columns of the source, and how large a batch may grow.

    ``metadata_columns`` = None keeps every other column whose type can be stored.
    """

    id_column: str = option("id", About("Column with the document id."))
    text_column: str = option("text", About("Column with the text."))
    title_column: str | None = option(
        None,
        About("Column with the title.", default_text="title, where there is one"),
    )
    query_column: str | None = option(
        None,
        About("Column with a typical query, for clustering.", default_text="query, if any"),
    )
    metadata_columns: tuple[str, ...] | None = option(
        None, About("Columns to keep for filters; repeat.", default_text="every other column")
    )
    batch_rows: int = option(1_024, About(low=1))
    batch_bytes: int = option(16 << 20, About(low=1))
    max_document_bytes: int = option(16 << 20, About(low=1))
    max_id_characters: int = option(1_024, About(low=1))

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """Asymmetric K-means over a sample of documents and their queries."""

    num_clusters: int | None = option(
        None, About("Clusters of the corpus.", low=1, high=65_536, default_text="from its size")
    )
    max_sample_documents: int = option(32_768, About(low=1))
    num_iterations: int = option(20, About("Iterations of K-means.", low=1, flag="--cluster-iterations"))
    num_redos: int = option(
        1, About("Attempts of K-means; the best is kept.", low=1, flag="--cluster-attempts")
    )
    surrogate: Surrogate = option("static", About("What clustering embeds with."))
    seed: int = option(0, _SEED)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextConfig:
    """The J documents the first stage embeds once (CDE §4.2)."""

    context_documents: int = option(512, About("Documents in the stored context.", low=1, high=65_536))
    max_document_tokens: int = option(256, About(low=1))
    seed: int = option(0, _SEED)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderConfig:
    """The second stage. All options but :data:`MACHINE_SETTINGS` move vectors.

    ``landmark_interval`` counts a chunk's own tokens; its landmark comes on top and counts within the window.
    It is the most that a chunk may hold, whatever ``landmarks`` is, and the k of ``mean_at_k``.
    ``window_tokens`` = 0 takes the attention's own default, see ``WINDOW_TOKENS``; short windows share half.
    ``temperature`` divides every attention logit (TempScale); 1.0 leaves the model as it was trained.
    ``temperature_by_length`` holds for rows (with attention landmark: windows) of at least so many tokens;
    shorter ones keep ``temperature``. ``causal`` keeps a decoder's causal mask; False lets every token see
    the whole row (NV-Embed §3.1). Prefixes are read and not pooled, unless ``pool_prefix`` takes them into
    the mean, as models trained by Sentence-Transformers expect. ``whitening`` is the exponent of
    :class:`cairn.pipeline.context.whitening.Whitening`, whose sample the context brings.
    """

    model: str = option(
        BASE_MODEL,
        About(
            "Encoder: a name, cached or embedded, or a folder.",
            default_text=DEFAULT_MODEL,
            variable="CAIRN_MODEL",
        ),
    )
    pooling: Pooling = option("mean", About("What a chunk's vector is pooled from."))
    attention: Attention = option(
        "chunk", About("What a token sees: its chunk, window, or chunk and landmarks.")
    )
    window_tokens: int = option(
        0,
        About(
            "Tokens of a window, at most, for full and landmark; 0: the default.",
            low=0,
            default_text="512; landmark: 8192",
        ),
    )
    window_overlap_tokens: int = WINDOW_OVERLAP_TOKENS
    landmarks: Landmarks = option(
        "fixed", About("Where chunks end: at words, sentences, or headings and blocks.")
    )
    landmark_interval: int = option(64, About("Tokens of a chunk between two landmarks, at most.", low=8))
    whole_text_tokens: int = option(
        0,
        About(
            "A text of at most so many tokens is one chunk.", low=0, default_text="as the model says, else 0"
        ),
    )
    temperature: float = option(
        1.0,
        About(
            "Divide attention logits by this (TempScale).", low=LOWEST_TEMPERATURE, high=HIGHEST_TEMPERATURE
        ),
    )
    query_temperature: float | None = option(
        None,
        About(
            "The same for queries alone.",
            low=LOWEST_TEMPERATURE,
            high=HIGHEST_TEMPERATURE,
            default_text="as documents",
        ),
    )
    temperature_by_length: tuple[tuple[int, float], ...] = option(
        (), About("The same for rows of so many tokens on: 128:0.95,512:0.9.")
    )
    dims: int | None = option(
        None,
        About("Keep the first so many dimensions of every vector (Matryoshka).", low=1, default_text="all"),
    )
    layers: int | None = option(
        None, About("Run the first so many layers of the model (Matryoshka).", low=1, default_text="all")
    )
    causal: bool = option(
        False,
        About(
            "What tokens of a decoder see: the past, or all.",
            default_text="bidirectional",
            off_flag="--bidirectional",
        ),
    )
    query_prefix: str = option("", About("Text before every query, such as 'query: '; read, never pooled."))
    document_prefix: str = option("", About("Text before every row of a document; read, never pooled."))
    pool_prefix: bool = option(
        False,
        About(
            "Take prefixes into the mean.",
            default_text="as the model's folder says",
            off_flag="--no-pool-prefix",
        ),
    )
    use_context: bool = option(
        False,
        About(
            "Let the encoder read the stored context.",
            default_text="as the model says",
            off_flag="--no-context",
        ),
    )
    whitening: float = option(
        0.0,
        About(
            "Even out vectors along the context's principal axes: 0 not at all, 1 wholly.",
            low=0,
            high=1,
            default_text="as the model says, else 0",
        ),
    )
    precision: Precision = option("auto", About("Arithmetic of the encoder; int8 needs --backend openvino."))
    backend: Backend = option("torch", About("What runs the encoder; openvino is an extra."))
    batch_tokens: int = option(1_024, About(low=1))

    @property
    def needs_context(self) -> bool:
        """Whether any vector depends on the context."""
        return self.use_context or self.whitening > 0

    @property
    def without_context(self) -> EncoderConfig:
        """Return the same settings without a context."""
        return replace(self, **WITHOUT_CONTEXT)

    @property
    def longest_chunk_tokens(self) -> int:
        """Return the most tokens a chunk may have."""
        return max(self.landmark_interval, self.whole_text_tokens)

    def __post_init__(self) -> None:
        check_options(self)
        _require(
            self.backend == "torch" or self.attention != "landmark",
            f"backend {self.backend} must go with attention chunk or full, got landmark; choose backend "
            "torch",
        )
        _require(
            self.precision != "int8" or self.backend == "openvino",
            f"precision int8 must go with backend openvino, got {self.backend}; add --backend openvino, or "
            "choose another precision",
        )
        self._settle_window()
        _require(
            self.pooling in POOLINGS[self.attention],
            f"pooling {self.pooling} must go with attention {_attentions_with(self.pooling)}, got "
            f"{self.attention}; "
            f"with attention {self.attention} choose one of {', '.join(POOLINGS[self.attention])}",
        )
        object.__setattr__(self, "temperature_by_length", _temperature_steps(self.temperature_by_length))
        _require(
            not self.pool_prefix or (self.attention != "full" and self.pooling in PREFIX_POOLINGS),
            "pool_prefix must go with attention chunk or landmark and pooling "
            f"{' or '.join(PREFIX_POOLINGS)}, "
            f"got attention {self.attention} and pooling {self.pooling}; leave it out",
        )
        for name, prefix in (("query_prefix", self.query_prefix), ("document_prefix", self.document_prefix)):
            _require(
                is_encodable(prefix),
                f"{name} must be valid Unicode, got {prefix!r} with a lone surrogate; write it in UTF-8",
            )

    def _settle_window(self) -> None:
        """Take the attention's own window where none is chosen, and check what has to fit in it."""
        default_window = WINDOW_TOKENS[self.attention]
        if self.window_tokens == 0:
            object.__setattr__(self, "window_tokens", default_window)
        if self.window_overlap_tokens == WINDOW_OVERLAP_TOKENS:
            object.__setattr__(self, "window_overlap_tokens", default_overlap(self.window_tokens))
        _require(
            self.landmark_interval + 2 <= self.window_tokens,
            f"landmark_interval must fit the window of {self.window_tokens} tokens with [CLS] and its "
            f"landmark, got {self.landmark_interval}; choose a smaller landmark_interval, or a larger "
            "window_tokens",
        )
        _require(
            0 <= self.whole_text_tokens <= self.window_tokens - 2,
            f"whole_text_tokens must lie between 0 and {self.window_tokens - 2}, the room in a window of "
            f"{self.window_tokens} tokens, got {self.whole_text_tokens}",
        )
        _require(
            0 <= self.window_overlap_tokens <= self.window_tokens // 2,
            f"window_overlap_tokens must lie between 0 and half the window of {self.window_tokens} tokens, "
            f"got {self.window_overlap_tokens}",
        )


def default_overlap(window_tokens: int) -> int:
    """Return how many tokens neighbouring windows of this length share where nothing else is asked."""
    return min(WINDOW_OVERLAP_TOKENS, window_tokens // 2)


def is_encodable(text: str) -> bool:
    """Whether a text is valid Unicode.

    Bytes a terminal could not decode become lone surrogates, which no tokenizer takes.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _temperature_steps(steps: Any) -> tuple[tuple[int, float], ...]:
    """Return pairs of a number of tokens and a temperature, which are lists when read from JSON."""
    try:
        pairs = tuple((length, step) for length, step in steps)
    except (TypeError, ValueError):
        pairs = None
    is_numbers = pairs is not None and all(
        not isinstance(length, bool) and isinstance(length, Integral) and isinstance(step, Real)
        for length, step in pairs
    )
    if pairs is None or not is_numbers:
        raise ConfigError(
            "temperature_by_length must be pairs of a number of tokens and a temperature, got "
            f"{steps!r}; write ((128, 0.95), (512, 0.9))"
        )
    lengths = [length for length, _ in pairs]
    _require(
        all(LOWEST_TEMPERATURE <= step <= HIGHEST_TEMPERATURE for _, step in pairs)
        and all(low < high for low, high in pairwise([0, *lengths])),
        "temperature_by_length must be positive numbers of tokens in ascending order, each with a "
        f"temperature between {LOWEST_TEMPERATURE:g} and {HIGHEST_TEMPERATURE:g}, got "
        f"{', '.join(f'{length}:{step}' for length, step in pairs)}; write 128:0.95,512:0.9",
    )
    return pairs


def _attentions_with(pooling: Pooling) -> str:
    return " or ".join(attention for attention, poolings in POOLINGS.items() if pooling in poolings)


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexConfig:
    """Derived FAISS files.

    ``auto`` takes Flat up to ``flat_max_vectors``, IVF with SQ8 beyond, IVF with RaBitQ refined by SQ8 from
    ``rabitq_min_vectors``.
    """

    index_kind: IndexKind = option("auto", About("FAISS index.", default_text="auto, by size"))
    flat_max_vectors: int = 20_000
    rabitq_min_vectors: int = 5_000_000
    seed: int = option(0, _SEED)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class IngestConfig:
    """One resolved ingest; ``remembered_corpus`` names columns for later runs, None as for this one."""

    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    sync: bool = option(False, About("Delete documents that the sources no longer hold."))
    reread: bool = option(
        False, About("Read every source file again, also those that have not changed since the last ingest.")
    )
    shard_characters: int = option(1 << 18, About(low=1))
    remembered_corpus: CorpusConfig | None = None

    def __post_init__(self) -> None:
        check_options(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings of this run as plain JSON values."""
        return {name: _as_json(value) for name, value in asdict(self).items() if name != "remembered_corpus"}


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_json(item) for name, item in value.items()}
    return [_as_json(item) for item in value] if isinstance(value, tuple) else value
