"""Documents that bring their vectors: what is encoded is the queries, by the model that made the vectors.

A document's own vector stands for each passage that the packaged tokenizer cuts from its text, so that words
alone tell its passages apart. Where chunks have vectors, the document's is their normalised mean. A passage
reaches from the start of its chunk to that of the next one, the first from the text's beginning and the last
to its end: what chunks share is shown once, and what lies between two of them is found by its words.

There are no context and no landmarks, and token vectors only of the packaged model, where they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from cairn.pipeline.config import MACHINE_SETTINGS, NO_MODEL, EncoderConfig
from cairn.pipeline.corpus.given_vectors import WHOLE, vector_records
from cairn.pipeline.encode.documents import (
    DocumentEncoder,
    EncodedDocuments,
    TokenReader,
    cut_into_chunks,
    document_vectors,
    hashed_settings,
    shown_chunks,
)
from cairn.pipeline.encode.endpoint_requests import CLOSE_SECONDS
from cairn.pipeline.encode.tokenization import tokenize
from cairn.pipeline.errors import ConfigError, UsageError
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.folders.checkpoint import read_tokenizer
from cairn.pipeline.model.folders.names import embedded_folder
from cairn.pipeline.token_vectors.codebook import TokenCoder
from cairn.pipeline.types import QueryTokens
from jaxtyping import Float32
from tokenizers import Tokenizer

if TYPE_CHECKING:
    from cairn.pipeline.encode.endpoint import EndpointEncoder

_OF_DOCUMENTS: Final = (
    "title_tokens",
    "document_prefix",
    "use_context",
    "document_context",
    "describe",
)
"""Settings of what a model does with documents."""
_OF_CUTTING: Final = frozenset(
    {"given_dims", "landmarks", "landmark_interval", "whole_text_tokens", "window_tokens",
     "window_overlap_tokens", *MACHINE_SETTINGS} - {"token_bytes", "describe"}
)  # fmt: skip
"""Settings that need no model."""


def require_given_fit(config: EncoderConfig) -> None:
    """Raise :class:`ConfigError` for settings that need a model where there is none, or encode documents."""
    default = EncoderConfig()
    names = _OF_DOCUMENTS
    if config.model == NO_MODEL:
        names = tuple(field.name for field in fields(config) if field.name not in _OF_CUTTING)
    for name in names:
        if getattr(config, name) != getattr(default, name):
            raise ConfigError(
                f"{name} must go with a model that encodes documents, got it with --vector-column; given "
                "vectors have no context and no landmarks, and token vectors only where --model names what "
                "encodes queries; leave it out"
            )


class GivenEncoder:
    """One of :mod:`cairn.pipeline.encode.encoder`; ``queries`` is what encodes them, None where nothing does.

    Without one a query's vector is zero, and words alone rank.
    """

    def __init__(
        self,
        config: EncoderConfig,
        queries: DocumentEncoder | EndpointEncoder | None,
        token_codebook: TokenCoder | None = None,
    ) -> None:
        self.token_codebook, self._tokens = token_codebook, TokenReader(config, token_codebook)
        assert config.given_dims, "the width is known once the corpus was read"
        self.config, self.queries = config, queries
        self.vector_dim = config.given_dims
        if queries is not None and queries.vector_dim != self.vector_dim:
            raise ConfigError(
                f"queries must be encoded by the model that made the documents' {self.vector_dim:,} numbers, "
                f"got {config.model}, which makes {queries.vector_dim:,}; name that model, or none with "
                f"--model {NO_MODEL}"
            )
        self.tokenizer: Tokenizer = read_tokenizer(embedded_folder() / "tokenizer.json")
        """The packaged model's, which cuts texts and counts their tokens."""
        self.fingerprint = fingerprint(
            kind="given",
            queries=queries and queries.fingerprint,
            **hashed_settings(config),
            **self._tokens.hashed,
        )

    @property
    def reads_titles(self) -> bool:
        """Say whether a document's title moves what is kept of it."""
        return self.config.token_bytes > 0

    @property
    def outage(self) -> str | None:
        """Why queries cannot be encoded now."""
        return None if self.queries is None else self.queries.outage

    def encode(
        self,
        texts: Sequence[str],
        on_tokens: Callable[[int], None] | None = None,
        *,
        titles: Sequence[str | None] | None = None,
        given: Sequence[bytes] | None = None,
    ) -> EncodedDocuments:
        """Return the vectors that documents brought, as they are staged; without them :class:`UsageError`."""
        if given is None:
            raise UsageError("documents of this collection bring their vectors; no model encodes them")
        tokens = tokenize(self.tokenizer, texts)
        chunks = cut_into_chunks(self.config, tokens, texts)
        _, cut_start, _ = shown_chunks(chunks, tokens, texts)
        records = np.frombuffer(b"".join(given), vector_records(self.vector_dim))
        ends = np.cumsum([len(each) for each in given]) // records.dtype.itemsize
        starts_N: list[np.ndarray] = []
        ends_N: list[np.ndarray] = []
        places_N: list[np.ndarray] = []
        first = 0
        for document, (text, end) in enumerate(zip(texts, ends.tolist(), strict=True)):
            if records["end"][first] == WHOLE:
                own = slice(*chunks.chunk_offsets[document : document + 2].tolist())
                starts, places = cut_start[own], np.full(own.stop - own.start, first)
            else:
                starts, places = records["start"][first:end].astype(np.int64), np.arange(first, end)
                starts[0] = 0
            starts_N.append(starts)
            ends_N.append(np.append(starts[1:], len(text)))
            places_N.append(places)
            first = end
        offsets = np.concatenate([[0], np.cumsum([len(each) for each in starts_N], dtype=np.int64)])
        none = np.zeros(0, np.int64)
        chunk_vectors_MV = records["vector"][np.concatenate([none, *places_N])]
        if on_tokens is not None:
            on_tokens(len(tokens.ids))
        encoded = EncodedDocuments(
            document_vectors_NV=document_vectors(chunk_vectors_MV, offsets, "document"),
            num_tokens=np.diff(tokens.text_offsets).astype(np.int32),
            chunk_offsets=offsets,
            start_char=np.concatenate([none, *starts_N]),
            end_char=np.concatenate([none, *ends_N]),
            chunk_vectors_MV=chunk_vectors_MV,
        )
        return self._tokens.with_codes(encoded, texts, titles)

    def encode_queries(self, texts: Sequence[str]) -> Float32[np.ndarray, "Q V"]:
        """Encode queries by their model; zeros without one."""
        if self.queries is None:
            return np.zeros((len(texts), self.vector_dim), np.float32)
        return self.queries.encode_queries(texts)

    def encode_query_tokens(
        self, texts: Sequence[str]
    ) -> tuple[Float32[np.ndarray, "Q V"], list[QueryTokens]]:
        """Encode queries, and read their tokens where the documents' are read."""
        return self.encode_queries(texts), self._tokens.of_queries(texts)

    def keep_paid(self, path: Path | None) -> None:
        """Nothing is asked for documents."""

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Close what encodes queries."""
        if self.queries is not None:
            self.queries.close(seconds)
