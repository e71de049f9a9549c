"""BERT with landmark attention as a differentiable model: the published parameters, gates, and a null token for context.

    context vectors ─▶ all layers, by themselves ─▶ keys and values of every layer ─┐
    rows of chunks ─▶ embed ─▶ layer, behind its gates ◀────────────────────────────┴─▶ … ─▶ pooled, one embedding a chunk

The same mathematics as the engine of inference (:mod:`pipeline.model.landmark_reader`), to 1e-5 in fp32: own
chunk, gated landmarks of the window's other chunks, gated memory of the context. Parameters carry the
published names, so that what is saved is an ordinary checkpoint. No dropout: short fine-tuning of a small
model does not need it, and GradCache computes everything twice.

    N tokens of a batch, rows end to end    B rows, a chunk each    D model dim    H heads    C context vectors
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from jaxtyping import Float, Float32, Int32, Int64
from torch import nn
from typing_extensions import override

from pipeline.errors import ModelError
from pipeline.model.engine.landmark_attention import Block, Memory, cut_into_blocks, landmark_attention
from pipeline.model.engine.landmark_gates import CONTEXT_GATES, LANDMARK_GATES
from pipeline.model.engine.weights import WeightReader
from pipeline.model.families.bert import FAMILIES
from pipeline.model.folders.checkpoint import Checkpoint

NULL_CONTEXT: Final = "landmark_attention.null_context"
OWN_NAMES: Final = (LANDMARK_GATES, CONTEXT_GATES, NULL_CONTEXT)
"""Parameters that no published checkpoint has; they are new where a base does not hold them."""

INITIAL_GATE: Final = -1.0
"""Gates that started at -3 had barely begun to open after some hundred steps.

At -1 a key behind them weighs e⁻¹ of an equal own one.
"""

SCORES_PER_STEP: Final = 1 << 22
"""Scores of one head in a block; the graph keeps them all, so this bounds only what is gathered at a time."""

_ACTIVATIONS: Final[Mapping[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedRows:
    """B rows of token ids end to end; ``windows`` numbers each row's window, the rows of one stand together.

    ``pooled_start`` and ``pooled_end`` are positions within each row, whose mean is the row's embedding.
    """

    ids_N: Int32[np.ndarray, " N"]
    lengths_B: Int64[np.ndarray, " B"]
    windows_B: Int64[np.ndarray, " B"]
    pooled_start_B: Int64[np.ndarray, " B"]
    pooled_end_B: Int64[np.ndarray, " B"]

    def __len__(self) -> int:
        return len(self.lengths_B)


class LandmarkEncoder(nn.Module):
    """The trainable model; new gates stand at ``initial_gate``, a new null token at zero."""

    def __init__(self, checkpoint: Checkpoint, *, initial_gate: float = INITIAL_GATE) -> None:
        super().__init__()
        config = checkpoint.config
        if (
            config.get("model_type") not in FAMILIES
            or config.get("position_embedding_type", "absolute") != "absolute"
        ):
            raise ModelError(
                f"training must start from a model with absolute positions ({', '.join(FAMILIES)}), got "
                f"{config.get('model_type')!r}; "
                "choose another base"
            )
        activation = str(config.get("hidden_act", "gelu"))
        if activation not in _ACTIVATIONS:
            raise ModelError(
                f"hidden_act must be one of {', '.join(_ACTIVATIONS)}, got {activation!r}; choose "
                "another base"
            )
        self.model_dim = checkpoint.integer("hidden_size")
        self.num_layers, self.num_heads = (
            checkpoint.integer("num_hidden_layers"),
            checkpoint.integer("num_attention_heads"),
        )
        num_positions = checkpoint.integer("max_position_embeddings")
        self._first_position = (
            int(config.get("pad_token_id") or 0) + 1 if FAMILIES[config["model_type"]] else 0
        )
        self.max_positions = num_positions - self._first_position
        self._activate = _ACTIVATIONS[activation]
        epsilon = checkpoint.number("layer_norm_eps", default=1e-12)
        num_types = checkpoint.integer("type_vocab_size", default=2)
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(checkpoint.integer("vocab_size"), self.model_dim),
                "position_embeddings": nn.Embedding(num_positions, self.model_dim),
                "token_type_embeddings": nn.Embedding(num_types, self.model_dim),
                "LayerNorm": nn.LayerNorm(self.model_dim, eps=epsilon),
            }
        )
        inner = checkpoint.integer("intermediate_size")
        layers = [_layer(self.model_dim, inner, epsilon) for _ in range(self.num_layers)]
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(layers)})
        self.landmark_attention = nn.ParameterDict(
            {
                "gates": torch.full((self.num_layers, self.num_heads), initial_gate),
                "context_gates": torch.full((self.num_layers, self.num_heads), initial_gate),
                "null_context": torch.zeros(self.model_dim),
            }
        )
        self._published_names = tuple(name for name, _ in self.named_parameters())
        self.base_prefix = self._read(checkpoint)

    @torch.no_grad()
    def _read(self, checkpoint: Checkpoint) -> str:
        """Fill the parameters and return what stands before their names in the checkpoint."""
        anchor = "embeddings.word_embeddings.weight"
        reader = WeightReader(checkpoint.tensors, anchor, torch.device("cpu"))
        for name, parameter in self.named_parameters():
            if name not in OWN_NAMES:
                parameter.copy_(reader.read(name, tuple(parameter.shape), torch.float32))
            elif name in checkpoint.tensors:
                parameter.copy_(_fitting(name, checkpoint.tensors[name], parameter))
        return next(name for name in checkpoint.tensors if name.endswith(anchor)).removesuffix(anchor)

    @torch.no_grad()
    def published_tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters, low-rank updates merged into them, under the names they have in the base's files, on the CPU."""
        tensors: dict[str, torch.Tensor] = {}
        for name in self._published_names:
            path, _, leaf = name.rpartition(".")
            tensor: torch.Tensor = getattr(self.get_submodule(path), leaf)
            tensors[name if name in OWN_NAMES else self.base_prefix + name] = (
                tensor.detach().cpu().contiguous()
            )
        return tensors

    @property
    def device(self) -> torch.device:
        """Return where the parameters lie."""
        return self.landmark_attention["null_context"].device

    @property
    def null_context(self) -> Float32[torch.Tensor, " D"]:
        """Return the token that stands for a dropped context vector."""
        return self.landmark_attention["null_context"]

    @override
    def forward(
        self,
        rows: PackedRows,
        context_CD: Float[torch.Tensor, "C D"] | None = None,
        layers: Sequence[int] | None = None,
        *,
        landmarks: bool = True,
    ) -> Float[torch.Tensor, "B E"]:
        """Return one embedding a row, not normalised: the states after ``layers`` (counted from 1), side by side; None takes the last.

        Layers beyond the last one asked for are not run. Without ``landmarks`` a chunk sees no other chunk of
        its window.
        """
        asked = [self.num_layers] if layers is None else list(layers)
        memory = None if context_CD is None else self.remember(context_CD, max(asked))
        blocks = cut_into_blocks(
            rows.lengths_B,
            rows.windows_B if landmarks else np.arange(len(rows)),
            scores_per_step=SCORES_PER_STEP // self.num_heads,
            num_context=0 if context_CD is None else len(context_CD),
            device=self.device,
        )
        x_ND = self._embed(rows)
        pooled: dict[int, torch.Tensor] = {}
        for index in range(max(asked)):
            x_ND = self._layer(index, x_ND, blocks, None if memory is None else memory[index])
            if index + 1 in asked:
                pooled[index + 1] = _pool(x_ND, rows)
        return torch.cat([pooled[layer] for layer in asked], dim=1)

    def remember(
        self, context_CD: Float[torch.Tensor, "C D"], num_layers: int | None = None
    ) -> tuple[Memory, ...]:
        """Run context vectors through the layers by themselves, without positions, and return their keys and values in each."""
        embeddings = self.embeddings
        x_CD = embeddings["LayerNorm"](
            context_CD + self.get_parameter("embeddings.token_type_embeddings.weight")[0]
        )
        memories: list[Memory] = []
        for index in range(self.num_layers if num_layers is None else num_layers):
            query, key, value = (part.unsqueeze(0).transpose(1, 2) for part in self._heads(index, x_CD))
            memories.append(Memory(key_GCd=key[0], value_GCd=value[0]))
            x_CD = self._after_attention(index, x_CD, _mix(query, key, value, None)[0])
        return tuple(memories)

    def embed_documents(self, rows: PackedRows) -> Float[torch.Tensor, "B D"]:
        """Embed context documents, a row each, as the first stage does.

        No window, no context, the mean of the row.
        """
        alone = PackedRows(
            ids_N=rows.ids_N,
            lengths_B=rows.lengths_B,
            windows_B=np.arange(len(rows)),
            pooled_start_B=np.zeros(len(rows), np.int64),
            pooled_end_B=rows.lengths_B,
        )
        return self(alone)

    def _embed(self, rows: PackedRows) -> torch.Tensor:
        embeddings = self.embeddings
        starts_B = np.cumsum(rows.lengths_B) - rows.lengths_B
        longest = int(rows.lengths_B.max())
        if longest > self.max_positions:
            raise ModelError(
                f"a row must have at most {self.max_positions} tokens, got {longest}; choose a smaller "
                "interval"
            )
        positions_N = np.arange(len(rows.ids_N)) - np.repeat(starts_B, rows.lengths_B) + self._first_position
        ids_N, places_N = (
            torch.from_numpy(x.astype(np.int64)).to(self.device) for x in (rows.ids_N, positions_N)
        )
        x_ND = embeddings["word_embeddings"](ids_N) + embeddings["position_embeddings"](places_N)
        return embeddings["LayerNorm"](
            x_ND + self.get_parameter("embeddings.token_type_embeddings.weight")[0]
        )

    def _layer(
        self, index: int, x_ND: torch.Tensor, blocks: Sequence[Block], memory: Memory | None
    ) -> torch.Tensor:
        query, key, value = self._heads(index, x_ND)
        mixed_NHd = landmark_attention(
            query,
            key,
            value,
            blocks,
            mix=_mix,
            gates_H=self.landmark_attention["gates"][index],
            memory=memory,
            context_gates_H=self.landmark_attention["context_gates"][index],
        )
        return self._after_attention(index, x_ND, mixed_NHd)

    def _heads(self, index: int, x_ND: torch.Tensor) -> tuple[torch.Tensor, ...]:
        projections = cast("Any", self.encoder["layer"])[index]["attention"]["self"]
        return tuple(
            projections[name](x_ND).unflatten(-1, (self.num_heads, -1)) for name in ("query", "key", "value")
        )

    def _after_attention(self, index: int, x_ND: torch.Tensor, mixed_NHd: torch.Tensor) -> torch.Tensor:
        layer = cast("Any", self.encoder["layer"])[index]
        output = layer["attention"]["output"]
        x_ND = output["LayerNorm"](x_ND + output["dense"](mixed_NHd.flatten(1)))
        inner = self._activate(layer["intermediate"]["dense"](x_ND))
        return layer["output"]["LayerNorm"](x_ND + layer["output"]["dense"](inner))


def _layer(width: int, inner: int, epsilon: float) -> nn.ModuleDict:
    """Lay a layer out so that its parameters get the published names."""
    return nn.ModuleDict(
        {
            "attention": nn.ModuleDict(
                {
                    "self": nn.ModuleDict(
                        {name: nn.Linear(width, width) for name in ("query", "key", "value")}
                    ),
                    "output": nn.ModuleDict(
                        {"dense": nn.Linear(width, width), "LayerNorm": nn.LayerNorm(width, eps=epsilon)}
                    ),
                }
            ),
            "intermediate": nn.ModuleDict({"dense": nn.Linear(width, inner)}),
            "output": nn.ModuleDict(
                {"dense": nn.Linear(inner, width), "LayerNorm": nn.LayerNorm(width, eps=epsilon)}
            ),
        }
    )


def _fitting(name: str, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if tensor.shape != parameter.shape:
        raise ModelError(
            f"{name} must have the shape {tuple(parameter.shape)}, got {tuple(tensor.shape)}; the file "
            "does not fit its config.json"
        )
    return tensor.float()


def _mix(
    query_BHQd: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    mask = None if bias is None else bias.to(query_BHQd.dtype)
    return F.scaled_dot_product_attention(query_BHQd, key, value, attn_mask=mask).transpose(1, 2)


def _pool(x_ND: torch.Tensor, rows: PackedRows) -> Float32[torch.Tensor, "B D"]:
    """Average each row's span, in float32."""
    starts_B = np.cumsum(rows.lengths_B) - rows.lengths_B
    num_pooled_B = rows.pooled_end_B - rows.pooled_start_B
    row_P = np.repeat(np.arange(len(rows)), num_pooled_B)
    place_P = np.arange(int(num_pooled_B.sum())) - np.repeat(
        np.cumsum(num_pooled_B) - num_pooled_B, num_pooled_B
    )
    token_P = (starts_B + rows.pooled_start_B)[row_P] + place_P
    tokens, owners, sizes = (torch.from_numpy(x).to(x_ND.device) for x in (token_P, row_P, num_pooled_B))
    sums_BD = x_ND.new_zeros((len(rows), x_ND.shape[1]), dtype=torch.float32).index_add_(
        0, owners, x_ND[tokens].float()
    )
    return sums_BD / sizes[:, None]
