"""MaxSim of queries with pieces, from the base model's last-layer token states: untrained late interaction.

A query's token weighs its idf over the pieces, ln(1 + (M - m + ½) / (m + ½)). States are made block by block,
for the pieces that some query asks for, and are not kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.corpus.tokenization import tokenize
from cairn.pipeline.encode.prefixes import Prefix
from cairn.pipeline.lab.token_states import TokenStates, embed_tokens
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.ragged import ranges
from cairn.pipeline.token_vectors.max_sim import max_sim, token_idf
from cairn.pipeline.types import ProgressListener
from jaxtyping import Float32, Int64

BLOCK_PIECES: Final = 2_048
"""Pieces whose states are held at once: 200 MB at 128 tokens of 384 dimensions."""


def score_pieces(
    encoder: EncoderConfig,
    pieces: Sequence[str],
    queries: Sequence[str],
    asked_QK: Int64[np.ndarray, "Q K"],
    progress: ProgressListener,
) -> Float32[np.ndarray, "Q K"]:
    """Return MaxSim of each query with each of its ``asked`` pieces."""
    backbone = load_backbone(encoder)
    document, query = (
        Prefix.of(text, backbone.tokenizer).ids for text in (encoder.document_prefix, encoder.query_prefix)
    )
    asking = embed_tokens(backbone, queries, batch_tokens=encoder.batch_tokens, prefix_ids=query)
    tokens = tokenize(backbone.tokenizer, pieces)
    weights_T = token_idf(tokens.ids, tokens.text_offsets, backbone.tokenizer.get_vocab_size())[asking.ids_T]
    scores_QK = np.zeros(asked_QK.shape, np.float32)
    wanted = np.unique(asked_QK)
    for start in range(0, len(wanted), BLOCK_PIECES):
        block = wanted[start : start + BLOCK_PIECES]
        states = embed_tokens(
            backbone,
            [pieces[int(piece)] for piece in block],
            batch_tokens=encoder.batch_tokens,
            prefix_ids=document,
        )
        _score_block(asking, weights_T, states, block, asked_QK, scores_QK)
        progress("maxsim", min(start + BLOCK_PIECES, len(wanted)), len(wanted), "pieces")
    return scores_QK


def _score_block(
    asking: TokenStates,
    weights_T: Float32[np.ndarray, " T"],
    states: TokenStates,
    block: Int64[np.ndarray, " b"],
    asked_QK: Int64[np.ndarray, "Q K"],
    scores_QK: Float32[np.ndarray, "Q K"],
) -> None:
    states_TV = states.states_TV.astype(np.float32)
    for query, asked_K in enumerate(asked_QK):
        own = asking.of(query)
        places = np.flatnonzero(np.isin(asked_K, block))
        if not len(places):
            continue
        rows = np.searchsorted(block, asked_K[places])
        # Only the tokens of the pieces asked for: they are a small part of a block.
        lengths = states.offsets_N1[rows + 1] - states.offsets_N1[rows]
        ends = np.cumsum(lengths)
        tokens = ranges(states.offsets_N1[rows], lengths)
        scores_QK[query, places] = max_sim(
            asking.states_TV[own], weights_T[own], states_TV[tokens], ends - lengths, ends
        )
