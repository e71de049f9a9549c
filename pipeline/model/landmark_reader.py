"""A transformer that reads rows by landmark attention, with the corpus's context as a memory made once.

    context vectors ─▶ all layers, by themselves ─▶ keys and values of every layer ─┐ once
    rows of windows ─▶ all layers, each behind its gates ◀──────────────────────────┘ every batch

The context's states depend on no text: its vectors see one another in global layers, in local ones each
itself alone, and have no position, so their order does not matter. A text pays for their keys, never again
for their layers. With another τ the memory is another one, since τ belongs to the context's own attention
too. Where there is no context, a model that was trained with a null token reads that token in the place of
every context vector (CDE §4.2); a model without one reads the text alone.

A gate is added to the logits of what stands behind it: 0 shows another chunk's landmark as if it stood in the
own chunk, -inf hides it. A checkpoint may hold gates among its weights or among the tensors of ours beside
them, two tensors of layers by heads; one that holds none was not trained to look past its chunk, and its
gates stand at the value training starts from.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from cairn.pipeline.errors import ConfigError, ModelError
from cairn.pipeline.model.engine.backbone import Backbone
from cairn.pipeline.model.engine.landmark_attention import LandmarkWindows, Memory
from cairn.pipeline.model.engine.pattern import Batch, PassSettings
from cairn.pipeline.model.engine.rectangle import Rectangle
from cairn.pipeline.model.engine.transformer import Transformer
from cairn.pipeline.model.engine.weights import require_floats
from cairn.pipeline.model.folders.own_tensors import CONTEXT_SIZE, GATE_NAMES, NULL_CONTEXT
from jaxtyping import Float, Float32, Int64


class LandmarkReader:
    """Hidden states of rows that see the landmarks of their window and the context.

    Safe to share between threads.
    """

    def __init__(self, backbone: Backbone, context_CD: Float32[np.ndarray, "C D"] | None = None) -> None:
        self._transformer = transformer = require_transformer(backbone)
        null_token = transformer.own_tensors.get(NULL_CONTEXT)
        if context_CD is None and null_token is not None:
            context_CD = _null_context(null_token, transformer.model_dim)
        self._context_CD = context_CD
        self._memories: dict[float, tuple[Memory, ...]] = {}
        self._lock = threading.Lock()
        self._gates = gates_of(transformer)
        self.fingerprint = self._gates.fingerprint(with_context=context_CD is not None)

    @torch.inference_mode()
    def hidden_states(
        self,
        ids_BT: Int64[np.ndarray, "B T"],
        lengths_B: Int64[np.ndarray, " B"],
        windows_B: Int64[np.ndarray, " B"],
        temperature: float = 1.0,
    ) -> Float[torch.Tensor, "B T D"]:
        """Return the last hidden states; rows of one window stand together, and all of its rows are here.

        Padding is 0.
        """
        model = self._transformer
        pattern = LandmarkWindows(
            Batch(lengths_B=lengths_B, num_tokens=ids_BT.shape[1]),
            windows_B,
            model.pass_settings(temperature),
            landmark_gates_LH=self._gates.landmarks_LH,
            context_gates_LH=self._gates.context_for(
                0 if self._context_CD is None else len(self._context_CD)
            ),
            memory=self._memory(temperature),
        )
        return model.encode_pattern(model.embed_tokens(ids_BT), pattern)

    def _memory(self, temperature: float) -> tuple[Memory, ...] | None:
        if self._context_CD is None:
            return None
        with self._lock:
            if temperature not in self._memories:
                self._memories[temperature] = remember(self._transformer, self._context_CD, temperature)
            return self._memories[temperature]


def _null_context(null_token: torch.Tensor, model_dim: int) -> Float32[np.ndarray, "1 D"]:
    """Return the null token as a context of one, which weighs as all of training's; see the gates."""
    if null_token.shape != (model_dim,) or not bool(null_token.isfinite().all()):
        raise ModelError(
            f"{NULL_CONTEXT} must be {model_dim} finite numbers, got others of shape "
            f"{tuple(null_token.shape)}; train the model again"
        )
    return null_token.float().cpu().numpy()[None]


def require_transformer(backbone: Backbone) -> Transformer:
    """Return the transformer that landmark attention runs through.

    Raise :class:`ConfigError` for a model it cannot serve.
    """
    if not isinstance(backbone, Transformer):
        raise ConfigError(
            f"attention landmark must go with a model of one transformer, got {type(backbone).__name__}; "
            "choose attention chunk or full"
        )
    if backbone.shape.is_causal:
        raise ConfigError(
            "attention landmark must go with a model that reads both ways, got a causal one; choose "
            "chunk or full"
        )
    return backbone


@torch.inference_mode()
def remember(
    model: Transformer, context_CD: Float32[np.ndarray, "C D"], temperature: float = 1.0
) -> tuple[Memory, ...]:
    """Run context vectors through the layers by themselves and return each layer's keys and values."""
    row = _ContextRow(len(context_CD), model.pass_settings(temperature))
    x_CD = model.norm_embeddings(model.embed_context(context_CD)).to(model.dtype)
    # The engine writes into what it is given, and without type and norm that would be the caller's context.
    model.run_layers(x_CD.clone(), row, drop_lead_at=None)
    return tuple(row.memory)


class _ContextRow(Rectangle):
    """One row of context vectors without text.

    ``memory`` gets the keys and values of each layer as it runs.
    """

    def __init__(self, num_context: int, settings: PassSettings) -> None:
        batch = Batch(
            lengths_B=np.zeros(1, np.int64), num_tokens=0, num_lead=num_context, num_unplaced=num_context
        )
        super().__init__(batch, settings)
        self.memory: list[Memory] = []

    def attend(
        self, padded_NPd: Float[torch.Tensor, "N P d"], layer: int, /, *, is_local: bool, drop_lead: bool
    ) -> torch.Tensor:
        lead, _ = self.margins(is_local=is_local)
        heads_PCd = padded_NPd[lead : lead + self._batch.num_lead].transpose(0, 1)
        # Clones: the engine's memory is overwritten by the next layer.
        _, key, value = (
            part.clone(memory_format=torch.contiguous_format)
            for part in heads_PCd.split(self._settings.shape.heads_by_kind)
        )
        self.memory.append(Memory(key_GCd=key, value_GCd=value))
        return super().attend(padded_NPd, layer, is_local=is_local, drop_lead=drop_lead)


INITIAL_GATE: Final = -3.0
"""A key behind it weighs e⁻³, a twentieth, of an equal one in the own chunk.

Little changes, and gradients still flow.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class LandmarkGates:
    """One bias for each layer and head, towards landmarks and towards context.

    ``context_size`` is how many context vectors those towards context were trained for, None where the model
    does not say.
    """

    landmarks_LH: Float32[torch.Tensor, "layers H"]
    context_LH: Float32[torch.Tensor, "layers H"]
    context_size: float | None = None

    def context_for(self, num_context: int) -> Float32[torch.Tensor, "layers H"]:
        """Return the gates towards so many context vectors: together they weigh as those of training did."""
        if self.context_size is None or not num_context:
            return self.context_LH
        return self.context_LH + math.log(self.context_size / num_context)

    def fingerprint(self, *, with_context: bool) -> str:
        """Identify the gates that are used."""
        used = [self.landmarks_LH, self.context_LH] if with_context else [self.landmarks_LH]
        digest = hashlib.sha256(b"".join(gates.cpu().numpy().tobytes() for gates in used))
        if with_context and self.context_size is not None:
            digest.update(str(self.context_size).encode())
        return digest.hexdigest()


def gates_of(model: Transformer) -> LandmarkGates:
    """Return a model's gates, else those training starts from.

    A wrong shape, NaN or +inf raises :class:`ModelError`.
    """
    landmarks_LH, context_LH = (
        _read(model.own_tensors, name, (model.num_layers, model.shape.num_heads)).to(model.device)
        for name in GATE_NAMES
    )
    return LandmarkGates(
        landmarks_LH=landmarks_LH, context_LH=context_LH, context_size=context_size_of(model.own_tensors)
    )


def context_size_of(tensors: Mapping[str, torch.Tensor]) -> float | None:
    """Return how many context vectors a model's gates were trained for, None where it does not say."""
    if CONTEXT_SIZE not in tensors:
        return None
    size = tensors[CONTEXT_SIZE].float().flatten()
    if len(size) != 1 or not 1 <= float(size[0]) < float("inf"):
        raise ModelError(
            f"{CONTEXT_SIZE} must be one number of at least 1, got {size.tolist()}; train the model again"
        )
    return float(size[0])


def _read(
    tensors: Mapping[str, torch.Tensor], name: str, shape: tuple[int, int]
) -> Float32[torch.Tensor, "layers H"]:
    if name not in tensors:
        return torch.full(shape, INITIAL_GATE)
    gates = require_floats(name, tensors[name]).float()
    if tuple(gates.shape) != shape:
        raise ModelError(
            f"{name} must have the shape {shape}, one gate a layer and head, got {tuple(gates.shape)}; "
            "train them again"
        )
    if not bool((gates < float("inf")).all()):
        raise ModelError(
            f"{name} must be numbers or -inf, which closes a gate, got NaN or +inf; train them again"
        )
    return gates
