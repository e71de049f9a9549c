"""The engine with its layers run by OpenVINO: the fastest exact way on an x86 processor, an optional extra.

    ids, context ─▶ embedding ─▶ compiled graph of the layers ─▶ final norm ─▶ hidden states

Only ``run_layers`` differs from the engine's, so whatever family it reads runs here, with context, local
layers and any τ. Batches are encoded one a thread (:mod:`cairn.pipeline.model.batching`): each thread has a
request of its own, and the runtime a stream for each. The graph is compiled in about a second when the model
is loaded; nothing is written to a cache.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.model.engine.layer import Layer
from cairn.pipeline.model.engine.openvino_graph import KINDS, build_graph
from cairn.pipeline.model.engine.openvino_runtime import ov
from cairn.pipeline.model.engine.pattern import Pattern
from cairn.pipeline.model.engine.precision import resolve_precision
from cairn.pipeline.model.engine.rectangle import Rectangle
from cairn.pipeline.model.engine.transformer import Transformer
from jaxtyping import Float

_HIDDEN: Final = -1e30
"""The bias of what is not seen, in place of -inf: finite in bf16 too, and 0 after any softmax."""

_MAX_GROUP: Final = 128
"""Numbers of a token that share a scale in int8, at most: more are faster, fewer are more exact."""

_PRECISIONS: Final = {torch.float32: "f32", torch.bfloat16: "bf16"}


class OpenVinoTransformer(Transformer):
    """Implements :class:`Backbone`: a float32 engine with compiled layers."""

    def __init__(self, engine: Transformer, precision: torch.dtype) -> None:
        vars(self).update(vars(engine))
        self.precision = precision
        self.rectangle_type = self.pattern_type = _GraphRectangle
        rotary_dims = {
            kind: 2 * table.angles(0, 1)[0].shape[1] for kind, table in (self.rotary or {}).items()
        }
        is_int8 = precision == torch.int8
        graph = build_graph(
            self.layers, self.shape, model_dim=self.model_dim, rotary_dims=rotary_dims, is_int8=is_int8
        )
        others = resolve_precision("auto", self.device) if is_int8 else precision
        self._compiled = _compile(graph, others, group_size=_group_size(self.layers) if is_int8 else 0)
        # The compiled graph has the weights now, in its own layout.
        self.layers = []
        self._requests = threading.local()

    def run_layers(
        self, x_ND: Float[torch.Tensor, "N D"], pattern: Pattern, *, drop_lead_at: int | None
    ) -> Float[torch.Tensor, "M D"]:
        """See :class:`Transformer`.

        Attention by another pattern than the padded rectangle raises :class:`ModelError`.
        """
        if not isinstance(pattern, _GraphRectangle):
            raise ModelError(
                "backend openvino must be given plain attention over a row, got another kind; choose "
                "backend torch"
            )
        if not hasattr(self._requests, "own"):
            self._requests.own = self._compiled.create_infer_request()
        request = self._requests.own
        inputs = pattern.inputs(x_ND, {port.get_any_name() for port in self._compiled.inputs})
        request.infer(inputs, share_inputs=True)
        # A copy, because the request overwrites its output the next time.
        x_ND = torch.from_numpy(request.get_output_tensor(0).data.reshape(x_ND.shape).copy())
        return x_ND if drop_lead_at is None else pattern.text(x_ND)


class _GraphRectangle(Rectangle):
    """A batch as the compiled graph takes it."""

    def inputs(self, x_ND: Float[torch.Tensor, "N D"], wanted: set[str]) -> dict[str, np.ndarray]:
        """Return the graph's inputs by name."""
        width, scale = self._batch.width, self._settings.shape.head_dim**-0.5 / self._settings.temperature
        found = {
            "x": x_ND.view(-1, width, x_ND.shape[1]),
            "scale": torch.tensor([scale], dtype=torch.float32),
        }
        bias = torch.zeros(1, 1, 1, 1) if self._bias is None else self._bias
        found["bias_global"] = bias.clamp(min=_HIDDEN)
        for is_local, (cos_SE, sin_SE) in self._angles.items():
            found |= {f"cos_{KINDS[is_local]}": cos_SE, f"sin_{KINDS[is_local]}": sin_SE}
        if self._window is not None:
            tokens_BS = torch.arange(len(x_ND)).view(-1, width)
            found["bias_local"] = self._window.bias.clamp(min=_HIDDEN)
            found |= {"queries": tokens_BS, "keys": tokens_BS, "places": tokens_BS}
            if self._window.is_blocked:
                first_G1 = torch.arange(self._window.num_blocks)[:, None] * self._window.block
                last = len(x_ND) - 1
                found["queries"] = (first_G1 + torch.arange(self._window.block)).clamp(max=last)
                # What lies outside the text is hidden by the bias, so any token may stand there.
                found["keys"] = (first_G1 - self._window.lead + torch.arange(self._window.num_keys)).clamp(
                    0, last
                )
        return {name: tensor.contiguous().numpy() for name, tensor in found.items() if name in wanted}


def _group_size(layers: Sequence[Layer]) -> int:
    """Return how many numbers of a token share a scale: all products must divide into such groups.

    0 if none of 16 or more does: weights alone are then int8.
    """
    widths = {
        linear.weight.shape[1]
        for layer in layers
        for linear in (layer.qkv, layer.attention_output, *layer.mlp.linears)
    }
    common = math.gcd(*widths)
    return next((size for size in range(_MAX_GROUP, 15, -16) if common % size == 0), 0)


def _compile(graph: Any, precision: torch.dtype, *, group_size: int) -> Any:
    num_threads = torch.get_num_threads()
    settings = {
        "INFERENCE_PRECISION_HINT": _PRECISIONS[precision],
        "INFERENCE_NUM_THREADS": num_threads,
        "NUM_STREAMS": num_threads,
        # Pinned threads of several processes would crowd the same cores.
        "ENABLE_CPU_PINNING": False,
        # Tokens are rounded by themselves, so that no vector depends on what is encoded beside it.
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": group_size,
    }
    return ov.Core().compile_model(graph, "CPU", settings)
