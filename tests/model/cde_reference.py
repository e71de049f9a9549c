"""CDE's two stages written naively, one row at a time, from the tensors of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from safetensors.torch import load_file

DIM, HEADS, CONTEXT, SOFT = 32, 4, 6, 8
IDS = [[2, 7, 9, 30, 31, 12, 3], [2, 8, 3], [2, *range(5, 42), 40, 3]]
VERSIONS = pytest.mark.parametrize("version", [1, 2])


class Reference:
    """The published forward pass, one row at a time, over the tensors of the file."""

    def __init__(self, folder: Path, version: int, temperature: float = 1.0) -> None:
        self.tensors = load_file(folder / "model.safetensors")
        self.config = json.loads((folder / "config.json").read_text())
        self.version = version
        self.temperature = temperature

    def first_stage(self, ids: list[int]) -> torch.Tensor:
        prefix = "first_stage_model.embedder."
        x = self.layers(prefix, self.norm_in(prefix, self.look_up(prefix, ids)), list(range(len(ids))))
        return self.head("first_stage_model.mlp", x.mean(0), F.gelu)

    def second_stage(self, ids: list[int], context: list[torch.Tensor]) -> torch.Tensor:
        prefix, stage = "second_stage_model.backbone.", "second_stage_model"
        soft = self.head(f"{stage}.prompt_projection", torch.ones(DIM), F.relu).view(SOFT, DIM)
        lead = torch.cat([torch.stack(context), soft]) if context else soft
        # The text has passed the embedding layer when it joins the lead, and passes it a second time with it.
        text = self.look_up(prefix, ids)
        if self.version == 1:
            types = self.tensors[f"{prefix}embeddings.token_type_embeddings.weight"][0]
            x = torch.cat([lead, text]) + types
        else:
            x = torch.cat([lead, self.norm_in(prefix, text)])
        x = self.layers(prefix, self.norm_in(prefix, x), self.positions(len(lead) - SOFT, len(x)))
        return self.head(f"{stage}.output_projection", x[len(lead) :].mean(0), F.relu)

    def positions(self, num_context: int, length: int) -> list[int | None]:
        if self.version == 1 and self.config["disable_transductive_rotary_embedding"]:
            start = self.config["transductive_corpus_size"]
            return [None] * num_context + list(range(start, start + length - num_context))
        return list(range(length))

    def look_up(self, prefix: str, ids: list[int]) -> torch.Tensor:
        if self.version == 2:
            return self.tensors[f"{prefix}embeddings.tok_embeddings.weight"][ids]
        types = self.tensors[f"{prefix}embeddings.token_type_embeddings.weight"]
        return self.tensors[f"{prefix}embeddings.word_embeddings.weight"][ids] + types[0]

    def norm_in(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        return self.norm(f"{prefix}emb_ln" if self.version == 1 else f"{prefix}embeddings.norm", x)

    def norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        epsilon = 1e-12 if self.version == 1 else 1e-5
        normed = centred / (centred.square().mean(-1, keepdim=True) + epsilon).sqrt()
        return normed * self.tensors[f"{name}.weight"] + self.tensors.get(f"{name}.bias", 0.0)

    def head(
        self, name: str, x: torch.Tensor, activate: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        first, second = (self.tensors[f"{name}.{number}.weight"] for number in (0, 2))
        return second @ activate(first @ x + self.tensors[f"{name}.0.bias"]) + self.tensors[f"{name}.2.bias"]

    def layers(self, prefix: str, x: torch.Tensor, positions: list[int | None]) -> torch.Tensor:
        return (
            self.nomic_layers(prefix, x, positions)
            if self.version == 1
            else self.modern_layers(prefix, x, positions)
        )

    def nomic_layers(self, prefix: str, x: torch.Tensor, positions: list[int | None]) -> torch.Tensor:
        index = 0
        while f"{prefix}encoder.layers.{index}.norm1.weight" in self.tensors:
            layer = f"{prefix}encoder.layers.{index}."
            mixed = self.attention(x, self.tensors[f"{layer}attn.Wqkv.weight"], positions, theta=1000.0)
            x = self.norm(f"{layer}norm1", x + mixed @ self.tensors[f"{layer}attn.out_proj.weight"].T)
            up, gate = (x @ self.tensors[f"{layer}mlp.{name}.weight"].T for name in ("fc11", "fc12"))
            x = self.norm(f"{layer}norm2", x + (up * F.silu(gate)) @ self.tensors[f"{layer}mlp.fc2.weight"].T)
            index += 1
        return x

    def modern_layers(self, prefix: str, x: torch.Tensor, positions: list[int | None]) -> torch.Tensor:
        index = 0
        while f"{prefix}layers.{index}.mlp_norm.weight" in self.tensors:
            layer = f"{prefix}layers.{index}."
            is_local = index % 3 != 0
            normed = self.norm(f"{layer}attn_norm", x) if index else x
            qkv, theta = self.tensors[f"{layer}attn.Wqkv.weight"], 10_000.0 if is_local else 160_000.0
            mixed = self.attention(normed, qkv, positions, theta=theta, radius=4 if is_local else None)
            x = x + mixed @ self.tensors[f"{layer}attn.Wo.weight"].T
            gate, up = (self.norm(f"{layer}mlp_norm", x) @ self.tensors[f"{layer}mlp.Wi.weight"].T).chunk(
                2, dim=-1
            )
            x = x + (F.gelu(gate) * up) @ self.tensors[f"{layer}mlp.Wo.weight"].T
            index += 1
        return self.norm(f"{prefix}final_norm", x)

    def attention(
        self,
        x: torch.Tensor,
        qkv: torch.Tensor,
        positions: list[int | None],
        *,
        theta: float,
        radius: int | None = None,
    ) -> torch.Tensor:
        width = DIM // HEADS
        query, key, value = (x @ qkv.T).view(len(x), 3, HEADS, width).unbind(1)
        query, key = (
            torch.stack([self.turn(heads[i], place, theta) for i, place in enumerate(positions)])
            for heads in (query, key)
        )
        out = torch.zeros(len(x), HEADS, width)
        for i in range(len(x)):
            seen = slice(None) if radius is None else slice(max(i - radius, 0), i + radius + 1)
            for head in range(HEADS):
                scores = key[seen, head] @ query[i, head] / width**0.5 / self.temperature
                out[i, head] = scores.softmax(0) @ value[seen, head]
        return out.reshape(len(x), DIM)

    @staticmethod
    def turn(heads: torch.Tensor, position: int | None, theta: float) -> torch.Tensor:
        if position is None:
            return heads
        half = heads.shape[1] // 2
        angles = position / theta ** (torch.arange(half) / half)
        first, second = heads[:, :half], heads[:, half:]
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()],
            dim=1,
        )
