"""Last-layer states of the tokens of texts: what late interaction compares.

A text is cut into rows at words, ``[CLS] prefix z [SEP]``, each read by itself as in chunk attention. Kept
are the states of its own tokens, not those of [CLS], prefix and [SEP].

    N texts    T tokens of all texts    D model dim    V what is kept of a state
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.corpus.tokenization import tokenize
from cairn.pipeline.model.batching import run_in_batches
from cairn.pipeline.model.document_encoder import pad_rows
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.landmarks import NO_PREFIX, lay_out, split_into_chunks
from cairn.pipeline.ragged import ranges
from jaxtyping import Float16, Int32, Int64

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
    row_tokens: int | None = None,
    max_tokens: int | None = None,
    rewrite: Rewrite | None = None,
    prefix_ids: Int32[np.ndarray, " P"] = NO_PREFIX,
    on_tokens: Callable[[int], None] | None = None,
) -> TokenStates:
    """Return the unit states of every text's tokens, as ``rewrite`` keeps them.

    A row holds at most ``row_tokens`` of a text, None: as many as the model reads. Tokens of a text after the
    first ``max_tokens`` are left out. ``on_tokens`` hears how many tokens each batch has finished.
    """
    tokens = tokenize(backbone.tokenizer, texts)
    counts_N = np.diff(tokens.text_offsets)
    counts_N = counts_N if max_tokens is None else np.minimum(counts_N, max_tokens)
    offsets_N1 = np.concatenate([[0], np.cumsum(counts_N)])
    own = ranges(tokens.text_offsets[:-1], counts_N)
    head = len(prefix_ids) + (backbone.cls_id is not None)
    room = backbone.max_positions - head - 1
    chunks = split_into_chunks(tokens.breaks[own], offsets_N1, min(row_tokens or room, room))
    rows = lay_out(
        tokens.ids[own],
        chunks,
        attention="chunk",
        cls_id=backbone.cls_id,
        landmark_id=backbone.landmark_id,
        pooling="mean",
        prefix_ids=prefix_ids,
    )
    counts_R = np.diff(chunks.token_offsets)
    kept = [np.zeros((0, 0), np.float16)] * len(counts_R)

    def run(batch_B: Int64[np.ndarray, " B"]) -> Int64[np.ndarray, " B"]:
        ids_BT, lengths_B = pad_rows(rows, batch_B, backbone.pad_id)
        with torch.inference_mode():
            hidden_BTD = backbone.hidden_states(ids_BT, lengths_B)
            place_T = np.arange(ids_BT.shape[1])
            is_own_BT = torch.from_numpy((place_T >= head) & (place_T < lengths_B[:, None] - 1))
            own_TD = F.normalize(hidden_BTD[is_own_BT.to(hidden_BTD.device)].float(), dim=1)
            states_TV = (own_TD if rewrite is None else rewrite(own_TD)).half().cpu().numpy()
        parts = np.split(states_TV, np.cumsum(counts_R[batch_B])[:-1])
        for row, part in zip(batch_B.tolist(), parts, strict=True):
            kept[row] = part
        return batch_B

    for finished in run_in_batches(np.diff(rows.row_offsets), batch_tokens, run, backbone.device):
        if on_tokens is not None:
            on_tokens(int(counts_R[finished].sum()))
    return TokenStates(
        states_TV=np.concatenate(kept) if kept else np.zeros((0, backbone.model_dim), np.float16),
        ids_T=tokens.ids[own],
        offsets_N1=offsets_N1,
    )
