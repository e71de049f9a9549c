"""A layer's operations for inference: forward only, in the workspace's memory, with what oneDNN fuses.

One product makes query, key and value. A plain activation is part of its product where oneDNN multiplies, in
place elsewhere. Residuals are added by the product itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.model.engine.layer import Activation, Layer
from cairn.pipeline.model.engine.pattern import Pattern, Shape
from cairn.pipeline.model.engine.weights import AnyLinear, Norm
from cairn.pipeline.model.engine.workspace import Workspace

_ACTIVATE: Final[Mapping[Activation, Callable[[torch.Tensor], torch.Tensor]]] = {
    "gelu": torch.ops.aten.gelu_.default,
    "tanh_gelu": partial(torch.ops.aten.gelu_.default, approximate="tanh"),
    "relu": F.relu_,
    "silu": partial(F.silu, inplace=True),
}
_OF_ONEDNN: Final[Mapping[Activation | None, tuple[str, str]]] = {
    None: ("none", ""),
    "gelu": ("gelu", "none"),
    "tanh_gelu": ("gelu", "tanh"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
}
"""The name and the variant that oneDNN knows an activation by."""


class InPlaceOperations:
    """Implements :class:`LayerOperations` for tokens ``N D``; heads are ``N P d``, P of all three kinds.

    ``drop_lead`` lets only the text go on after this layer's attention.
    """

    def __init__(
        self,
        layer: Layer,
        index: int,
        pattern: Pattern,
        shape: Shape,
        workspace: Workspace,
        *,
        drop_lead: bool = False,
    ) -> None:
        self._index = index
        self._is_local = layer.is_local
        self._pattern = pattern
        self._shape = shape
        self._workspace = workspace
        self._drop_lead = drop_lead
        self._margins = pattern.margins(is_local=layer.is_local)

    def norm(self, norm: Norm, x_ND: torch.Tensor) -> torch.Tensor:
        return norm(x_ND)

    def heads(self, qkv: AnyLinear, x_ND: torch.Tensor) -> torch.Tensor:
        heads = project(qkv, x_ND, self._workspace, "qkv")
        if any(self._margins):
            heads = self._padded(heads)
        return heads.view(len(heads), -1, self._shape.head_dim)

    def _padded(self, x_ND: torch.Tensor) -> torch.Tensor:
        lead, trail = self._margins
        padded_ND = self._workspace.take("padded", (lead + len(x_ND) + trail, x_ND.shape[1]), x_ND.dtype)
        padded_ND[:lead].zero_()
        padded_ND[lead : lead + len(x_ND)] = x_ND
        padded_ND[lead + len(x_ND) :].zero_()
        return padded_ND

    def _of_tokens(self, padded_NPd: torch.Tensor) -> torch.Tensor:
        lead, trail = self._margins
        return padded_NPd[lead : len(padded_NPd) - trail]

    def norm_heads(self, query_norm: Norm, key_norm: Norm, padded_NPd: torch.Tensor) -> torch.Tensor:
        query, key, _ = self._of_tokens(padded_NPd).split(self._shape.heads_by_kind, dim=1)
        query.copy_(query_norm(query))
        key.copy_(key_norm(key))
        return padded_NPd

    def rotate(self, padded_NPd: torch.Tensor) -> torch.Tensor:
        num_rotated = self._shape.num_heads + self._shape.num_key_value_heads
        self._pattern.rotate_(self._of_tokens(padded_NPd)[:, :num_rotated], is_local=self._is_local)
        return padded_NPd

    def attend(self, padded_NPd: torch.Tensor) -> torch.Tensor:
        return self._pattern.attend(
            padded_NPd, self._index, is_local=self._is_local, drop_lead=self._drop_lead
        )

    def continuing(self, x_ND: torch.Tensor) -> torch.Tensor:
        return self._pattern.text(x_ND) if self._drop_lead else x_ND

    def inner(self, up: AnyLinear, activation: Activation, x_ND: torch.Tensor) -> torch.Tensor:
        return project(up, x_ND, self._workspace, "inner", activation)

    def gated_inner(self, gate_up: AnyLinear, activation: Activation, x_ND: torch.Tensor) -> torch.Tensor:
        gate_NI, up_NI = project(gate_up, x_ND, self._workspace, "inner").chunk(2, dim=1)
        return _ACTIVATE[activation](gate_NI).mul_(up_NI)

    def add_projection(
        self, linear: AnyLinear, x_NE: torch.Tensor, residual_ND: torch.Tensor
    ) -> torch.Tensor:
        return add_projection(linear, x_NE, residual_ND)


def project(
    linear: AnyLinear,
    x_ND: torch.Tensor,
    workspace: Workspace,
    purpose: str,
    activation: Activation | None = None,
) -> torch.Tensor:
    """Return the activated projection, in the workspace's memory unless oneDNN brings its own."""
    weight = linear.weight
    if weight.is_mkldnn:
        name, variant = _OF_ONEDNN[activation]
        return torch.ops.mkldnn._linear_pointwise(x_ND, weight, linear.bias, name, [], variant)
    out = workspace.take(purpose, (x_ND.shape[0], weight.shape[0]), x_ND.dtype)
    if linear.bias is None:
        torch.mm(x_ND, weight.t(), out=out)
    else:
        torch.addmm(linear.bias, x_ND, weight.t(), out=out)
    return out if activation is None else _ACTIVATE[activation](out)


def add_projection(linear: AnyLinear, x_NE: torch.Tensor, residual_ND: torch.Tensor) -> torch.Tensor:
    """Return the projection added to ``residual``, which may be overwritten."""
    weight = linear.weight
    if weight.is_mkldnn:
        return torch.ops.mkldnn._linear_pointwise.binary(x_NE, residual_ND, weight, linear.bias, "add")
    if linear.bias is not None:
        residual_ND.add_(linear.bias)
    return residual_ND.addmm_(x_NE, weight.t())
