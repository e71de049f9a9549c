"""m³BERT's architecture as a differentiable model with its losses, saved as a backbone.

    ids ─▶ embed_tokens ─▶ layer 1 ─▶ … ─▶ layer l ─▶ … ─▶ layer N
                                             │
                                           norm ─▶ h^l ─▶ h^l[:d] W[:d] + b     one MLM head for all l and d

BERT with what language models have taught since: RMSNorm before each part, SwiGLU, no biases, no dropout,
fused attention. The layers are the engine's. The weights are named as decoder LLMs name theirs, so
:mod:`pipeline.model.families.decoder` reads the saved folder.

Source: m³BERT §2.1 (the layers L, the dimensions D, the shared head, L_total) and §2.2. The paper leaves
open, and here is: positions by rotation; one final norm shared by all exits, so that the first l layers are a
model of their own; W not tied to the input table; a feed-forward of 8/3 hidden sizes, which costs what BERT's
costs. No trainer is built here, and no objectives of stage 3 or distillation.

    B rows   T tokens   D hidden size   H heads   d head dim   K masked tokens   V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from jaxtyping import Bool, Float, Float32, Int64
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

from pipeline import durable
from pipeline.errors import ConfigError, ModelError
from pipeline.model.engine.differentiable import DifferentiableOperations
from pipeline.model.engine.layer import GatedMlp, Layer, run_layer
from pipeline.model.engine.pattern import Shape
from pipeline.model.engine.rotary import RotaryTable
from pipeline.model.engine.weights import INITIAL_STD, Linear, Norm, stack_rows
from pipeline.model.folders.checkpoint import WEIGHTS_NAME, Checkpoint, read_checkpoint

MODEL_TYPE: Final = "m3bert"

NO_LABEL: Final = -100
"""Marks a token whose prediction is not scored, as torch's cross entropy has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class M3BertConfig:
    """Sizes, named as in ``config.json``; the defaults are the paper's base model.

    ``matryoshka_layers`` and ``matryoshka_dims`` are the paper's L and D: the exits and the widths that
    pretraining scores.
    """

    vocab_size: int
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 2048
    max_position_embeddings: int = 1024
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    matryoshka_layers: tuple[int, ...] = (4, 8, 12)
    matryoshka_dims: tuple[int, ...] = (32, 64, 128, 768)

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "intermediate_size",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of an m3BERT must be positive, got {getattr(self, name)}")
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ConfigError(
                f"hidden_size of an m3BERT must divide into even parts for {self.num_attention_heads} "
                f"heads, got {self.hidden_size}"
            )
        for name, values, most in (
            ("matryoshka_layers", self.matryoshka_layers, self.num_hidden_layers),
            ("matryoshka_dims", self.matryoshka_dims, self.hidden_size),
        ):
            _require_within(name, values, most)

    @property
    def head_dim(self) -> int:
        """Return the width of a head."""
        return self.hidden_size // self.num_attention_heads


class M3Bert(nn.Module):
    """The encoder with its MLM head; new weights are drawn from ``seed``."""

    def __init__(self, config: M3BertConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_LayerWeights(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlm_head = MatryoshkaMlmHead(config)
        self._shape = Shape(
            num_heads=config.num_attention_heads,
            num_key_value_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            max_positions=config.max_position_embeddings,
            norm_first=True,
        )
        self._draw_weights(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _draw_weights(self, generator: torch.Generator) -> None:
        smaller = INITIAL_STD / (2 * self.config.num_hidden_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                returns = name.endswith(("o_proj.weight", "down_proj.weight"))
                parameter.normal_(0.0, smaller if returns else INITIAL_STD, generator=generator)

    def forward(
        self,
        ids_BT: Int64[torch.Tensor, "B T"],
        lengths_B: Int64[torch.Tensor, " B"],
        layers: Sequence[int] | None = None,
    ) -> dict[int, Float[torch.Tensor, "B T D"]]:
        """Return the normed hidden states h^l by layer l, counted from 1; None asks for the configured exits.

        Layers beyond the last one asked for are not run. Positions at and after a row's length hold no
        meaning.
        """
        asked = self._layers_asked(layers)
        num_tokens = ids_BT.shape[1]
        if num_tokens > self.config.max_position_embeddings:
            raise ModelError(
                f"a row must have at most {self.config.max_position_embeddings} tokens, got "
                f"{num_tokens}; cut it"
            )
        rotary = RotaryTable(
            rotary_dim=self.config.head_dim,
            theta=self.config.rope_theta,
            num_positions=num_tokens,
            device=ids_BT.device,
        )
        visible = _visible_keys(lengths_B, num_tokens)
        operations = DifferentiableOperations(
            self._shape, partial(_attend, visible=visible), rotary.angles(0, num_tokens)
        )
        x_BTD = self.embed_tokens(ids_BT)
        states: dict[int, torch.Tensor] = {}
        for number, weights in enumerate(self.layers, start=1):
            x_BTD = run_layer(weights(), x_BTD, operations, norm_first=True)
            if number in asked:
                states[number] = self.norm(x_BTD)
            if number == max(asked):
                break
        return states

    def mlm_losses(
        self,
        ids_BT: Int64[torch.Tensor, "B T"],
        lengths_B: Int64[torch.Tensor, " B"],
        labels_BT: Int64[torch.Tensor, "B T"],
        *,
        layers: Sequence[int] | None = None,
        dims: Sequence[int] | None = None,
    ) -> dict[tuple[int, int], Float32[torch.Tensor, ""]]:
        """Return the cross entropy of the scored tokens by (layer, width); the paper's L_total is the sum.

        ``labels`` holds the true id where a token is scored and :data:`NO_LABEL` elsewhere; only scored
        tokens reach the head.
        """
        widths = self.config.matryoshka_dims if dims is None else tuple(dims)
        _require_within("dims", widths, self.config.hidden_size)
        is_scored_BT = labels_BT != NO_LABEL
        labels_K = labels_BT[is_scored_BT]
        if not len(labels_K):
            raise ModelError("labels must score at least one token, got none; mask some tokens")
        scored = {layer: states[is_scored_BT] for layer, states in self(ids_BT, lengths_B, layers).items()}
        return {
            (layer, dim): F.cross_entropy(self.mlm_head(states_KD, dim).float(), labels_K)
            for layer, states_KD in scored.items()
            for dim in widths
        }

    def _layers_asked(self, layers: Sequence[int] | None) -> frozenset[int]:
        asked = self.config.matryoshka_layers if layers is None else tuple(layers)
        _require_within("layers", asked, self.config.num_hidden_layers)
        return frozenset(asked)


class MatryoshkaMlmHead(nn.Module):
    """One W of D x V and one bias for every width.

    A state cut to d dimensions meets the first d rows of W.
    """

    def __init__(self, config: M3BertConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size, config.vocab_size))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, states_KD: Float[torch.Tensor, "*K D"], dim: int) -> Float[torch.Tensor, "*K V"]:
        """Return the logits of the first ``dim`` dimensions."""
        return F.linear(states_KD[..., :dim], self.weight[:dim].t(), self.bias)


class _LayerWeights(nn.Module):
    """One layer's parameters under their published names."""

    def __init__(self, config: M3BertConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size

        def linear(num_in: int, num_out: int) -> nn.Linear:
            return nn.Linear(num_in, num_out, bias=False)

        self.input_layernorm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.self_attn = nn.ModuleDict({f"{name}_proj": linear(width, width) for name in "qkvo"})
        self.post_attention_layernorm = nn.RMSNorm(width, eps=config.rms_norm_eps)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": linear(width, inner),
                "up_proj": linear(width, inner),
                "down_proj": linear(inner, width),
            }
        )
        self._epsilon = config.rms_norm_eps

    def forward(self) -> Layer:
        """Return the parameters as the engine's layer."""
        attention, mlp = (
            {name: Linear(weight=part.get_parameter("weight")) for name, part in parts.items()}
            for parts in (self.self_attn, self.mlp)
        )
        return Layer(
            attention_norm=Norm(weight=self.input_layernorm.weight, epsilon=self._epsilon, kind="rms"),
            qkv=stack_rows([attention[f"{name}_proj"] for name in "qkv"]),
            attention_output=attention["o_proj"],
            mlp_norm=Norm(weight=self.post_attention_layernorm.weight, epsilon=self._epsilon, kind="rms"),
            mlp=GatedMlp(
                gate_up=stack_rows([mlp["gate_proj"], mlp["up_proj"]]),
                down=mlp["down_proj"],
                activation="silu",
            ),
        )


def _attend(
    query_BTHd: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: Bool[torch.Tensor, "B 1 1 T"] | None,
) -> torch.Tensor:
    query, key, value = (part.transpose(1, 2) for part in (query_BTHd, key, value))
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible).transpose(1, 2)


def _visible_keys(lengths_B: torch.Tensor, num_tokens: int) -> Bool[torch.Tensor, "B 1 1 T"] | None:
    """Return the mask of true lengths; None where nothing is padded, which keeps the fastest kernel."""
    if bool((lengths_B == num_tokens).all()):
        return None
    return (torch.arange(num_tokens, device=lengths_B.device) < lengths_B[:, None])[:, None, None]


def _require_within(name: str, values: Sequence[int], most: int) -> None:
    if not values or not all(1 <= value <= most for value in values):
        raise ConfigError(f"{name} of an m3BERT must lie between 1 and {most}, got {list(values)}")


def save_m3bert(model: M3Bert, folder: Path, tokenizer: Tokenizer) -> None:
    """Write a folder that :func:`load_m3bert` and ``--model`` read.

    Weights, tokenizer and, last, the configuration.
    """
    with durable.storage_errors("writing the model"):
        folder.mkdir(parents=True, exist_ok=True)
        with durable.replacing(folder / WEIGHTS_NAME) as temporary:
            save_file(
                {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()},
                temporary,
            )
        durable.write_bytes(folder / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
        durable.write_json(folder / "config.json", {"model_type": MODEL_TYPE, **asdict(model.config)})


def load_m3bert(folder: Path) -> M3Bert:
    """Read a saved model to go on training it; a file that does not fit raises :class:`ModelError`."""
    checkpoint = read_checkpoint(folder)
    model = M3Bert(_read_config(checkpoint))
    wanted = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint.tensors.items()}
    for name, tensor in wanted.items():
        if shapes.get(name) != tuple(tensor.shape):
            raise ModelError(
                f"{name} of an m3BERT must have the shape {tuple(tensor.shape)}, got "
                f"{shapes.get(name, 'none')}; "
                "the file does not fit its config.json"
            )
    model.load_state_dict({name: checkpoint.tensors[name] for name in wanted})
    return model


def _read_config(checkpoint: Checkpoint) -> M3BertConfig:
    config = checkpoint.config
    if config.get("model_type") != MODEL_TYPE:
        raise ModelError(
            f"model_type must be {MODEL_TYPE}, got {config.get('model_type')!r}; give a folder that "
            "holds an m3BERT"
        )
    try:
        return M3BertConfig(
            vocab_size=checkpoint.integer("vocab_size"),
            hidden_size=checkpoint.integer("hidden_size"),
            num_hidden_layers=checkpoint.integer("num_hidden_layers"),
            num_attention_heads=checkpoint.integer("num_attention_heads"),
            intermediate_size=checkpoint.integer("intermediate_size"),
            max_position_embeddings=checkpoint.integer("max_position_embeddings"),
            rope_theta=checkpoint.number("rope_theta"),
            rms_norm_eps=checkpoint.number("rms_norm_eps"),
            matryoshka_layers=_whole_numbers(config, "matryoshka_layers"),
            matryoshka_dims=_whole_numbers(config, "matryoshka_dims"),
        )
    except ConfigError as error:
        raise ModelError(
            f"config.json of the model must hold the sizes of an m3BERT, got others ({error}); fetch it again"
        ) from error


def _whole_numbers(config: Mapping[str, Any], name: str) -> tuple[int, ...]:
    values: Any = config.get(name)
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise ModelError(
            f"config.json of the model must give {name} as a list of whole numbers, got {values!r}; "
            "fetch it again"
        )
    return tuple(values)
