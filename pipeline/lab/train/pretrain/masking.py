"""Masked rows: what the encoder reads and which of its tokens are scored.

Of the chosen tokens 80 % become [MASK], 10 % another word, and 10 % stay as they are. [CLS] and landmarks are
never chosen.

Source: Devlin et al. 2019 (BERT), §3.1; m³BERT §2.3 takes its 15 %, RetroMAE 30 % for its encoder.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from cairn.pipeline.errors import ModelError
from cairn.pipeline.lab.train.pretrain.stream import StreamRows
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from jaxtyping import Int64

AS_MASK, AS_ANOTHER = 0.8, 0.1
_MASK_TOKENS: Final = ("[MASK]", "<mask>", "<|mask|>")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Vocabulary:
    """The id of the mask, and the ids of words, which special tokens are none of."""

    mask_id: int
    word_ids: Int64[np.ndarray, " W"]


def vocabulary_of(checkpoint: Checkpoint) -> Vocabulary:
    """Return them; a tokenizer without a mask raises :class:`ModelError`."""
    tokenizer = checkpoint.tokenizer
    mask_id = next(
        (found for name in _MASK_TOKENS if (found := tokenizer.token_to_id(name)) is not None), None
    )
    if mask_id is None:
        raise ModelError(
            f"pretraining must mask tokens, got a tokenizer without {' or '.join(_MASK_TOKENS)}; choose "
            "another base"
        )
    special = {token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    words = np.setdiff1d(np.arange(tokenizer.get_vocab_size()), list(special))
    return Vocabulary(mask_id=mask_id, word_ids=words)


def masked(
    batch: StreamRows, share: float, vocabulary: Vocabulary, generator: np.random.Generator
) -> tuple[StreamRows, Int64[np.ndarray, " K"]]:
    """Return rows with a share of their words hidden, and the positions of those that are scored.

    Positions count the batch's tokens, and there is at least one.
    """
    words = np.flatnonzero(batch.is_text_N)
    num_chosen = max(1, round(share * len(words)))
    chosen_K = np.sort(generator.choice(words, num_chosen, replace=False))
    fate_K = generator.random(num_chosen)
    ids_N = batch.rows.ids_N.copy()
    ids_N[chosen_K[fate_K < AS_MASK]] = vocabulary.mask_id
    others = chosen_K[(fate_K >= AS_MASK) & (fate_K < AS_MASK + AS_ANOTHER)]
    ids_N[others] = generator.choice(vocabulary.word_ids, len(others))
    return replace(batch, rows=replace(batch.rows, ids_N=ids_N)), chosen_K
