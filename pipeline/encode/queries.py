"""Queries to vectors, in the documents' space and under the same context (CDE eq. 6).

A query is encoded exactly as a document is, but for its prefix: one chunk in practice, the normalised mean of
its chunks when it is longer. So a query that repeats a document's text has its vector where the prefixes are
the same, and both have one fingerprint.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

from pipeline.config import EncoderConfig
from pipeline.context.store import ContextSet
from pipeline.encode.documents import DocumentEncoder
from pipeline.encode.texts import require_texts
from pipeline.errors import ConfigError
from pipeline.model.engine.backbone import Backbone


class TextQueryEncoder:
    """Implements :class:`pipeline.types.QueryEncoder`."""

    def __init__(
        self, config: EncoderConfig, context: ContextSet | None = None, backbone: Backbone | None = None
    ) -> None:
        self._encoder = DocumentEncoder(config, context, backbone)

    @property
    def fingerprint(self) -> str:
        """Return the fingerprint of a :class:`DocumentEncoder` with the same settings."""
        return self._encoder.fingerprint

    def encode_queries(self, texts: Sequence[str]) -> Float32[np.ndarray, "Q V"]:
        """Embed queries, L2-normalised, in the order given; an empty one raises :class:`ConfigError`."""
        require_texts(texts, "query")
        for index, text in enumerate(texts):
            if not text.strip():
                raise ConfigError(
                    f"a query must hold text, got an empty one at position {index}; write what to look for"
                )
        return self._encoder.encode_queries(texts)
