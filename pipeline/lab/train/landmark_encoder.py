"""A transformer that reads its context as a differentiable model: published parameters and a null token.

    context documents ─▶ first stage: layers of its own, or the same ones ─▶ context vectors c
    rows of chunks ─▶ embed ─▶ c c c [CLS] z [LMK] z [LMK] ─▶ layers ─▶ pooled per chunk

The context's vectors stand before each row's text as input vectors without a position (CDE, eq. 5 and 6) and
are attended both ways in every global layer; in a local one each sees itself alone. The layers are the
engine's: the family's reader takes the parameters as the tensors of a checkpoint, and
:class:`DifferentiableOperations` runs what it reads. So vectors are those of inference
(:meth:`cairn.pipeline.model.engine.backbone.Backbone.hidden_states`), to 1e-5 in fp32. A family's final norm
stands before all that is pooled, so that the first layers are a model of their own. Parameters carry the
published names, so that what is saved is an ordinary checkpoint. No dropout: short fine-tuning of a small
model does not need it, and GradCache computes everything twice.

Sequence dropout: in training a null token takes a context vector's place with some probability, drawn for
each row and vector; a row without a context reads one null token.

Source: Morris & Rush 2024 (CDE), §4.2, eq. 5 and 6, and embedding without context. Differs: without a context
there is one null token, not one for each vector, so that it costs nothing when served.

    N tokens of a batch, rows end to end    B rows, a chunk each    D width    H heads    C context vectors
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Final, TypeVar, cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline import durable
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.lab.train.packed_rows import alone, attend_in_blocks, cut_into_blocks, pooled
from cairn.pipeline.lab.train.settings import RunConfig
from cairn.pipeline.model.backbone_loader import reader_of
from cairn.pipeline.model.document_encoder import CUDA_BATCH_FACTOR
from cairn.pipeline.model.engine.pattern import Shape
from cairn.pipeline.model.engine.precision import default_device, resolve_precision
from cairn.pipeline.model.engine.transformer import ACTIVATE, Activation, Transformer, run_layer
from cairn.pipeline.model.engine.weights import AnyLinear, Norm, NotedTensors
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from cairn.pipeline.model.folders.encoder_folder import save_encoder_folder
from cairn.pipeline.model.folders.first_layers import layer_of, split_stages
from cairn.pipeline.model.folders.own_tensors import (
    FIRST_STAGE,
    LATENT_ATTENTION,
    NULL_CONTEXT,
)
from cairn.pipeline.model.landmarks import Rows
from cairn.pipeline.model.latent_attention import PUBLISHED_HEADS, read_latent_attention
from cairn.pipeline.ragged import places_in_groups, ranges
from jaxtyping import Bool, Float, Float32, Int64
from safetensors.torch import save_file
from torch import nn
from typing_extensions import override


def shared_prefix(names: Iterable[str]) -> str:
    """Return the parts that all names begin with; layers and embeddings begin with words of their own."""
    columns = zip(*(name.split(".") for name in names), strict=False)
    return "".join(f"{parts[0]}." for parts in takewhile(lambda parts: len(set(parts)) == 1, columns))


_Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of queries ``… H d`` over keys and values ``… G d``, giving ``… H d``."""

Angles = tuple[Float32[torch.Tensor, "T E"], Float32[torch.Tensor, "T E"]]
"""Cosines and sines of T positions, for the first 2 E dimensions of a head."""


@dataclass(frozen=True, slots=True)
class DifferentiableOperations:
    """A layer for training: nothing is overwritten, so gradients reach weights and states.

    ``angles`` = None leaves queries and keys as they are.
    """

    shape: Shape
    mix: Attend
    angles: Angles | None = None

    def norm(self, norm: Norm, x: torch.Tensor) -> torch.Tensor:
        return norm(x)

    def heads(self, qkv: AnyLinear, x: torch.Tensor) -> _Heads:
        heads = _project(qkv, x).unflatten(-1, (-1, self.shape.head_dim))
        query, key, value = heads.split(self.shape.heads_by_kind, dim=-2)
        return query, key, value

    def norm_heads(self, query_norm: Norm, key_norm: Norm, heads: _Heads) -> _Heads:
        query, key, value = heads
        return query_norm(query), key_norm(key), value

    def rotate(self, heads: _Heads) -> _Heads:
        if self.angles is None:
            return heads
        query, key, value = heads
        return _rotated(query, self.angles), _rotated(key, self.angles), value

    def attend(self, heads: _Heads) -> torch.Tensor:
        return self.mix(*heads).flatten(-2)

    def continuing(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def inner(self, up: AnyLinear, activation: Activation, x: torch.Tensor) -> torch.Tensor:
        return ACTIVATE[activation](_project(up, x))

    def gated_inner(self, gate_up: AnyLinear, activation: Activation, x: torch.Tensor) -> torch.Tensor:
        gate, up = _project(gate_up, x).chunk(2, dim=-1)
        return ACTIVATE[activation](gate) * up

    def add_projection(self, linear: AnyLinear, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return residual + _project(linear, x)


def _project(linear: AnyLinear, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, linear.weight, linear.bias)


def _rotated(x_TPd: Float[torch.Tensor, "*B T P d"], angles: Angles) -> Float[torch.Tensor, "*B T P d"]:
    """Turn dimension i with i + E, in float32 whatever autocast computes in."""
    cos, sin = (table[:, None] for table in angles)
    width = 2 * cos.shape[-1]
    first, second = x_TPd[..., :width].float().chunk(2, dim=-1)
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([rotated.to(x_TPd.dtype), x_TPd[..., width:]], dim=-1)


SCORES_PER_STEP: Final = 1 << 22
"""Scores of one head in a block; the graph keeps them all, so this bounds only what is gathered at a time."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Lead:
    """Input vectors before the text of each row, ``counts`` of them, row after row."""

    vectors_CD: Float[torch.Tensor, "C D"]
    counts_B: Int64[np.ndarray, " B"]


def run_rows(
    engine: Transformer, rows: Rows, layers: Sequence[int], lead: Lead | None = None
) -> dict[int, Float[torch.Tensor, "N D"]]:
    """Return the states after each of ``layers``, from 1, behind a lead, if any."""
    longest = int(rows.lengths.max())
    if longest > engine.max_positions:
        raise ModelError(
            f"a row must have at most {engine.max_positions} tokens, got {longest}; choose a smaller interval"
        )
    lead_B = np.zeros(len(rows), np.int64) if lead is None else lead.counts_B
    lengths_B = rows.lengths + lead_B
    blocks = cut_into_blocks(
        lengths_B,
        lead_B,
        max_scores=SCORES_PER_STEP
        * (CUDA_BATCH_FACTOR if engine.device.type == "cuda" else 1)
        // engine.shape.num_heads,
        local_radius=engine.shape.local_radius,
        relative_bias=engine.relative_bias,
        device=engine.device,
    )
    text_N = torch.from_numpy(ranges(np.cumsum(lengths_B) - rows.lengths, rows.lengths)).to(engine.device)
    places_N = torch.from_numpy(places_in_groups(rows.lengths)).to(engine.device)
    ids_N = torch.from_numpy(rows.ids.astype(np.int64)).to(engine.device)
    x_ND = engine.norm_embeddings(engine.embedding.look_up(ids_N, places_N))
    if lead is not None and len(lead.vectors_CD):
        # A lead has no position, and the angle of position 0 is no rotation.
        places_N = places_N.new_zeros(int(lengths_B.sum())).index_copy(0, text_N, places_N)
        is_lead_N = torch.ones(len(places_N), dtype=torch.bool, device=engine.device)
        is_lead_N[text_N] = False
        led_CD = engine.norm_embeddings(engine.embed_context(lead.vectors_CD)).to(x_ND.dtype)
        order = torch.cat([is_lead_N.nonzero()[:, 0], text_N])
        x_ND = torch.cat([led_CD, x_ND])[order.argsort()]
    angles = {is_local: table.at(places_N) for is_local, table in engine.rotary.items()}
    found: dict[int, torch.Tensor] = {}
    for index in range(max(layers)):
        is_local = engine.layers[index].is_local
        attend = partial(attend_in_blocks, blocks=blocks, is_local=is_local)
        operations = DifferentiableOperations(engine.shape, attend, angles.get(is_local))
        x_ND = run_layer(engine.layers[index], x_ND, operations, norm_first=engine.shape.norm_first)
        if index + 1 in layers:
            states_ND = x_ND if len(x_ND) == len(text_N) else x_ND[text_N]
            found[index + 1] = states_ND if engine.final_norm is None else engine.final_norm(states_ND)
    return found


_EMBEDDINGS: Final = "emb"
"""What the names of the input tables and of their norm begin with, in every family."""


class _Parameters(nn.Module):
    """Parameters below their published names, each part of a name a module."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        part, _, rest = name.partition(".")
        if not rest:
            self.register_parameter(part, nn.Parameter(tensor))
            return
        if part not in self._modules:
            self.add_module(part, _Parameters())
        cast("_Parameters", self._modules[part]).add(rest, tensor)


class LandmarkEncoder(_Parameters):
    """The trainable model.

    ``first_stage_layers`` > 0 gives the model a first stage of its own, a copy of so many of its first layers
    and, unless it ``shares_embeddings``, of the input tables. One that the base has goes on. With a
    ``null_token``, which begins as the mean of the input table, or a base that has one, rows without a
    context read it.
    """

    objective: nn.Module | None
    """What an objective trains beside the transformer and does not save with it."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        first_stage_layers: int = 0,
        shares_embeddings: bool = False,
        null_token: bool = False,
    ) -> None:
        super().__init__()
        self.objective = None
        self._config = replace(checkpoint, tensors={})
        self.has_cls = checkpoint.cls_id is not None
        second, _ = split_stages(checkpoint)
        tensors = NotedTensors(second.tensors)
        try:
            checkpoint.require_alone()
            engine = self._read(replace(second, tensors=tensors), torch.float32, torch.device("cpu"))
        except ModelError as error:
            raise ModelError(
                f"training must start from a model it can run, got one it cannot ({error}); "
                "choose another base"
            ) from error
        self.base_prefix = shared_prefix(tensors.names)
        self.model_dim, self.num_layers = engine.model_dim, engine.num_layers
        self.num_heads, self.max_positions = engine.shape.num_heads, engine.max_positions
        self._token_table = next(
            name.removeprefix(self.base_prefix)
            for name in tensors.names
            if checkpoint.tensors[name].shape == engine.embedding.tokens_VD.shape
        )
        for name in tensors.names:
            self.add(name.removeprefix(self.base_prefix), checkpoint.tensors[name].float().clone())
        self._add_null_token(checkpoint, is_read=null_token)
        for name, tensor in self._first_stage(checkpoint, first_stage_layers, shares_embeddings).items():
            self.add(FIRST_STAGE + name, tensor.detach().float().clone())
        self._published_names = tuple(name for name, _ in self.named_parameters())

    def _first_stage(
        self, checkpoint: Checkpoint, num_layers: int, shares_embeddings: bool
    ) -> Mapping[str, torch.Tensor]:
        """Return the tensors of a first stage: the base's, else those that are copied, none for 0 layers."""
        stored = {
            name.removeprefix(FIRST_STAGE).removeprefix(self.base_prefix): tensor
            for name, tensor in checkpoint.tensors.items()
            if name.startswith(FIRST_STAGE)
        }
        own_layers = 1 + max(map(layer_of, stored), default=-1)
        if stored and num_layers not in (0, own_layers):
            raise ConfigError(
                f"first_stage_layers must be the {own_layers} of the base's own first stage, got "
                f"{num_layers}; leave it out to go on with those"
            )
        if max(num_layers, own_layers) > self.num_layers:
            raise ConfigError(
                f"first_stage_layers must be at most the base model's {self.num_layers}, got "
                f"{max(num_layers, own_layers)}"
            )
        return stored or {
            name: parameter
            for name, parameter in self.named_parameters()
            if name != NULL_CONTEXT and not (shares_embeddings and name.startswith(_EMBEDDINGS))
            if num_layers and layer_of(name) < num_layers
        }

    def _add_null_token(self, checkpoint: Checkpoint, *, is_read: bool) -> None:
        """Add the base's null token, else a new one."""
        stored = checkpoint.tensors.get(NULL_CONTEXT)
        self.reads_null = is_read or stored is not None
        null_token = self.token_table.detach().mean(0) if stored is None else stored.float()
        if null_token.shape != (self.model_dim,):
            raise ModelError(
                f"{NULL_CONTEXT} must have the shape {(self.model_dim,)}, got {tuple(null_token.shape)}; the "
                "file does not fit its config.json"
            )
        self.add(NULL_CONTEXT, null_token)
        self.null_token.requires_grad_(self.reads_null)

    def add_published(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add parameters beside the transformer's, which every folder has by these names."""
        for name, tensor in tensors.items():
            self.add(name, tensor)
        self._published_names += tuple(tensors)

    @staticmethod
    def _read(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Transformer:
        return reader_of(checkpoint.config.get("model_type"))(checkpoint, dtype=dtype, device=device)

    def _engine(self, *, is_first_stage: bool = False) -> Transformer:
        """Return the engine of the parameters as they are now; the first stage may be the same one."""
        live = {name: self.get_parameter(name) for name in self._published_names}
        second, first = split_stages(replace(self._config, tensors=live))
        stage = first if is_first_stage and first is not None else second
        return self._read(stage, self.null_token.dtype, self.device)

    @torch.no_grad()
    def published_tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters that are read on the CPU, named as in the base's files."""
        return {
            self.published_name(name): self.get_parameter(name).detach().cpu().contiguous()
            for name in self._published_names
            if name != NULL_CONTEXT or self.reads_null
        }

    @property
    def token_table(self) -> Float[torch.Tensor, "V D"]:
        """Return the input table, a row a token id."""
        return self.get_parameter(self._token_table)

    def published_name(self, name: str) -> str:
        """Return what a parameter is called in a folder."""
        if name == NULL_CONTEXT or name.startswith(LATENT_ATTENTION):
            return name
        stage = FIRST_STAGE if name.startswith(FIRST_STAGE) else ""
        return stage + self.base_prefix + name.removeprefix(stage)

    def freeze_embeddings(self) -> None:
        """Leave the input tables and their norm as they are, in both stages."""
        for name, parameter in self.named_parameters():
            if name.removeprefix(FIRST_STAGE).startswith(_EMBEDDINGS):
                parameter.requires_grad_(False)

    @property
    def device(self) -> torch.device:
        """Return where the parameters lie."""
        return self.null_token.device

    @property
    def null_token(self) -> Float[torch.Tensor, " D"]:
        """Return what stands for a context vector that was dropped, or that there is none of."""
        return self.get_parameter(NULL_CONTEXT)

    @override
    def forward(
        self,
        rows: Rows,
        context_CD: Float[torch.Tensor, "C D"] | None = None,
        layers: Sequence[int] | None = None,
        dropped_BC: Bool[torch.Tensor, "B C"] | None = None,
    ) -> Float[torch.Tensor, "M E"]:
        """Return one embedding a chunk, not normalised: the states after each of ``layers``, side by side.

        Layers are counted from 1; None takes the last. Those beyond the last one asked for are not run.
        """
        asked = [self.num_layers] if layers is None else list(layers)
        states = self.states(rows, context_CD, asked, dropped_BC=dropped_BC)
        own = (name for name in self._published_names if name.startswith(LATENT_ATTENTION))
        block = read_latent_attention(
            {name: self.get_parameter(name) for name in own},
            self._config.config,
            model_dim=self.model_dim,
            dtype=torch.float32,
            device=self.device,
        )
        found = [
            pooled(states[layer] if block is None else block(states[layer][None])[0], rows) for layer in asked
        ]
        return torch.cat(found, dim=1)

    def states(
        self,
        rows: Rows,
        context_CD: Float[torch.Tensor, "C D"] | Lead | None = None,
        layers: Sequence[int] | None = None,
        *,
        dropped_BC: Bool[torch.Tensor, "B C"] | None = None,
        engine: Transformer | None = None,
    ) -> dict[int, Float[torch.Tensor, "N D"]]:
        """Return the states of all tokens after each of ``layers``, behind the final norm of the family.

        A context is read by every row, a :class:`Lead` by its own. A row reads the null token in the place
        of the context vectors ``dropped`` for it. ``engine`` = None is the second stage; another one reads no
        context.
        """
        asked = [self.num_layers] if layers is None else list(layers)
        if engine is not None:
            return run_rows(engine, rows, asked)
        if context_CD is None and self.reads_null:
            context_CD = self.null_token[None]
        if context_CD is None or isinstance(context_CD, Lead):
            return run_rows(self._engine(), rows, asked, context_CD)
        lead_BCD = context_CD.expand(len(rows), -1, -1)
        if dropped_BC is not None:
            lead_BCD = torch.where(dropped_BC.to(self.device)[:, :, None], self.null_token, lead_BCD)
        counts_B = np.full(len(rows), len(context_CD))
        return run_rows(
            self._engine(), rows, asked, Lead(vectors_CD=lead_BCD.flatten(0, 1), counts_B=counts_B)
        )

    def embed_documents(self, rows: Rows) -> Float[torch.Tensor, "B D"]:
        """Embed context documents, a row each, with the first stage: their mean, behind no context."""
        engine, each = self._engine(is_first_stage=True), alone(rows, has_cls=self.has_cls)
        states = self.states(each, None, [engine.num_layers], engine=engine)
        return pooled(states[engine.num_layers], each)


NUM_LATENTS: Final = 512
"""Of a new block, as in NV-Embed."""

MLP_FACTOR: Final = 4
"""Width of the MLP over that of the model, as in NV-Embed-v2."""


def add_latent_block(
    model: LandmarkEncoder, base: Checkpoint, *, num_latents: int | None = None, seed: int = 0
) -> None:
    """Let a model pool behind latent attention, which is trained and saved with it.

    ``num_latents`` = None is what the base has, else 512. Another number than the base's raises
    :class:`ConfigError`, and so does a new block of a width that eight heads do not divide.
    """
    stored = {name: tensor for name, tensor in base.tensors.items() if LATENT_ATTENTION in name}
    if not all(name.startswith(LATENT_ATTENTION) for name in stored):
        raise ModelError(
            f"training must start from a latent attention named {LATENT_ATTENTION}…, got {min(stored)}; save "
            "the base with Cairn, and start from that folder"
        )
    if not stored:
        model.add_published(
            new_block(NUM_LATENTS if num_latents is None else num_latents, model.model_dim, seed)
        )
        return
    found = len(stored[f"{LATENT_ATTENTION}latents"])
    if num_latents not in (None, found):
        raise ConfigError(f"latents must be the base model's {found}, got {num_latents}; leave them out")
    model.add_published({name: tensor.float().clone() for name, tensor in stored.items()})


def new_block(num_latents: int, model_dim: int, seed: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a new block in float32, drawn from ``seed``.

    It begins as the plain mean: both its output matrices are zero. Source: NV-Embed §3.2, in the published
    names of :mod:`cairn.pipeline.model.latent_attention`; the paper does not say how its block begins.
    """
    if model_dim % PUBLISHED_HEADS:
        raise ConfigError(
            f"pooling latent must have a base model whose width {PUBLISHED_HEADS} heads divide, got "
            f"{model_dim}; choose another pooling"
        )
    generator = torch.Generator().manual_seed(seed)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator) * sizes[-1] ** -0.5

    attention, mlp = (f"{LATENT_ATTENTION}cross_attend_blocks.{index}" for index in range(2))
    inner = MLP_FACTOR * model_dim
    norms = (f"{attention}.norm", f"{attention}.norm_context", f"{mlp}.norm")
    return {
        f"{LATENT_ATTENTION}latents": torch.randn(num_latents, model_dim, generator=generator),
        **{f"{name}.weight": torch.ones(model_dim) for name in norms},
        **{f"{name}.bias": torch.zeros(model_dim) for name in norms},
        f"{attention}.fn.to_q.weight": drawn(model_dim, model_dim),
        f"{attention}.fn.to_kv.weight": drawn(2 * model_dim, model_dim),
        f"{attention}.fn.to_out.weight": torch.zeros(model_dim, model_dim),
        f"{mlp}.fn.net.0.weight": drawn(2 * inner, model_dim),
        f"{mlp}.fn.net.0.bias": torch.zeros(2 * inner),
        f"{mlp}.fn.net.2.weight": torch.zeros(model_dim, inner),
        f"{mlp}.fn.net.2.bias": torch.zeros(model_dim),
    }


_Config = TypeVar("_Config", bound=RunConfig)


def resolved(config: _Config) -> _Config:
    """Say which precision auto is before it is written down: a run must not go on in another arithmetic."""
    dtype = resolve_precision(config.precision, default_device())
    return replace(config, precision="bf16" if dtype == torch.bfloat16 else "fp32")


def autocast(model: LandmarkEncoder, config: RunConfig) -> torch.autocast:
    """Return the arithmetic of a run's products."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=config.precision == "bf16")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncoderFolder:
    """What a trained encoder is saved with: base, settings, and the context it was trained behind."""

    base: Checkpoint
    settings: EncoderConfig
    context: ContextConfig | None = None

    def save(self, folder: Path, model: LandmarkEncoder) -> None:
        """Write a model folder; a reader sees the one before or this one."""
        save_encoder_folder(
            folder,
            replace(self.base, tensors={**self.base.tensors, **model.published_tensors()}),
            self.settings,
            replaces=True,
            context=self.context,
        )

    def save_changes(self, folder: Path, model: LandmarkEncoder) -> None:
        """Write ``changes.safetensors``: what differs from the base, in bf16.

        As ``cairn_extra.safetensors`` beside the base's weights it makes the trained model. Tensors have the
        base's names; the null token stays in float32. A first stage of its own is stored whole.
        """
        changed: dict[str, torch.Tensor] = {}
        for name, tensor in model.published_tensors().items():
            before = None if name.startswith(FIRST_STAGE) else self.base.tensors.get(name)
            if name == NULL_CONTEXT:
                changed[name] = tensor
            elif before is None or not torch.equal(tensor, before.float()):
                changed[name] = tensor.to(torch.bfloat16)
        with (
            durable.storage_errors("writing what changed"),
            durable.replacing(folder / "changes.safetensors") as temporary,
        ):
            save_file(changed, temporary)
