"""Embeddings for LangChain: an encoder's vectors, of this machine or of a collection behind the API.

    CairnEmbeddings(load_encoder("cairn-minilm"))
    CairnEmbeddings(CairnClient().collection("handbook"))       with the collection's encoder and context

Vectors are L2-normalised; queries and documents may be embedded differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from cairn.pipeline.errors import extra_missing
from jaxtyping import Float32
from typing_extensions import override

try:
    from langchain_core.embeddings import Embeddings
except ModuleNotFoundError as error:
    raise extra_missing(
        error,
        what="LangChain's embeddings",
        module="langchain_core",
        package="langchain-core",
        extra="langchain",
    ) from None


class TextVectors(Protocol):
    """What embeds: ``load_encoder(…)`` or a collection behind the API."""

    def encode_queries(self, texts: Sequence[str]) -> Float32[np.ndarray, "N V"]:
        """Embed queries, L2-normalised, in the order given."""
        ...

    def encode_documents(self, texts: Sequence[str]) -> Float32[np.ndarray, "N V"]:
        """Embed documents, L2-normalised, in the order given."""
        ...


class CairnEmbeddings(Embeddings):
    """LangChain's interface to an encoder."""

    def __init__(self, encoder: TextVectors) -> None:
        self.encoder = encoder

    @override
    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return self.encoder.encode_documents(texts).tolist() if texts else []

    @override
    def embed_query(self, text: str) -> list[float]:
        return self.encoder.encode_queries([text])[0].tolist()
