"""M1: context documents to the embeddings that later stand before every text (CDE §4.2).

The second stage's own backbone unless the checkpoint holds another for it, mean pooled over the first tokens
of a document, one vector each, NOT normalised: the second stage takes them at the level of its input
embeddings. Which documents these are is chosen elsewhere; they are embedded once and stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.document_encoder import embed_chunks
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.landmarks import Chunks, lay_out
from jaxtyping import Float32
from tokenizers import Encoding, Tokenizer

BATCH_TOKENS: Final = 1_024
HEAD_CHARACTERS_PER_TOKEN: Final = 32
"""How much of a text is tokenised at first for each token wanted.

A head that gives too few is tried again, twice as long.
"""


def encoded_head(tokenizer: Tokenizer, text: str, num_tokens: int) -> Encoding:
    """Tokenise the beginning of a text; its first ``num_tokens`` tokens are those of the whole text."""
    num_characters = HEAD_CHARACTERS_PER_TOKEN * num_tokens
    while num_characters < len(text):
        # Cut before white space, so that the head's tokens are those of the whole text.
        end = max(text.rfind(space, 0, num_characters) for space in (" ", "\n", "\t"))
        head = tokenizer.encode(text[: max(end, 0)], add_special_tokens=False)
        if len(head.ids) >= num_tokens:
            return head
        num_characters *= 2
    return tokenizer.encode(text, add_special_tokens=False)


class ContextEncoder:
    """The first stage: ``embed`` gives one raw embedding a text."""

    def __init__(
        self, backbone: Backbone, max_tokens: int, temperature: float = 1.0, prefix: str = ""
    ) -> None:
        if not 3 <= max_tokens <= backbone.max_positions:
            raise ConfigError(
                f"max_document_tokens must lie between 3 and the model's {backbone.max_positions} "
                f"positions, got {max_tokens}"
            )
        self._backbone = backbone
        self._max_tokens = max_tokens
        self._temperature = temperature
        self._prefix = prefix
        self.embedding_dim = backbone.embedding_dim
        self.fingerprint = fingerprint(
            kind="context-encoder",
            format=1,
            weights=backbone.weights_fingerprint,
            temperature=float(temperature),
            max_tokens=max_tokens,
            pooling="mean",
            **({"prefix": prefix} if prefix else {}),
        )

    @classmethod
    def of(cls, backbone: Backbone, encoder: EncoderConfig, context: ContextConfig) -> ContextEncoder:
        """Return the first stage of a second stage with its settings.

        That of a CDE model was trained behind the documents' prefix, and pools it with the text. A first
        stage that is a transformer alone was trained without one.
        """
        first_stage = backbone.first_stage
        prefix = encoder.document_prefix if first_stage.takes_document_prefix else ""
        return cls(
            first_stage,
            min(context.max_document_tokens, first_stage.max_positions),
            encoder.temperature,
            prefix,
        )

    def embed(self, texts: Sequence[str]) -> Float32[np.ndarray, "C E"]:
        """Embed texts in the order given, each cut after ``max_tokens``, [CLS] and [SEP] included."""
        tokenizer, most = (
            self._backbone.tokenizer,
            self._max_tokens - (1 if self._backbone.cls_id is None else 2),
        )
        ids = [encoded_head(tokenizer, self._prefix + text, most).ids[:most] for text in texts]
        token_offsets = np.concatenate([[0], np.cumsum([len(item) for item in ids], dtype=np.int64)])
        chunks = Chunks(token_offsets=token_offsets, chunk_offsets=np.arange(len(ids) + 1))
        flat = np.concatenate([np.zeros(0, np.int32), *(np.array(item, np.int32) for item in ids)])
        rows = lay_out(
            flat,
            chunks,
            attention="chunk",
            cls_id=self._backbone.cls_id,
            landmark_id=self._backbone.landmark_id,
            pooling="mean",
        )
        return embed_chunks(self._backbone, rows, batch_tokens=BATCH_TOKENS, temperature=self._temperature)
