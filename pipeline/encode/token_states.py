"""Last-layer states of the tokens of texts: what late interaction compares.

Each text is one row, ``[CLS] prefix text [SEP]``, cut at the model's longest row. Kept are the states of its
own tokens, not those of [CLS], prefix and [SEP].

    N texts    T tokens of all texts    D model dim
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from jaxtyping import Float16, Int32, Int64

from pipeline.corpus.tokenization import tokenize
from pipeline.model.batching import run_in_batches
from pipeline.model.document_encoder import pad_rows
from pipeline.model.engine.backbone import Backbone
from pipeline.model.landmarks import NO_PREFIX, Chunks, chunk_rows
from pipeline.ragged import ranges

Rewrite = Callable[[torch.Tensor], torch.Tensor]
"""From unit states ``T D`` in float32 to what is kept of them, ``T V``."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenStates:
    """States of N texts laid end to end; text ``i`` owns ``offsets_N1[i]:offsets_N1[i + 1]``."""

    states_TV: Float16[np.ndarray, "T V"]
    ids_T: Int32[np.ndarray, " T"]
    offsets_N1: Int64[np.ndarray, " N1"]

    def of(self, text: int) -> slice:
        """Return where the tokens of a text stand."""
        return slice(int(self.offsets_N1[text]), int(self.offsets_N1[text + 1]))


def embed_tokens(
    backbone: Backbone,
    texts: Sequence[str],
    *,
    batch_tokens: int,
    rewrite: Rewrite | None = None,
    prefix_ids: Int32[np.ndarray, " P"] = NO_PREFIX,
    on_tokens: Callable[[int], None] | None = None,
) -> TokenStates:
    """Return the unit states of every text's tokens, as ``rewrite`` keeps them.

    ``on_tokens`` hears how many tokens each batch has finished.
    """
    tokens = tokenize(backbone.tokenizer, texts)
    head = len(prefix_ids) + (backbone.cls_id is not None)
    counts_N = np.minimum(np.diff(tokens.text_offsets), backbone.max_positions - head - 1)
    offsets_N1 = np.concatenate([[0], np.cumsum(counts_N)])
    ids_T = tokens.ids[ranges(tokens.text_offsets[:-1], counts_N)]
    one_chunk_each = Chunks(token_offsets=offsets_N1, chunk_offsets=np.arange(len(texts) + 1))
    rows = chunk_rows(
        ids_T,
        one_chunk_each,
        cls_id=backbone.cls_id,
        landmark_id=backbone.landmark_id,
        pooling="mean",
        prefix_ids=prefix_ids,
    )
    kept: dict[int, np.ndarray] = {}

    def run(batch_B: Int64[np.ndarray, " B"]) -> Int64[np.ndarray, " B"]:
        ids_BT, lengths_B = pad_rows(rows, batch_B, backbone.pad_id)
        with torch.inference_mode():
            hidden_BTD = backbone.hidden_states(ids_BT, lengths_B)
            place_T = np.arange(ids_BT.shape[1])
            is_own_BT = torch.from_numpy((place_T >= head) & (place_T < lengths_B[:, None] - 1))
            own_TD = F.normalize(hidden_BTD[is_own_BT.to(hidden_BTD.device)].float(), dim=1)
            states_TV = (own_TD if rewrite is None else rewrite(own_TD)).half().cpu().numpy()
        counts_B = lengths_B - head - 1
        kept.update(zip(batch_B.tolist(), np.split(states_TV, np.cumsum(counts_B)[:-1]), strict=True))
        return batch_B

    for finished in run_in_batches(np.diff(rows.row_offsets), batch_tokens, run, backbone.device):
        if on_tokens is not None:
            on_tokens(int(counts_N[finished].sum()))
    return TokenStates(
        states_TV=np.concatenate([kept[text] for text in range(len(texts))])
        if texts
        else np.zeros((0, backbone.model_dim), np.float16),
        ids_T=ids_T,
        offsets_N1=offsets_N1,
    )
