"""Length collapse: are embeddings of longer texts more alike, and what does the temperature τ change?

    cosine   mean cosine of the embeddings of pieces of one length, over pairs from different documents
    sigma_a  largest singular value of HC[A] = (I - 11ᵀ/n) A, A the attention of the last global layer,
             mean over heads and texts

sigma_a bounds what of a token's deviation from the mean survives a layer of attention: ‖HC[SA(X)]‖ ≤ sigma_a
‖W_V‖ ‖HC[X]‖. A sigma_a that falls and a cosine that rises with length are the collapse; τ < 1 is to flatten
both.

Source: Zhou et al., "Length-Induced Embedding Collapse in Transformer-based Models", figures 1c and 7,
theorem 2, appendix E.3. Differs: pieces have exact lengths and are cut anywhere in the corpus, so that each
length is measured on the same documents where they are long enough; embeddings are means over the row,
without prefix or context.

    B rows    T tokens    H heads    P heads of queries, keys and values    V embedding dim
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.corpus.tokenization import TokenizedTexts, tokenize
from cairn.pipeline.errors import SourceError
from cairn.pipeline.lab.analysis.low_pass import high_frequency_norm
from cairn.pipeline.lab.analysis.traced_pass import shows_attention, trace_row
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.engine.transformer import Transformer
from cairn.pipeline.ragged import places_in_groups
from cairn.pipeline.types import ProgressListener, silent_progress
from jaxtyping import Float, Float32, Int64

LENGTHS: Final = (16, 32, 64, 128, 256, 512, 1_024, 2_048)
TEMPERATURES: Final = (1.0, 0.9, 0.8)
"""As trained, and the two the paper finds best."""

MAX_DOCUMENTS: Final = 2_000
"""Documents that pieces are cut from: enough for pairs, and tokenised in a second."""
BATCH_TOKENS: Final = 4_096


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthCollapse:
    """What was measured at one length (in tokens of text) and temperature.

    ``sigma_a`` is None where the model shows no attention.
    """

    tokens: int
    temperature: float
    pieces: int
    cosine: float
    sigma_a: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Consecutive tokens of one document, by number, without [CLS] and end."""

    document: int
    ids: list[int]


def measure_length_collapse(
    texts: Sequence[str],
    config: EncoderConfig,
    *,
    temperatures: Sequence[float] = TEMPERATURES,
    max_pieces: int = 100,
    max_spectra: int = 8,
    seed: int = 0,
    progress: ProgressListener = silent_progress,
) -> list[LengthCollapse]:
    """Measure every length that pieces of two documents or more have.

    Sigma_a on the first ``max_spectra`` of a length's pieces.
    """
    backbone = load_backbone(config.without_context)
    generator = np.random.default_rng(seed)
    tokens = draw_texts(backbone, texts, generator)
    measured: list[LengthCollapse] = []
    lengths = lengths_read(config, backbone)
    for number, length in enumerate(lengths, start=1):
        pieces = draw_pieces(tokens, length, max_pieces, generator)
        if len({piece.document for piece in pieces}) < 2:
            continue
        measured += [
            LengthCollapse(
                tokens=length,
                temperature=temperature,
                pieces=len(pieces),
                cosine=mean_cosine(
                    embed_pieces(backbone, pieces, temperature),
                    np.array([piece.document for piece in pieces]),
                ),
                sigma_a=_mean_sigma_a(backbone, pieces[:max_spectra], temperature),
            )
            for temperature in temperatures
        ]
        progress("lengths", number, len(lengths), "lengths")
    if not measured:
        raise SourceError(
            f"a length report must have two documents of {lengths[0]} tokens or more, got fewer; take "
            "another corpus"
        )
    return measured


def lengths_read(config: EncoderConfig, backbone: Backbone) -> list[int]:
    """Return the lengths of pieces that fit a row of the model."""
    # Beside the text a row holds [CLS], where there is one, and its end.
    room = min(config.window_tokens, backbone.max_positions) - 2
    return sorted({min(length, room) for length in LENGTHS})


def draw_texts(backbone: Backbone, texts: Sequence[str], generator: np.random.Generator) -> TokenizedTexts:
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
    backbone: Backbone, pieces: Sequence[Piece], temperature: float = 1.0, *, last_two: bool = False
) -> Float32[np.ndarray, "M V"]:
    """Return the means over the rows of pieces of one length, projected, of length one.

    ``last_two`` takes the mean of the last two layers' states first: the paper's flow baseline.
    """
    rows_a_batch = max(1, BATCH_TOKENS // len(pieces[0].ids))
    parts: list[np.ndarray] = []
    for start in range(0, len(pieces), rows_a_batch):
        own = pieces[start : start + rows_a_batch]
        hidden_BTD = _hidden_states(backbone, own, temperature).float().clone()
        if last_two:
            hidden_BTD = (hidden_BTD + _hidden_states(_but_last_layer(backbone), own, temperature)) / 2
        parts.append(backbone.project(hidden_BTD.float().mean(dim=1)).cpu().numpy())
    vectors_MV = np.concatenate(parts)
    return vectors_MV / np.linalg.norm(vectors_MV, axis=1, keepdims=True)


def row_of(backbone: Backbone, piece: Piece) -> list[int]:
    """Return a piece as the row a model reads: [CLS], where there is one, the text, its end."""
    head = [] if backbone.cls_id is None else [backbone.cls_id]
    return [*head, *piece.ids, backbone.landmark_id]


def _hidden_states(
    backbone: Backbone, pieces: Sequence[Piece], temperature: float
) -> Float[torch.Tensor, "B T D"]:
    ids_BT = np.array([row_of(backbone, piece) for piece in pieces], np.int64)
    return backbone.hidden_states(ids_BT, np.full(len(ids_BT), ids_BT.shape[1], np.int64), None, temperature)


def _but_last_layer(backbone: Backbone) -> Transformer:
    assert isinstance(backbone, Transformer), "flow needs the states of a layer before the last"
    shallow = copy(backbone)
    shallow.layers, shallow.final_norm = backbone.layers[:-1], None
    return shallow


def mean_cosine(vectors_MV: Float32[np.ndarray, "M V"], document_M: Int64[np.ndarray, " M"]) -> float:
    """Return the mean cosine over pairs of pieces of different documents."""
    cosines_MM = vectors_MV @ vectors_MV.T
    return float(cosines_MM[document_M[:, None] != document_M].mean())


def sigma_a_of(backbone: Backbone, piece: Piece, temperature: float) -> float | None:
    """Return sigma_a of one piece, None where the model shows no attention to all tokens."""
    if not isinstance(backbone, Transformer) or not shows_attention(backbone):
        return None
    attention = trace_row(backbone, row_of(backbone, piece), temperature).last_global
    return None if attention is None else float(high_frequency_norm(attention.weights()).mean())


def _mean_sigma_a(backbone: Backbone, pieces: Sequence[Piece], temperature: float) -> float | None:
    values = [sigma_a_of(backbone, piece, temperature) for piece in pieces]
    return float(np.mean([each for each in values if each is not None])) if None not in values else None
