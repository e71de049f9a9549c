"""Settings of every stage, as frozen dataclasses with units in their names.

``IngestConfig`` is what a run stores, resolved, in its manifest. Reading flags, environment and
``cairn.toml`` into these classes is the CLI's business, not this module's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, Final, Literal, get_args

from pipeline.errors import ConfigError
from pipeline.poolings import POOLINGS, PREFIX_POOLINGS, Attention, Pooling

Landmarks = Literal["fixed", "sentence"]
Precision = Literal["auto", "fp32", "bf16"]
Backend = Literal["torch", "openvino"]
IndexKind = Literal["auto", "flat", "ivf_sq8", "ivf_rabitq"]
Surrogate = Literal["static", "encoder"]

DEFAULT_ROOT = "cairn-data"
"""Folder that collections live under where nobody says otherwise, in the working folder."""

BASE_MODEL = "all-MiniLM-L6-v2"
"""The transformer that comes as a package, as published; the defaults of :class:`EncoderConfig` are its."""

DEFAULT_MODEL = "cairn-minilm"
"""What an ingest takes where nobody says otherwise.

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


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ConfigError(sentence)


def _require_one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    _require(value in allowed, f"{name} must be one of {', '.join(allowed)}, got {value!r}")


_KINDS: Final[Mapping[str, tuple[type, str]]] = {
    "str": (str, "text"),
    "bool": (bool, "true or false"),
    "int": (Integral, "a whole number"),
    "float": (Real, "a number"),
}


def require_kinds(config: Any) -> None:
    """Refuse a value of another type than its field's, which a caller in Python or a settings file may give.

    ``config`` is a dataclass; fields of other types than those above, and tuples of them, are its own
    business.
    """
    for item in fields(config):
        name, _, optional = str(item.type).partition(" | ")
        is_list = name.startswith("tuple[") and name.endswith(", ...]")
        kind, words = _KINDS.get(name.removeprefix("tuple[").removesuffix(", ...]"), (object, ""))
        value: Any = getattr(config, item.name)
        if kind is object or (value is None and optional == "None"):
            continue
        values: Sequence[Any] = (
            (value,) if not is_list else value if isinstance(value, (list, tuple)) else (None,)
        )
        is_kind = all(isinstance(one, kind) and (kind is bool or not isinstance(one, bool)) for one in values)
        _require(
            is_kind, f"{item.name} must be {f'a list, each {words}' if is_list else words}, got {value!r}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusConfig:
    """Which columns of the source mean what, and how large a batch may grow.

    ``title_column``, ``query_column`` = None: taken as ``title`` and ``query`` when the source has a string
    column of that name. ``metadata_columns`` = None keeps every other column whose type can be stored.
    """

    id_column: str = "id"
    text_column: str = "text"
    title_column: str | None = None
    query_column: str | None = None
    metadata_columns: tuple[str, ...] | None = None
    batch_rows: int = 1_024
    batch_bytes: int = 16 << 20
    max_document_bytes: int = 16 << 20
    max_id_characters: int = 1_024

    def __post_init__(self) -> None:
        require_kinds(self)
        _require(self.batch_rows > 0, f"batch_rows must be positive, got {self.batch_rows}")
        _require(self.batch_bytes > 0, f"batch_bytes must be positive, got {self.batch_bytes}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """Asymmetric K-means: ``num_clusters`` = None chooses it from the size of the corpus."""

    num_clusters: int | None = None
    max_sample_documents: int = 32_768
    num_iterations: int = 20
    num_redos: int = 1
    surrogate: Surrogate = "static"
    seed: int = 0

    def __post_init__(self) -> None:
        require_kinds(self)
        _require(
            self.num_clusters is None or self.num_clusters > 0,
            f"num_clusters must be positive, got {self.num_clusters}",
        )
        _require(
            self.max_sample_documents > 0,
            f"max_sample_documents must be positive, got {self.max_sample_documents}",
        )
        _require(self.num_iterations > 0, f"num_iterations must be positive, got {self.num_iterations}")
        _require_one_of("surrogate", self.surrogate, ("static", "encoder"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextConfig:
    """The J documents the first stage embeds once (CDE §4.2)."""

    num_documents: int = 512
    max_document_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        require_kinds(self)
        _require(
            self.num_documents > 0,
            f"the number of context documents must be positive, got {self.num_documents}",
        )
        _require(
            self.max_document_tokens > 0,
            f"max_document_tokens must be positive, got {self.max_document_tokens}",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderConfig:
    """The second stage: everything here but ``precision``, ``backend`` and ``batch_tokens`` moves vectors and is in its fingerprint.

    ``landmark_interval`` counts a chunk's own tokens; its landmark comes on top and counts within the window.
    A text of at most ``whole_text_tokens`` is one chunk, whatever the interval: a base model embeds a short
    text better whole. ``max_window_tokens`` = 0 takes the attention's own default, see ``WINDOW_TOKENS``;
    short windows share half. With ``landmarks`` = sentence it is the most a chunk of whole sentences may
    hold; it is the k of ``mean_at_k``. ``temperature`` divides every attention logit (TempScale); 1.0 leaves
    the model as it was trained. ``temperature_by_length`` gives rows, with attention landmark windows, of so
    many tokens and more another one, (128, 0.95), (512, 0.9), shorter ones keeping ``temperature``;
    ``query_temperature`` serves queries of any length, None encodes them as documents. ``truncate_dim`` keeps
    the first dimensions of every vector, ``num_layers`` runs the first layers (Matryoshka); None takes all.
    ``causal`` keeps a decoder's causal mask, for those trained with it; False lets every token see the whole
    row (NV-Embed §3.1). ``query_prefix`` and ``document_prefix`` stand before every query and every row of a
    document, and are pooled from nowhere, unless ``pool_prefix`` takes them into the mean, as models trained
    by Sentence-Transformers expect.
    """

    model: str = BASE_MODEL
    pooling: Pooling = "mean"
    attention: Attention = "chunk"
    landmark_interval: int = 64
    whole_text_tokens: int = 0
    max_window_tokens: int = 0
    window_overlap_tokens: int = WINDOW_OVERLAP_TOKENS
    temperature: float = 1.0
    query_temperature: float | None = None
    temperature_by_length: tuple[tuple[int, float], ...] = ()
    use_context: bool = False
    landmarks: Landmarks = "fixed"
    truncate_dim: int | None = None
    num_layers: int | None = None
    causal: bool = False
    query_prefix: str = ""
    document_prefix: str = ""
    pool_prefix: bool = False
    precision: Precision = "auto"
    backend: Backend = "torch"
    batch_tokens: int = 1_024

    @property
    def longest_chunk_tokens(self) -> int:
        """Return the most tokens a chunk may have."""
        return max(self.landmark_interval, self.whole_text_tokens)

    def __post_init__(self) -> None:
        require_kinds(self)
        _require_one_of("pooling", self.pooling, get_args(Pooling))
        _require_one_of("attention", self.attention, get_args(Attention))
        _require_one_of("landmarks", self.landmarks, get_args(Landmarks))
        _require_one_of("precision", self.precision, ("auto", "fp32", "bf16"))
        _require_one_of("backend", self.backend, get_args(Backend))
        _require(
            self.backend == "torch" or self.attention != "landmark",
            f"backend {self.backend} must go with attention chunk or full, got landmark; choose backend "
            "torch",
        )
        default_window = WINDOW_TOKENS[self.attention]
        _require(
            self.max_window_tokens >= 0,
            f"max_window_tokens must be positive, got {self.max_window_tokens}; leave it out to take "
            f"{default_window}",
        )
        if self.max_window_tokens == 0:
            object.__setattr__(self, "max_window_tokens", default_window)
        if self.window_overlap_tokens == WINDOW_OVERLAP_TOKENS:
            object.__setattr__(self, "window_overlap_tokens", default_overlap(self.max_window_tokens))
        _require(
            self.pooling in POOLINGS[self.attention],
            f"pooling {self.pooling} must go with attention {_attentions_with(self.pooling)}, got "
            f"{self.attention}; "
            f"with attention {self.attention} choose one of {', '.join(POOLINGS[self.attention])}",
        )
        _require(
            self.landmark_interval >= 8,
            f"landmark_interval must be at least 8 tokens, got {self.landmark_interval}",
        )
        _require(
            self.landmark_interval + 2 <= self.max_window_tokens,
            f"landmark_interval must fit the window of {self.max_window_tokens} tokens with [CLS] and "
            "its landmark, "
            f"got {self.landmark_interval}; choose a smaller landmark_interval, or a larger "
            "max_window_tokens",
        )
        _require(
            0 <= self.whole_text_tokens <= self.max_window_tokens - 2,
            f"whole_text_tokens must lie between 0 and {self.max_window_tokens - 2}, what the window of "
            f"{self.max_window_tokens} tokens "
            f"has room for, got {self.whole_text_tokens}",
        )
        _require(
            0 <= self.window_overlap_tokens <= self.max_window_tokens // 2,
            f"window_overlap_tokens must lie between 0 and half the window of {self.max_window_tokens} "
            "tokens, "
            f"got {self.window_overlap_tokens}",
        )
        _require(
            _is_temperature(self.temperature),
            f"temperature must lie between {_TEMPERATURES}, got {self.temperature}",
        )
        _require(
            self.query_temperature is None or _is_temperature(self.query_temperature),
            f"query_temperature must lie between {_TEMPERATURES}, got {self.query_temperature}; leave it "
            "out to take the documents'",
        )
        object.__setattr__(self, "temperature_by_length", _temperature_steps(self.temperature_by_length))
        lengths = [length for length, _ in self.temperature_by_length]
        _require(
            all(_is_temperature(step) for _, step in self.temperature_by_length)
            and all(low < high for low, high in pairwise([0, *lengths])),
            "temperature_by_length must be positive numbers of tokens in ascending order, each with a "
            "temperature between "
            f"{_TEMPERATURES}, got "
            f"{', '.join(f'{length}:{step}' for length, step in self.temperature_by_length)}; "
            "write 128:0.95,512:0.9",
        )
        _require(
            self.truncate_dim is None or self.truncate_dim > 0,
            "dims (truncate_dim) must lie between 1 and the model's dimensions, got "
            f"{self.truncate_dim}; leave it out to keep all",
        )
        _require(
            self.num_layers is None or self.num_layers > 0,
            f"layers (num_layers) must lie between 1 and the model's layers, got {self.num_layers}; "
            "leave it out to run all",
        )
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
        _require(self.batch_tokens > 0, f"batch_tokens must be positive, got {self.batch_tokens}")


_TEMPERATURES: Final = f"{LOWEST_TEMPERATURE:g} and {HIGHEST_TEMPERATURE:g}"


def default_overlap(max_window_tokens: int) -> int:
    """Return how many tokens neighbouring windows of this length share where nothing else is asked."""
    return min(WINDOW_OVERLAP_TOKENS, max_window_tokens // 2)


def is_encodable(text: str) -> bool:
    """Whether a text is valid Unicode.

    Bytes a terminal could not decode become lone surrogates, which no tokenizer takes.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_temperature(value: float) -> bool:
    return LOWEST_TEMPERATURE <= value <= HIGHEST_TEMPERATURE


def _temperature_steps(steps: Any) -> tuple[tuple[int, float], ...]:
    """Return pairs of a number of tokens and a temperature, which are lists when read from JSON."""
    try:
        pairs = tuple((length, step) for length, step in steps)
    except (TypeError, ValueError):
        pairs = None
    is_numbers = pairs is not None and all(
        isinstance(length, Integral) and isinstance(step, Real) for length, step in pairs
    )
    if pairs is None or not is_numbers:
        raise ConfigError(
            "temperature_by_length must be pairs of a number of tokens and a temperature, got "
            f"{steps!r}; write ((128, 0.95), (512, 0.9))"
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

    kind: IndexKind = "auto"
    flat_max_vectors: int = 20_000
    rabitq_min_vectors: int = 5_000_000
    seed: int = 0

    def __post_init__(self) -> None:
        require_kinds(self)
        _require_one_of("index kind", self.kind, ("auto", "flat", "ivf_sq8", "ivf_rabitq"))


@dataclass(frozen=True, kw_only=True, slots=True)
class IngestConfig:
    """One resolved ingest: what ``runs/*.json`` and the manifest record."""

    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    context: ContextConfig = field(default_factory=ContextConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    index: IndexConfig = field(default_factory=IndexConfig)
    sync: bool = False
    shard_characters: int = 1 << 18

    def __post_init__(self) -> None:
        require_kinds(self)
        _require(self.shard_characters > 0, f"shard_characters must be positive, got {self.shard_characters}")

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain JSON values, equal to what a manifest gives back."""
        return {name: _as_json(value) for name, value in asdict(self).items()}


def _as_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _as_json(item) for name, item in value.items()}
    return [_as_json(item) for item in value] if isinstance(value, tuple) else value
