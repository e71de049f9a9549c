"""A transformer with landmark attention as a differentiable model: published parameters, gates, a null token.

    context documents ─▶ first stage: layers of its own, or the same ones ─▶ context vectors
    context vectors ─▶ all layers, by themselves ─▶ keys and values of every layer ─┐
    rows of chunks ─▶ embed ─▶ layer, behind its gates ◀────────────────────────────┴─▶ … ─▶ pooled per chunk

The layers are the engine's: the family's reader takes the parameters as the tensors of a checkpoint, and
:class:`DifferentiableOperations` runs what it reads. So vectors are those of inference
(:mod:`cairn.pipeline.model.landmark_reader`), to 1e-5 in fp32: own chunk, gated landmarks of the window's
other chunks, gated memory of the context. A family's final norm stands before all that is pooled, so that the
first layers are a model of their own. Parameters carry the published names, so that what is saved is an
ordinary checkpoint. No dropout: short fine-tuning of a small model does not need it, and GradCache computes
everything twice.

    N tokens of a batch, rows end to end    B rows, a chunk each    D width    H heads    C context vectors
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, cast

import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.lab.train.first_stage import first_stage_parameters
from cairn.pipeline.lab.train.landmark_pass import remember, run_rows
from cairn.pipeline.lab.train.late.head import TokenHead
from cairn.pipeline.lab.train.packed_rows import PackedRows, pooled
from cairn.pipeline.lab.train.recorded_tensors import RecordedTensors, shared_prefix
from cairn.pipeline.lab.train.sequence_dropout import with_null_token
from cairn.pipeline.model.backbone_loader import reader_of
from cairn.pipeline.model.engine.transformer import Transformer
from cairn.pipeline.model.folders.checkpoint import Checkpoint
from cairn.pipeline.model.folders.first_layers import split_stages
from cairn.pipeline.model.folders.own_tensors import (
    CONTEXT_GATES,
    CONTEXT_SIZE,
    FIRST_STAGE,
    GATE_NAMES,
    LANDMARK_GATES,
    LATENT_ATTENTION,
    NULL_CONTEXT,
)
from cairn.pipeline.model.landmark_reader import context_size_of
from cairn.pipeline.model.latent_attention import LatentAttention, read_latent_attention
from jaxtyping import Bool, Float
from torch import nn
from typing_extensions import override

OWN_NAMES: Final = (LANDMARK_GATES, CONTEXT_GATES, NULL_CONTEXT)
"""Parameters that no published checkpoint has; they are new where a base does not hold them."""

INITIAL_GATE: Final = -1.0
"""Gates that started at -3 had barely begun to open after some hundred steps.

At -1 a key behind them weighs e⁻¹ of an equal own one.
"""

_EMBEDDINGS: Final = "emb"
"""What the names of the input tables and of their norm begin with, in every family."""

_IN_A_LAYER: Final = re.compile(r"\.\d+\.")
_IN_ATTENTION: Final = re.compile(r"\.(attention|attn|self_attn)\.")


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

    New gates stand at ``initial_gate``, and a new null token is the mean of the input table.
    ``context_size`` is the number of context vectors that new gates are trained for: any other number weighs
    as much. ``first_stage_layers`` > 0 gives the model a first stage of its own, a copy of so many of its
    first layers and, unless it ``shares_embeddings``, of the input tables. One that the base has goes on.
    With a ``null_token``, or a base that has one, rows without a context see it in the place of every context
    vector. A base whose gates do not say their ``context_size`` gets none.
    """

    head: TokenHead | None
    """What is trained of late interaction along with the transformer; set by the run that asks for it."""
    objective: nn.Module | None
    """What an objective trains beside the transformer and does not save with it, such as a decoder."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        initial_gate: float = INITIAL_GATE,
        context_size: int | None = None,
        first_stage_layers: int = 0,
        shares_embeddings: bool = False,
        null_token: bool = False,
    ) -> None:
        super().__init__()
        self.head = None
        self.objective = None
        self._config = replace(checkpoint, tensors={})
        second, _ = split_stages(checkpoint)
        tensors = RecordedTensors(second.tensors)
        try:
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
        self._add_own(checkpoint, initial_gate, context_size, has_null_token=null_token)
        copied = {
            name: parameter
            for name, parameter in self.named_parameters()
            if name not in OWN_NAMES and not (shares_embeddings and name.startswith(_EMBEDDINGS))
        }
        for name, tensor in first_stage_parameters(
            checkpoint.tensors,
            copied,
            num_layers=first_stage_layers,
            base_prefix=self.base_prefix,
            base_layers=self.num_layers,
        ).items():
            self.add(name, tensor)
        self._published_names = tuple(name for name, _ in self.named_parameters())

    def _add_own(
        self, checkpoint: Checkpoint, initial_gate: float, context_size: int | None, *, has_null_token: bool
    ) -> None:
        """Add the parameters that no published checkpoint has: the base's, else new ones."""
        gates = (self.num_layers, self.num_heads)
        own = {
            LANDMARK_GATES: torch.full(gates, initial_gate),
            CONTEXT_GATES: torch.full(gates, initial_gate),
            NULL_CONTEXT: self.token_table.detach().mean(0),
        }
        for name, tensor in own.items():
            stored = checkpoint.tensors.get(name)
            self.add(name, tensor if stored is None else _fitting(name, stored, tensor))
        # Gates of a base that does not say what context they were trained for go on without.
        has_gates = CONTEXT_GATES in checkpoint.tensors
        self.context_size = context_size_of(checkpoint.tensors) if has_gates else context_size
        self.reads_null = self.context_size is not None and (
            has_null_token or NULL_CONTEXT in checkpoint.tensors
        )
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
        """Return the engine whose weights are the parameters as they are now, low-rank updates included.

        The first stage is the same where the model has none of its own.
        """
        live = {name: self._tensor(name) for name in self._published_names}
        second, first = split_stages(replace(self._config, tensors=live))
        stage = first if is_first_stage and first is not None else second
        return self._read(stage, self.null_token.dtype, self.device)

    def _latent_attention(self) -> LatentAttention | None:
        """Return the block of the parameters as they are now, None without one."""
        live = {
            name: self._tensor(name) for name in self._published_names if name.startswith(LATENT_ATTENTION)
        }
        return read_latent_attention(
            live, self._config.config, model_dim=self.model_dim, dtype=torch.float32, device=self.device
        )

    def _tensor(self, name: str) -> torch.Tensor:
        path, _, leaf = name.rpartition(".")
        return getattr(self.get_submodule(path), leaf)

    @torch.no_grad()
    def published_tensors(self) -> dict[str, torch.Tensor]:
        """Return the parameters on the CPU, low-rank updates merged, named as in the base's files.

        Gates are left out where they are not trained, and a null token that is not read.
        """
        size = {} if self.context_size is None else {CONTEXT_SIZE: torch.tensor([float(self.context_size)])}
        return size | {
            self.published_name(name): self._tensor(name).detach().cpu().contiguous()
            for name in self._published_names
            if name not in OWN_NAMES or self.get_parameter(name).requires_grad
            if name != NULL_CONTEXT or self.reads_null
        }

    @property
    def token_table(self) -> Float[torch.Tensor, "V D"]:
        """Return the input table, a row a token id."""
        return self.get_parameter(self._token_table)

    @property
    def position_table(self) -> Float[torch.Tensor, "P D"] | None:
        """Return the positions' table as it is now, without a graph; None where positions are rotations."""
        table = self._engine().embedding.positions_PD
        return None if table is None else table.detach()

    def published_name(self, name: str) -> str:
        """Return what a parameter is called in a folder."""
        if name in OWN_NAMES or name.startswith(LATENT_ATTENTION):
            return name
        stage = FIRST_STAGE if name.startswith(FIRST_STAGE) else ""
        return stage + self.base_prefix + name.removeprefix(stage)

    def freeze_embeddings(self) -> None:
        """Leave the input tables and their norm as they are, in both stages."""
        for name, parameter in self.named_parameters():
            if name.removeprefix(FIRST_STAGE).startswith(_EMBEDDINGS):
                parameter.requires_grad_(False)

    def layer_matrices(self, *, attention_only: bool = False) -> list[nn.Module]:
        """Return the modules of both stages' layers whose weight is a matrix."""
        paths = [name.removesuffix(".weight") for name, tensor in self.named_parameters() if tensor.ndim == 2]
        return [
            self.get_submodule(path)
            for path in paths
            if _IN_A_LAYER.search(path) and (not attention_only or _IN_ATTENTION.search(path))
            if not path.startswith(LATENT_ATTENTION)
        ]

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
        rows: PackedRows,
        context_CD: Float[torch.Tensor, "C D"] | None = None,
        layers: Sequence[int] | None = None,
        *,
        landmarks: bool = True,
    ) -> Float[torch.Tensor, "B E"]:
        """Return one embedding a row, not normalised: the states after each of ``layers``, side by side.

        Layers are counted from 1; None takes the last. Those beyond the last one asked for are not run.
        Without ``landmarks`` a chunk sees no other chunk of its window.
        """
        return self.read(rows, context_CD, layers, landmarks=landmarks)[0]

    def read(
        self,
        rows: PackedRows,
        context_CD: Float[torch.Tensor, "C D"] | None = None,
        layers: Sequence[int] | None = None,
        *,
        landmarks: bool = True,
        dropped_BC: Bool[torch.Tensor, "B C"] | None = None,
    ) -> tuple[Float[torch.Tensor, "B E"], Float[torch.Tensor, "N D"]]:
        """Return the same, and the states of all tokens after the last layer that was run."""
        asked = [self.num_layers] if layers is None else list(layers)
        states = self.states(rows, context_CD, asked, landmarks=landmarks, dropped_BC=dropped_BC)
        block = self._latent_attention()
        found = [
            pooled(states[layer] if block is None else block(states[layer][None])[0], rows) for layer in asked
        ]
        return torch.cat(found, dim=1), states[max(asked)]

    def states(
        self,
        rows: PackedRows,
        context_CD: Float[torch.Tensor, "C D"] | None = None,
        layers: Sequence[int] | None = None,
        *,
        landmarks: bool = True,
        dropped_BC: Bool[torch.Tensor, "B C"] | None = None,
    ) -> dict[int, Float[torch.Tensor, "N D"]]:
        """Return the states of all tokens after each of ``layers``, behind the final norm of the family.

        A row sees the null token in the place of the context vectors ``dropped`` for it.
        """
        asked = [self.num_layers] if layers is None else list(layers)
        if context_CD is None and landmarks and self.reads_null:
            context_CD = self.null_token[None]
        return self._states(
            self._engine(), rows, context_CD, asked, landmarks=landmarks, dropped_BC=dropped_BC
        )

    def _states(
        self,
        engine: Transformer,
        rows: PackedRows,
        context_CD: Float[torch.Tensor, "C D"] | None,
        asked: Sequence[int],
        *,
        landmarks: bool,
        dropped_BC: Bool[torch.Tensor, "B C"] | None = None,
    ) -> dict[int, Float[torch.Tensor, "N D"]]:
        gates_LH, context_gates_LH = (self.get_parameter(name) for name in GATE_NAMES)
        memory = None if context_CD is None else remember(engine, context_CD, max(asked))
        if context_CD is not None and self.context_size is not None:
            context_gates_LH = context_gates_LH + math.log(self.context_size / len(context_CD))
        if memory is not None and dropped_BC is not None:
            null = remember(engine, self.null_token[None], max(asked))
            memory = with_null_token(memory, null, dropped_BC.to(self.device))
        return run_rows(
            engine,
            rows,
            asked,
            gates_LH=gates_LH,
            memory=memory,
            context_gates_LH=context_gates_LH,
            landmarks=landmarks,
        )

    def embed_documents(self, rows: PackedRows) -> Float[torch.Tensor, "B D"]:
        """Embed context documents, a row each, with the first stage.

        No window, no context, the mean of the row.
        """
        engine = self._engine(is_first_stage=True)
        states = self._states(engine, rows.alone, None, [engine.num_layers], landmarks=False)
        return pooled(states[engine.num_layers], rows.alone)

    def read_alone(self, rows: PackedRows) -> tuple[Float[torch.Tensor, "B D"], Float[torch.Tensor, "N D"]]:
        """Embed rows like that with the second stage; return the states of all tokens, too."""
        return self.read(rows.alone)


def _fitting(name: str, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if tensor.shape != parameter.shape:
        raise ModelError(
            f"{name} must have the shape {tuple(parameter.shape)}, got {tuple(tensor.shape)}; the file "
            "does not fit its config.json"
        )
    return tensor.float()
