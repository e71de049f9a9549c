"""m³BERT written out from §2.1 and §2.2 for one row, with none of the project's layers."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def states_by_layer(
    weights: Mapping[str, torch.Tensor],
    ids: torch.Tensor,
    *,
    num_heads: int,
    theta: float,
    epsilon: float = 1e-6,
    temperature: float = 1.0,
) -> list[torch.Tensor]:
    """Return the normed hidden states h^1, h^2, … of a row's tokens, from weights by their names."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weights[f"{name}.weight"]

    x = weights["embed_tokens.weight"][ids]
    head_dim = x.shape[1] // num_heads
    angles = torch.outer(torch.arange(len(ids)), theta ** (-torch.arange(0, head_dim, 2) / head_dim))

    def turned(x: torch.Tensor) -> torch.Tensor:
        first, second = x[:, : head_dim // 2], x[:, head_dim // 2 :]
        return torch.cat(
            [
                first * angles.cos() - second * angles.sin(),
                second * angles.cos() + first * angles.sin(),
            ],
            1,
        )

    states: list[torch.Tensor] = []
    while f"layers.{len(states)}.input_layernorm.weight" in weights:
        prefix = f"layers.{len(states)}"
        normed = norm(x, f"{prefix}.input_layernorm")
        query, key, value = (normed @ weights[f"{prefix}.self_attn.{name}_proj.weight"].T for name in "qkv")
        heads: list[torch.Tensor] = []
        for head in range(num_heads):
            own = slice(head * head_dim, (head + 1) * head_dim)
            scores = turned(query[:, own]) @ turned(key[:, own]).T / head_dim**0.5 / temperature
            heads.append(scores.softmax(-1) @ value[:, own])
        x = x + torch.cat(heads, 1) @ weights[f"{prefix}.self_attn.o_proj.weight"].T
        normed = norm(x, f"{prefix}.post_attention_layernorm")
        gate, up = (normed @ weights[f"{prefix}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ weights[f"{prefix}.mlp.down_proj.weight"].T
        states.append(norm(x, "norm"))
    return states
