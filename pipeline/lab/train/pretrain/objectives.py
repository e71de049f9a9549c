"""What pretraining can learn, one entry an objective: from masked rows to the terms of the loss.

    mlm        Σ over layers and widths of the masked words' cross entropy (m³BERT §2.1, L_total)
    retromae   the same, and that of every word as rebuilt from the text's vector (LMK §6.3)

Each term is already divided by the batch's number of scored tokens, so terms of micro-batches add up. The
output table is the input table (tied), behind it a bias that begins at the words' frequency.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.objectives.vocabulary import SelfDistillation, vocabulary_loss
from cairn.pipeline.lab.train.pretrain.decoder import EnhancedDecoder, bottleneck, sampled_visibility
from cairn.pipeline.lab.train.pretrain.settings import PretrainConfig, PretrainObjective
from cairn.pipeline.lab.train.pretrain.stream import StreamRows
from jaxtyping import Float32, Int64
from torch import nn

_DECODED: Final = 16
"""What decoders' samples are drawn with, as part of their seed."""


class PretrainHeads(nn.Module):
    """What is trained beside the encoder and left out of the saved model."""

    def __init__(self, bias_V: Float32[torch.Tensor, " V"], decoder: EnhancedDecoder | None) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias_V)
        self.decoder = decoder


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MaskedPart:
    """A micro-batch: the rows as they are and as the encoder reads them, and which tokens it is asked for.

    ``first`` numbers its first row in the batch; ``num_scored`` and ``num_words`` are the whole batch's.
    """

    plain: StreamRows
    hidden: StreamRows
    scored_K: Int64[np.ndarray, " K"]
    first: int
    step: int
    num_scored: int
    num_words: int


Terms = Mapping[str, Float32[torch.Tensor, ""]]
"""Terms of the loss by name; those with a slash are parts of another, for the log."""

ObjectiveLoss = Callable[[LandmarkEncoder, PretrainHeads, MaskedPart, PretrainConfig], Terms]


def masked_language_terms(
    model: LandmarkEncoder, heads: PretrainHeads, part: MaskedPart, config: PretrainConfig
) -> Terms:
    """Return the loss of the masked words over all layers and widths."""
    terms, _ = _masked_language(model, heads, part, config)
    return terms


def retromae_terms(
    model: LandmarkEncoder, heads: PretrainHeads, part: MaskedPart, config: PretrainConfig
) -> Terms:
    """Return the same, and the loss of the decoder over all words."""
    assert heads.decoder is not None, "RetroMAE has a decoder"
    terms, states_ND = _masked_language(model, heads, part, config)
    rows, is_text_N = part.plain.rows, part.plain.is_text_N
    ends = np.cumsum(rows.lengths_B)
    has_text = np.split(is_text_N, ends[:-1])
    lengths = [int(marks.sum()) for marks in has_text]
    pooled = [torch.from_numpy(_pooled(marks, config)).to(model.device) for marks in has_text]
    sentence_PD = bottleneck(states_ND, rows.lengths_B.tolist(), pooled)
    words_N = torch.from_numpy(rows.ids_N[is_text_N].astype(np.int64)).to(model.device)
    visible = [
        sampled_visibility(
            length, config.decoder_mask_share, _generator(config.seed, part.step, part.first + place)
        ).to(model.device)
        for place, length in enumerate(lengths)
    ]
    decoded_ND = heads.decoder(sentence_PD, model.token_table[words_N], lengths, visible)
    total, _ = vocabulary_loss(decoded_ND[None], model.token_table, heads.bias, words_N, (model.model_dim,))
    return {**terms, "decoder": total / part.num_words}


OBJECTIVES: Final[Mapping[PretrainObjective, ObjectiveLoss]] = {
    "mlm": masked_language_terms,
    "retromae": retromae_terms,
}


def _masked_language(
    model: LandmarkEncoder, heads: PretrainHeads, part: MaskedPart, config: PretrainConfig
) -> tuple[Terms, torch.Tensor]:
    layers = config.matryoshka_layers or (model.num_layers,)
    widths = config.matryoshka_dims or (model.model_dim,)
    states = model.states(part.hidden.rows, layers=layers, landmarks=False)
    scored_K = torch.from_numpy(part.scored_K).to(model.device)
    labels_K = torch.from_numpy(part.plain.rows.ids_N[part.scored_K].astype(np.int64)).to(model.device)
    distillation = SelfDistillation(
        weight=config.distillation_weight, temperature=config.distillation_temperature
    )
    total, sums_LW = vocabulary_loss(
        torch.stack([states[layer][scored_K] for layer in layers]),
        model.token_table,
        heads.bias,
        labels_K,
        widths,
        distillation=distillation if config.distillation_weight else None,
    )
    exits = {
        f"mlm/{layer}/{width}": sums_LW[row, column].detach() / part.num_scored
        for row, layer in enumerate(layers)
        for column, width in enumerate(widths)
    }
    return {"mlm": total / part.num_scored, **exits}, states[layers[-1]]


def _pooled(is_text: np.ndarray, config: PretrainConfig) -> Int64[np.ndarray, " _"]:
    """Return where the text's vector is read: its landmarks, else the first token, which is [CLS]."""
    if not config.landmark_intervals and not is_text[0]:
        return np.zeros(1, np.int64)
    others = np.flatnonzero(~is_text)
    return others[others > 0]


def _generator(seed: int, step: int, row: int) -> torch.Generator:
    drawn = int(np.random.default_rng([seed, _DECODED, step, row]).integers(2**62))
    return torch.Generator().manual_seed(drawn)
