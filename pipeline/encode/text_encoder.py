"""An encoder by itself: texts in, vectors out, no corpus, no index.

    from cairn import load_encoder
    encoder = load_encoder("FOLDER")
    encoder.encode_documents(["a text"])        one vector a text
    encoder.landmark_embeddings(["a text"])     one vector a passage, with the characters it stands for
    encoder.save("elsewhere")                   a folder that Cairn and Sentence-Transformers load

Vectors are those an ingest with the same settings stores and a search with them asks for; ``fingerprint``
says whether two are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from cairn.pipeline.config import DEFAULT_MODEL, EncoderConfig, is_encodable
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.encode.documents import DocumentEncoder, EncodedDocuments
from cairn.pipeline.encode.encoder import open_encoder
from cairn.pipeline.encode.endpoint import EndpointEncoder
from cairn.pipeline.encode.endpoint_requests import Patience
from cairn.pipeline.encode.given import GivenEncoder
from cairn.pipeline.encode.tokenization import tokenize
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.families import language_model
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.folders.encoder_folder import beyond_stock_modules, save_encoder_folder
from cairn.pipeline.model.folders.first_layers import first_layers
from cairn.pipeline.model.folders.model_defaults import encoder_config, trained_context
from cairn.pipeline.model.folders.names import model_folder
from cairn.pipeline.options import shown
from cairn.pipeline.token_vectors.projection import LATE_NAME
from jaxtyping import Float32, Int64


@dataclass(frozen=True, kw_only=True, slots=True)
class LandmarkEmbeddings:
    """The passages of one text, in order.

    Unit vectors, and character spans that cover the text without gaps.
    """

    vectors_LV: Float32[np.ndarray, "L V"]
    start_char: Int64[np.ndarray, " L"]
    end_char: Int64[np.ndarray, " L"]


class TextEncoder:
    """A model with its settings. ``encode_queries`` makes it a :class:`cairn.pipeline.types.QueryEncoder`."""

    def __init__(
        self,
        config: EncoderConfig,
        context: ContextSet | None = None,
        saved_as: EncoderConfig | None = None,
        *,
        patience: Patience | None = None,
    ) -> None:
        """Load the model; ``saved_as`` are the settings that a saved folder brings, None for ``config``.

        ``patience`` is an endpoint's, for documents.
        """
        self._saved_as = saved_as or config
        self._documents = open_encoder(config, context, patience=patience)
        self.config = config
        self.encode_query_tokens = self._documents.encode_query_tokens
        """Embeds queries that a search has checked, and returns the states of their tokens, too."""
        self.vector_dim = self._documents.vector_dim
        self.fingerprint = self._documents.fingerprint

    @property
    def backbone(self) -> Backbone | None:
        """The model in memory, None where an endpoint has it."""
        return self._documents.backbone if isinstance(self._documents, DocumentEncoder) else None

    @property
    def outage(self) -> str | None:
        """Why an endpoint could not be asked last, None where nothing is known to be wrong."""
        return self._documents.outage

    def check_endpoint(self) -> None:
        """Ask an endpoint whether it answers as it did; what is wrong is told by :attr:`outage`."""
        asked = self._documents.queries if isinstance(self._documents, GivenEncoder) else self._documents
        if isinstance(asked, EndpointEncoder):
            asked.check_quietly()

    def encode_documents(
        self, texts: Sequence[str], titles: Sequence[str | None] | None = None
    ) -> Float32[np.ndarray, "N V"]:
        """Embed documents of any length, L2-normalised, in the order given.

        ``titles``, one a text, are read by models with a mixer.
        """
        return self._encode(texts, titles).document_vectors_NV

    def encode_queries(self, texts: Sequence[str]) -> Float32[np.ndarray, "Q V"]:
        """Embed queries, L2-normalised, in the order given; an empty one raises :class:`ConfigError`.

        A query is encoded as a document is, but for its prefix and temperature: the normalised mean of its
        chunks (CDE eq. 6).
        """
        require_queries(texts)
        return self._documents.encode_queries(texts)

    def count_tokens(self, texts: Sequence[str]) -> int:
        """Count the texts' own tokens, without prefixes and special tokens."""
        require_texts(texts, "text")
        return len(tokenize(self._documents.tokenizer, texts).ids)

    def landmark_embeddings(
        self, texts: Sequence[str], titles: Sequence[str | None] | None = None
    ) -> list[LandmarkEmbeddings]:
        """Embed every passage of documents, text by text.

        A document's vector is the normalised mean of its passages'.
        """
        encoded = self._encode(texts, titles)
        spans = pairwise(encoded.chunk_offsets.tolist())
        return [
            LandmarkEmbeddings(
                vectors_LV=encoded.chunk_vectors_MV[first:end],
                start_char=encoded.start_char[first:end],
                end_char=encoded.end_char[first:end],
            )
            for first, end in spans
        ]

    def _encode(self, texts: Sequence[str], titles: Sequence[str | None] | None) -> EncodedDocuments:
        require_texts(texts, "document")
        if titles is not None:
            are_listed = isinstance(titles, list | tuple)
            require_texts([title or "" for title in titles] if are_listed else titles, "title")
            if len(titles) != len(texts):
                raise ConfigError(
                    f"titles must be one a text, got {len(titles)} for {len(texts)}; give None for a text "
                    "without"
                )
        return self._documents.encode(texts, titles=titles)

    def save(self, folder: str | Path) -> Sequence[str]:
        """Write the model and its settings to a new folder.

        Returns what of them Sentence-Transformers' own modules do not have.
        Weights keep the precision they were published in, whatever this encoder computes in.
        """
        if self.backbone is None:
            raise ConfigError(
                "a saved encoder must be a model that runs here, got an endpoint; name it with its address"
            )
        read = read_checkpoint(model_folder(self.config.model))
        checkpoint = first_layers(language_model(read), self.config.layers)
        save_encoder_folder(
            Path(folder).expanduser().absolute(),
            checkpoint,
            self._saved_as,
            copies_weights=checkpoint is read,
            late_path=model_folder(self.config.model) / LATE_NAME,
            context=trained_context(self.config.model),
        )
        return beyond_stock_modules(self._saved_as, checkpoint.config, checkpoint.tensors)


def load_encoder(
    model: str | Path = DEFAULT_MODEL, *, context: ContextSet | None = None, **settings: Any
) -> TextEncoder:
    """Load a model by name or folder; ``settings`` of :class:`EncoderConfig` win over what the folder brings.

    Without a ``context`` none is read, whatever the folder brings.
    """
    config = encoder_config({"model": str(model), **settings})
    if context is not None:
        return TextEncoder(config, context)
    read = replace(config, use_context=bool(settings.get("use_context", False)))
    return TextEncoder(read, saved_as=config)


def require_texts(texts: Any, what: str) -> None:
    """Raise :class:`ConfigError` unless ``texts`` holds valid Unicode strings.

    A bare string would be read letter by letter.
    """
    if isinstance(texts, str | bytes) or not isinstance(texts, Iterable) or not hasattr(texts, "__len__"):
        raise ConfigError(f"{what} texts must come in a list, got {shown(texts)}; write [text]")
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise ConfigError(f"a {what} must be text, got {shown(text)} at position {index}; leave it out")
        if not is_encodable(text):
            raise ConfigError(
                f"a {what} must be valid Unicode, got a lone surrogate in the one at position {index}; "
                "remove it"
            )


def require_queries(texts: Any) -> None:
    """Raise :class:`ConfigError` unless ``texts`` holds valid strings, none of them blank."""
    require_texts(texts, "query")
    for index, text in enumerate(texts):
        if not text.strip():
            raise ConfigError(
                f"a query must hold text, got an empty one at position {index}; write what to look for"
            )
