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
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from typing_extensions import override

from pipeline.config import EncoderConfig
from pipeline.corpus.tokenization import TokenizedTexts, tokenize
from pipeline.errors import SourceError
from pipeline.model.backbone_loader import load_backbone
from pipeline.model.engine.backbone import Backbone
from pipeline.model.engine.rectangle import Rectangle
from pipeline.model.engine.transformer import Transformer
from pipeline.ragged import places_in_groups
from pipeline.types import ProgressListener, silent_progress

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
class _Piece:
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
    drawn = generator.permutation(len(texts))[:MAX_DOCUMENTS]
    tokens = tokenize(backbone.tokenizer, [texts[int(index)] for index in drawn])
    # Beside the text a row holds [CLS], where there is one, and its end.
    room = min(config.window_tokens, backbone.max_positions) - 2
    measured: list[LengthCollapse] = []
    lengths = sorted({min(length, room) for length in LENGTHS})
    for number, length in enumerate(lengths, start=1):
        pieces = _draw_pieces(tokens, length, max_pieces, generator)
        if len({piece.document for piece in pieces}) < 2:
            continue
        measured += [
            LengthCollapse(
                tokens=length,
                temperature=temperature,
                pieces=len(pieces),
                cosine=_mean_cosine(
                    _embed(backbone, pieces, temperature), np.array([piece.document for piece in pieces])
                ),
                sigma_a=_sigma_a(backbone, pieces[:max_spectra], temperature),
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


def high_frequency_norm(attention_TT: Float[torch.Tensor, "*H T T"]) -> Float[torch.Tensor, "*H"]:
    """Return the largest singular value of (I - 11ᵀ/n) A for every matrix A of a stack."""
    high_TT = attention_TT - attention_TT.mean(dim=-2, keepdim=True)
    # The root of the Gram matrix's largest eigenvalue: half the time of the singular values themselves.
    return torch.linalg.eigvalsh(high_TT.mT @ high_TT)[..., -1].clamp(min=0.0).sqrt()


def recording_pattern(kept: list[torch.Tensor]) -> type[Rectangle]:
    """Return a rectangle that leaves the last global layer's attention in ``kept``, ``B H T T``, float32."""

    class Recorder(Rectangle):
        @override
        def attend(
            self, padded_NPd: Float[torch.Tensor, "N P d"], layer: int, /, *, is_local: bool, drop_lead: bool
        ) -> torch.Tensor:
            if not is_local:
                kept[:] = [self._attention(padded_NPd)]
            return super().attend(padded_NPd, layer, is_local=is_local, drop_lead=drop_lead)

        def _attention(self, padded_NPd: Float[torch.Tensor, "N P d"]) -> Float[torch.Tensor, "B H T T"]:
            num_heads, num_kv = self._settings.shape.num_heads, self._settings.shape.num_key_value_heads
            rows_BPTd = padded_NPd.view(-1, self._batch.width, *padded_NPd.shape[1:]).transpose(1, 2).float()
            query, key, _ = rows_BPTd.split([num_heads, num_kv, num_kv], dim=1)
            key = key.repeat_interleave(num_heads // num_kv, dim=1)
            logits = (
                query
                @ key.transpose(2, 3)
                * (self._settings.shape.head_dim**-0.5 / self._settings.temperature)
            )
            return torch.softmax(logits if self._bias is None else logits + self._bias.float(), dim=-1)

    return Recorder


def _draw_pieces(
    tokens: TokenizedTexts, length: int, max_pieces: int, generator: np.random.Generator
) -> list[_Piece]:
    """Cut every text into consecutive pieces of ``length`` tokens, leaving the rest, and draw some."""
    num_pieces_N = np.diff(tokens.text_offsets) // length
    document_M = np.repeat(np.arange(len(num_pieces_N)), num_pieces_N)
    starts_M = tokens.text_offsets[document_M] + length * places_in_groups(num_pieces_N)
    drawn = generator.permutation(len(starts_M))[:max_pieces].tolist()
    return [
        _Piece(document=int(document_M[m]), ids=tokens.ids[starts_M[m] : starts_M[m] + length].tolist())
        for m in drawn
    ]


def _embed(backbone: Backbone, pieces: Sequence[_Piece], temperature: float) -> Float32[np.ndarray, "M V"]:
    rows_a_batch = max(1, BATCH_TOKENS // len(pieces[0].ids))
    parts: list[np.ndarray] = []
    for start in range(0, len(pieces), rows_a_batch):
        hidden_BTD = _hidden_states(backbone, pieces[start : start + rows_a_batch], temperature)
        parts.append(backbone.project(hidden_BTD.float().mean(dim=1)).cpu().numpy())
    vectors_MV = np.concatenate(parts)
    return vectors_MV / np.linalg.norm(vectors_MV, axis=1, keepdims=True)


def _hidden_states(
    backbone: Backbone, pieces: Sequence[_Piece], temperature: float
) -> Float[torch.Tensor, "B T D"]:
    head = [] if backbone.cls_id is None else [backbone.cls_id]
    ids_BT = np.array([[*head, *piece.ids, backbone.landmark_id] for piece in pieces], np.int64)
    return backbone.hidden_states(ids_BT, np.full(len(ids_BT), ids_BT.shape[1], np.int64), None, temperature)


def _mean_cosine(vectors_MV: Float32[np.ndarray, "M V"], document_M: Int64[np.ndarray, " M"]) -> float:
    cosines_MM = vectors_MV @ vectors_MV.T
    return float(cosines_MM[document_M[:, None] != document_M].mean())


def _sigma_a(backbone: Backbone, pieces: Sequence[_Piece], temperature: float) -> float | None:
    if not isinstance(backbone, Transformer):
        return None
    kept: list[torch.Tensor] = []
    usual = backbone.pattern_type
    backbone.pattern_type = recording_pattern(kept)
    try:
        values: list[float] = []
        for piece in pieces:
            _hidden_states(backbone, [piece], temperature)
            if kept:
                values.append(float(high_frequency_norm(kept.pop()).mean()))
    finally:
        backbone.pattern_type = usual
    return float(np.mean(values)) if values else None
