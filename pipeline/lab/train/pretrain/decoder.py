"""RetroMAE's enhanced decoder: one layer that rebuilds every token of a text from the text's one vector.

    queries        h + p_i                     for every token i
    keys, values   h, e_1 + p_1 … e_n + p_n    e the input embeddings of the unmasked text
    token i sees   h, and a sample of the other tokens drawn for it alone; never itself

    x = norm(queries + attention);  states = norm(x + feed-forward(x))

h is the mean of the landmarks' states, or [CLS]'s where a row has no landmarks. What the decoder cannot see
it must take from h: that is what trains h. The decoder is left out of the saved model.

Source: Xiao et al. 2022 (RetroMAE), §3.2 and eq. 4-8; LMK §6.3 puts the landmarks' mean in the place of
[CLS]. Differs: embeddings are normed after their positions are added, as in that paper's code; positions are
the decoder's own, begun as the encoder's where that has any. [CLS] and landmarks are not rebuilt.

    P texts    N their tokens    D model dim    H heads
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.model.engine.weights import INITIAL_STD
from jaxtyping import Bool, Float, Int64
from torch import nn


class EnhancedDecoder(nn.Module):
    """The layer with its positions; new weights come from ``generator``."""

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        num_positions: int,
        generator: torch.Generator,
        positions_PD: Float[torch.Tensor, "P D"] | None = None,
    ) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.positions = nn.Parameter(torch.empty(num_positions + 1, model_dim))
        self.query, self.output = (nn.Linear(model_dim, model_dim) for _ in range(2))
        self.key_value = nn.Linear(model_dim, 2 * model_dim)
        self.up, self.down = nn.Linear(model_dim, 4 * model_dim), nn.Linear(4 * model_dim, model_dim)
        self.input_norm, self.attention_norm, self.output_norm = (nn.LayerNorm(model_dim) for _ in range(3))
        with torch.no_grad():
            for module in self.children():
                if isinstance(module, nn.Linear):
                    module.weight.normal_(0.0, INITIAL_STD, generator=generator)
                    module.bias.zero_()
            self.positions.normal_(0.0, INITIAL_STD, generator=generator)
            if positions_PD is not None:
                num_taken = min(len(positions_PD), len(self.positions))
                self.positions[:num_taken] = positions_PD[:num_taken]

    def forward(
        self,
        sentence_PD: Float[torch.Tensor, "P D"],
        tokens_ND: Float[torch.Tensor, "N D"],
        lengths: Sequence[int],
        visible: Sequence[Bool[torch.Tensor, "_ _"]],
    ) -> Float[torch.Tensor, "N D"]:
        """Return the state of every token; ``visible`` says for each text which token sees which."""
        device = tokens_ND.device
        owner_N = torch.repeat_interleave(torch.tensor(lengths, device=device))
        place_N = torch.cat([torch.arange(1, length + 1, device=device) for length in lengths])
        positions_ND = self.positions[place_N]
        queries_ND = self.input_norm(sentence_PD[owner_N] + positions_ND)
        query_ND = self.query(queries_ND)
        of_sentence, of_tokens = (
            self.key_value(self.input_norm(x)) for x in (sentence_PD, tokens_ND + positions_ND)
        )
        mixed = [
            self._attend(query_nD, torch.cat([of_sentence[text, None], keys]), seen)
            for text, (query_nD, keys, seen) in enumerate(
                zip(query_ND.split(list(lengths)), of_tokens.split(list(lengths)), visible, strict=True)
            )
        ]
        x_ND = self.attention_norm(queries_ND + self.output(torch.cat(mixed)))
        return self.output_norm(x_ND + self.down(F.gelu(self.up(x_ND))))

    def _attend(
        self, query_nD: torch.Tensor, key_value: torch.Tensor, visible_nn: Bool[torch.Tensor, "_ _"]
    ) -> Float[torch.Tensor, "n D"]:
        query, key, value = (
            x.unflatten(-1, (self._num_heads, -1)).transpose(0, 1)
            for x in (query_nD, *key_value.chunk(2, dim=-1))
        )
        seen = F.pad(visible_nn, (1, 0), value=True)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=seen).transpose(0, 1).flatten(1)


def sampled_visibility(
    num_tokens: int, hidden_share: float, generator: torch.Generator
) -> Bool[torch.Tensor, "_ _"]:
    """Draw for each token which others it sees: each with 1 - ``hidden_share``, itself never."""
    seen_nn = torch.rand(num_tokens, num_tokens, generator=generator) >= hidden_share
    return seen_nn.fill_diagonal_(fill_value=False)


def bottleneck(
    states_ND: Float[torch.Tensor, "N D"],
    lengths: Sequence[int],
    pooled: Sequence[Int64[torch.Tensor, " _"]],
) -> Float[torch.Tensor, "P D"]:
    """Return the mean of the states at each text's positions, which count within its row."""
    rows = states_ND.split(list(lengths))
    return torch.stack([row[places].mean(0) for row, places in zip(rows, pooled, strict=True)])
