"""Pieces of texts of one length, and how alike their embeddings are: Length Collapse by length and τ.

The collapse: the mean cosine of embeddings of longer texts rises, while sigma_a of the last layer's attention
(``low_pass``) falls; τ < 1 is to flatten both.

Source: Zhou et al., "Length-Induced Embedding Collapse in Transformer-based Models", figures 1c and 7,
theorem 2, appendix E.3. Differs: pieces have exact lengths and are cut anywhere in the corpus, so that each
length is measured on the same documents where they are long enough; embeddings are means over the row,
without prefix or context.

    B rows    T tokens    D model dim    V embedding dim
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from cairn.pipeline.config import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, EncoderConfig
from cairn.pipeline.corpus.tokenization import TokenizedTexts, tokenize
from cairn.pipeline.errors import ConfigError
from cairn.pipeline.model.engine.transformer import Transformer
from cairn.pipeline.ragged import places_in_groups
from jaxtyping import Float, Float32, Int64

LENGTHS: Final = (16, 32, 64, 128, 256, 512, 1_024, 2_048)
TEMPERATURES: Final = (1.0, 0.9, 0.8)
"""As trained, and the two the paper finds best."""

MAX_DOCUMENTS: Final = 2_000
"""Documents that pieces are cut from: enough for pairs, and tokenised in a second."""
BATCH_TOKENS: Final = 4_096


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Consecutive tokens of one document, by number, without [CLS] and end."""

    document: int
    ids: list[int]


def require_temperatures(temperatures: Sequence[float]) -> None:
    """Raise :class:`ConfigError` for a temperature out of bounds."""
    for each in temperatures:
        if not LOWEST_TEMPERATURE <= each <= HIGHEST_TEMPERATURE:
            raise ConfigError(
                f"a temperature must lie between {LOWEST_TEMPERATURE:g} and {HIGHEST_TEMPERATURE:g}, got "
                f"{each:g}; the paper tries 0.1 to 1"
            )


def lengths_read(config: EncoderConfig, backbone: Transformer) -> list[int]:
    """Return the lengths of pieces that fit a row of the model."""
    # Beside the text a row holds [CLS], where there is one, and its end.
    room = min(config.window_tokens, backbone.max_positions) - 2
    return sorted({min(length, room) for length in LENGTHS})


def draw_texts(backbone: Transformer, texts: Sequence[str], generator: np.random.Generator) -> TokenizedTexts:
    """Draw the texts that pieces are cut from, and tokenise them."""
    drawn = generator.permutation(len(texts))[:MAX_DOCUMENTS]
    return tokenize(backbone.tokenizer, [texts[int(index)] for index in drawn])


def draw_pieces(
    tokens: TokenizedTexts, length: int, max_pieces: int, generator: np.random.Generator
) -> list[Piece]:
    """Cut every text into consecutive pieces of ``length`` tokens, leaving the rest, and draw some."""
    num_pieces_N = np.diff(tokens.text_offsets) // length
    document_M = np.repeat(np.arange(len(num_pieces_N)), num_pieces_N)
    starts_M = tokens.text_offsets[document_M] + length * places_in_groups(num_pieces_N)
    drawn = generator.permutation(len(starts_M))[:max_pieces].tolist()
    return [
        Piece(document=int(document_M[m]), ids=tokens.ids[starts_M[m] : starts_M[m] + length].tolist())
        for m in drawn
    ]


def embed_pieces(
    backbone: Transformer, pieces: Sequence[Piece], temperature: float = 1.0, *, last_two: bool = False
) -> Float32[np.ndarray, "M V"]:
    """Return the means over the rows of pieces of one length, projected, of length one.

    ``last_two`` takes the mean of the last two layers' states first: the paper's flow baseline.
    """
    shallow = copy(backbone)
    shallow.layers, shallow.final_norm = backbone.layers[:-1], None
    rows_a_batch = max(1, BATCH_TOKENS // len(pieces[0].ids))
    parts: list[np.ndarray] = []
    for start in range(0, len(pieces), rows_a_batch):
        own = pieces[start : start + rows_a_batch]
        hidden_BTD = _hidden_states(backbone, own, temperature).float().clone()
        if last_two:
            hidden_BTD = (hidden_BTD + _hidden_states(shallow, own, temperature)) / 2
        parts.append(backbone.project(hidden_BTD.float().mean(dim=1)).cpu().numpy())
    vectors_MV = np.concatenate(parts)
    return vectors_MV / np.linalg.norm(vectors_MV, axis=1, keepdims=True)


def row_of(backbone: Transformer, piece: Piece) -> list[int]:
    """Return a piece as the row a model reads: [CLS], where there is one, the text, its end."""
    head = [] if backbone.cls_id is None else [backbone.cls_id]
    return [*head, *piece.ids, backbone.landmark_id]


def _hidden_states(
    backbone: Transformer, pieces: Sequence[Piece], temperature: float
) -> Float[torch.Tensor, "B T D"]:
    ids_BT = np.array([row_of(backbone, piece) for piece in pieces], np.int64)
    return backbone.hidden_states(ids_BT, np.full(len(ids_BT), ids_BT.shape[1], np.int64), None, temperature)


def mean_cosine(vectors_MV: Float32[np.ndarray, "M V"], document_M: Int64[np.ndarray, " M"]) -> float:
    """Return the mean cosine over pairs of pieces of different documents."""
    cosines_MM = vectors_MV @ vectors_MV.T
    return float(cosines_MM[document_M[:, None] != document_M].mean())
