"""Settings of every stage, as frozen dataclasses with units in their names.

``IngestConfig`` is what a run stores, resolved, in its manifest. Reading flags, environment and
``cairn.toml`` into these classes is the CLI's business, not this module's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from cairn.pipeline.errors import ConfigError
from cairn.pipeline.options import MAX_SEED, About, check_options, option
from cairn.pipeline.poolings import POOLINGS, PREFIX_POOLINGS, Attention, Pooling

Landmarks = Literal["fixed", "sentence", "structure"]
Precision = Literal["auto", "fp32", "bf16", "int8"]
Backend = Literal["torch", "openvino"]
IndexKind = Literal["auto", "flat", "ivf_sq8", "ivf_rabitq"]
IndexDevice = Literal["auto", "cpu", "gpu"]
Surrogate = Literal["static", "encoder"]
# fmt: off
Language = Literal[
    "auto", "none", "am", "ar", "be", "bg", "bn", "ca", "cs", "da", "de", "el", "en", "eo", "es", "et",
    "eu", "fa", "fi", "fr", "ga", "gu", "he", "hi", "hu", "hy", "id", "it", "ja", "ka", "km", "kn", "ko",
    "lo", "lt", "mk", "ml", "mr", "my", "ne", "nl", "no", "pa", "pl", "pt", "ro", "ru", "si", "sr", "sv",
    "ta", "te", "th", "tr", "uk", "ur", "vi", "yi", "zh",
]
# fmt: on
"""What words are counted as: a language of ISO 639-1, that of each text (auto), or as they stand (none)."""
SampleKind = Literal["topic", "module", "class", "function", "method"]

DEFAULT_ROOT = "cairn-data"
"""Default folder of collections, in the working folder."""
BASE_MODEL = "all-MiniLM-L6-v2"
"""The transformer that comes as a package, as published; the defaults of :class:`EncoderConfig` are its."""

DEFAULT_MODEL = "cairn-minilm"
"""Default model of an ingest.

The base model with the landmark mixer trained for it, which ships with Cairn.
"""

LANDMARK_MODEL = "cairn-lmk"
"""The base model taught to pool landmarks, which ships with Cairn, too."""

WINDOW_TOKENS: Final = 512
"""How long a window is where nothing else is asked."""

WINDOW_OVERLAP_TOKENS: Final = 128
"""What neighbouring windows share where nothing else is asked; half of a shorter window."""

LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.01, 100.0
"""Far beyond what helps any model: below, logits leave what bf16 sums; above, attention is a plain mean."""

MACHINE_SETTINGS: Final = frozenset(
    {"model", "precision", "backend", "batch_tokens", "token_bytes", "endpoint_requests", "endpoint_price"}
    | {"describe", "describe_model", "describe_characters", "sparse_model"}
)
"""Encoder settings that say where a model lies, how it runs and what is kept of its tokens.

No folder brings them, and no fingerprint has them, but for what describes chunks. All others move vectors,
and are in both.
"""

ABOUT_INDEX_DEVICE: Final = About(
    "Where FAISS computes; auto: on a GPU where faiss-gpu finds one.",
    default_text="auto",
    variable="CAIRN_INDEX_DEVICE",
)

NO_MODEL: Final = "none"
"""What is called the model where documents bring their vectors and nothing encodes queries."""

TOKEN_BYTES: Final = 24
"""What an ingest keeps of a token where nothing else is asked; :class:`EncoderConfig` alone keeps nothing."""

TITLE_TOKENS: Final = 32
"""Of a title, what an ingest reads before each chunk, where a model brings no way of its own."""

LINE_TOKENS: Final = 64
"""Of the line that describes a chunk, what a model in this process reads before it."""

WHOLE_TEXT_TOKENS: Final = 128
"""A text of at most so many tokens is one chunk to such a model: two halves of an abstract rank worse."""

UNDESCRIBED: Final = {"describe": None, "describe_model": ""}
"""The encoder's settings under which no chunk is described."""

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
    vector_column: str | None = option(
        None,
        About(
            "Column with the documents' own vectors, one each or chunks with spans; --model encodes queries.",
            default_text="none",
        ),
    )
    metadata_columns: tuple[str, ...] | None = option(
        None, About("Columns to keep for filters; repeat.", default_text="every other column")
    )
    id_prefix: bool = option(False, About("Begin the ids of files with the name of their source's folder."))
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

    ``landmark_interval`` counts a chunk's own tokens; its landmark comes on top and counts within the
    window. It is the most that a chunk may hold, whatever ``landmarks`` is, and the k of ``mean_at_k``.
    Windows of less than twice ``window_overlap_tokens`` share half where nothing else is asked. A title at
    the head of a row is read and not pooled, and a landmark of its own ends it. ``temperature`` divides
    every attention logit (TempScale); 1.0 leaves the model as it was trained. ``causal`` keeps a decoder's
    causal mask; False lets every token see the whole row (NV-Embed §3.1). Prefixes are read and not pooled,
    unless ``pool_prefix`` takes them and titles into the mean, as models trained by Sentence-Transformers
    expect. ``given_dims`` is the width of the vectors that documents bring, 0 before they are read, None
    where the model makes them.
    """

    model: str = option(
        BASE_MODEL,
        About(
            "Encoder: a packaged or cached name, a folder, or an endpoint: https://HOST/v1/embeddings#NAME.",
            default_text=DEFAULT_MODEL,
            variable="CAIRN_MODEL",
        ),
    )
    pooling: Pooling = option("mean", About("What a chunk's vector is pooled from."))
    attention: Attention = option("chunk", About("What a token sees: its chunk, or its window."))
    window_tokens: int = option(WINDOW_TOKENS, About("Tokens of a window of attention full, at most.", low=1))
    window_overlap_tokens: int = WINDOW_OVERLAP_TOKENS
    landmarks: Landmarks = option(
        "fixed", About("Where chunks end: at words, sentences, or headings and blocks.")
    )
    landmark_interval: int = option(64, About("Tokens of a chunk between two landmarks, at most.", low=8))
    title_tokens: int = option(
        0,
        About(
            "Tokens of a document's title at the head of each of its rows; 0: none.",
            low=0,
            default_text=f"as the model says, else {TITLE_TOKENS}",
        ),
    )
    document_context: int = option(
        0,
        About(
            "Landmarks of a document's first window that its others read as input vectors, at most; 0: none.",
            low=0,
            high=1_000,
            default_text="as the model says",
        ),
    )
    whole_text_tokens: int = option(
        0,
        About(
            "A text of at most so many tokens is one chunk.",
            low=0,
            default_text=f"as the model says, else {WHOLE_TEXT_TOKENS}",
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
    precision: Precision = option("auto", About("Arithmetic of the encoder; int8 needs --backend openvino."))
    backend: Backend = option("torch", About("What runs the encoder; openvino is an extra."))
    token_bytes: int = option(
        0,
        About(
            "Bytes of a token's vector, at most, for late interaction; 0: none.",
            low=0,
            high=256,
            default_text=f"{TOKEN_BYTES}",
        ),
    )
    sparse_model: str | None = option(
        None,
        About(
            "Learned sparse encoder, by name or folder, whose weights rank beside BM25.", default_text="none"
        ),
    )
    batch_tokens: int = option(1_024, About(low=1))
    given_dims: int | None = None
    endpoint_requests: int = option(8, About("Requests to an endpoint at once.", low=1, high=256))
    endpoint_price: float = option(
        0.0,
        About("Price of a million tokens of an endpoint, for --dry-run.", low=0, default_text="unknown"),
    )
    describe: str | None = option(
        None,
        About(
            "Server that writes a line on each chunk: https://HOST/v1/chat/completions.",
            default_text="none",
            variable="CAIRN_DESCRIBE",
        ),
    )
    describe_model: str = option("", About("What that server calls its language model.", default_text="none"))
    describe_characters: int = option(
        24_000, About("Characters of a document that its language model reads, at most.", low=1_000)
    )

    @property
    def head_tokens(self) -> int:
        """Return the most tokens that stand between a prefix and a chunk: its title and its line."""
        return self.title_tokens + (LINE_TOKENS if self.describe else 0)

    @property
    def shows_states(self) -> bool:
        """Say whether the encoder shows states of tokens: no server does, and no vectors that are given."""
        return self.given_dims is None and not self.model.startswith(("https://", "http://"))

    @property
    def longest_chunk_tokens(self) -> int:
        """Return the most tokens a chunk may have."""
        return max(self.landmark_interval, self.whole_text_tokens)

    def __post_init__(self) -> None:
        check_options(self)
        _require(
            self.model != NO_MODEL or self.given_dims is not None,
            f"model {NO_MODEL} must go with documents that bring vectors, got none; name their column with "
            "--vector-column, or choose a model",
        )
        _require(
            self.precision != "int8" or self.backend == "openvino",
            f"precision int8 must go with backend openvino, got {self.backend}; add --backend openvino, or "
            "choose another precision",
        )
        self._settle_window()
        _require(
            not self.describe or self.attention == "chunk",
            f"describe must go with attention chunk, whose rows have room for a line, got {self.attention}; "
            "choose another model or attention, or leave it out",
        )
        _require(
            bool(self.describe) or not self.describe_model,
            f"describe_model must go with describe, got {self.describe_model!r} alone; name the server, too",
        )
        _require(
            not self.document_context or self.attention == "full",
            f"document_context must go with attention full, whose rows are windows, got {self.attention}; "
            "leave it out",
        )
        _require(
            self.pooling in POOLINGS[self.attention],
            f"pooling {self.pooling} must go with attention {_attentions_with(self.pooling)}, got "
            f"{self.attention}; "
            f"with attention {self.attention} choose one of {', '.join(POOLINGS[self.attention])}",
        )
        _require(
            not self.pool_prefix or (self.attention != "full" and self.pooling in PREFIX_POOLINGS),
            "pool_prefix must go with attention chunk and pooling "
            f"{' or '.join(PREFIX_POOLINGS)}, "
            f"got attention {self.attention} and pooling {self.pooling}; leave it out",
        )
        for name, prefix in (("query_prefix", self.query_prefix), ("document_prefix", self.document_prefix)):
            _require(
                is_encodable(prefix),
                f"{name} must be valid Unicode, got {prefix!r} with a lone surrogate; write it in UTF-8",
            )

    def _settle_window(self) -> None:
        """Check what has to fit in a window."""
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


def _attentions_with(pooling: Pooling) -> str:
    return " or ".join(attention for attention, poolings in POOLINGS.items() if pooling in poolings)


MAX_PARTITIONS: Final = 1_024


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexConfig:
    """Derived FAISS files.

    ``auto`` takes Flat up to ``flat_max_vectors``, IVF with SQ8 beyond, IVF with RaBitQ refined by SQ8 from
    ``rabitq_min_vectors``.
    """

    index_kind: IndexKind = option("auto", About("FAISS index.", default_text="auto, by size"))
    language: Language = option(
        "auto",
        About("Language whose stems BM25 counts, without its function words.", default_text="auto, by text"),
    )
    partitions: int = option(
        1,
        About(
            "Folders that a new collection is cut into, each with the documents of some ids.",
            low=1,
            high=MAX_PARTITIONS,
        ),
    )
    flat_max_vectors: int = 20_000
    rabitq_min_vectors: int = 5_000_000
    seed: int = option(0, _SEED)

    def __post_init__(self) -> None:
        check_options(self)


MAX_DELETED: Final = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class IngestConfig:
    """One resolved ingest; ``remembered_corpus`` names columns for later runs, None as for this one."""

    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    sync: bool = option(False, About("Delete documents that the sources no longer hold."))
    max_deleted: float = option(
        MAX_DELETED, About("Largest share of the documents that --sync may delete.", low=0, high=1)
    )
    reread: bool = option(
        False, About("Read every source file again, also those that have not changed since the last ingest.")
    )
    index_device: IndexDevice | None = option(None, ABOUT_INDEX_DEVICE)
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
