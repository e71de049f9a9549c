"""Tensors of a checkpoint by name, as projections and norms of the shapes its configuration promises.

Published files name the same tensors with or without a prefix (``model.``, ``bert.``); the prefix is found by
one tensor that every file of the family holds. Biases are optional: the rotary families are published without
them.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.errors import ModelError
from cairn.pipeline.quantized_matrix import QuantizedMatrix, QuantizedTensors, stacked_matrices

_HAS_ONEDNN: Final = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
"""What torch's own compiler calls oneDNN by; builds for other processors have none."""
INITIAL_STD: Final = 0.02
"""Deviation of new matrices, as BERT has it."""

_INTO_RESIDUAL: Final = ("o_proj.weight", "down_proj.weight", "Wo.weight")
_FLOATS: Final = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A projection; ``bias`` = None has none."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def packed(self) -> Linear:
        """Return the projection with its weight laid out for oneDNN; itself where oneDNN does not multiply.

        A product of few rows, such as a query's, then reads the weight once, in order. In float32 oneDNN also
        multiplies twice as fast as torch's default on AMD processors.
        """
        if self.weight.device.type != "cpu" or self.weight.is_mkldnn or not _HAS_ONEDNN:
            return self
        if self.weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return self  # a processor without its instructions, which torch's default does without
        return replace(self, weight=torch.ops.mkldnn._reorder_linear_weight(self.weight.contiguous(), None))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantizedLinear:
    """A projection whose weight stays quantised in memory and is made again, in ``dtype``, for each product.

    That costs little beside a product of a batch, and takes no memory beyond one matrix.
    """

    matrix: QuantizedMatrix
    dtype: torch.dtype
    bias: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        """Return the weight as a new tensor."""
        return self.matrix.dequantized(self.dtype)

    def packed(self) -> QuantizedLinear:
        """Return it as it is."""
        return self


AnyLinear = Linear | QuantizedLinear


@dataclass(frozen=True, kw_only=True, slots=True)
class Norm:
    """LayerNorm, or RMSNorm without a bias, over the last dimension."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    epsilon: float
    kind: Literal["layer", "rms"] = "layer"

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normed vectors as a new tensor."""
        if self.kind == "rms":
            return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.epsilon)


def stack_rows(linears: Sequence[AnyLinear]) -> AnyLinear:
    """Lay projections of one input one below the other, as one product."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    bias = torch.cat(biases) if biases else None
    quantized = [linear for linear in linears if isinstance(linear, QuantizedLinear)]
    if len(quantized) == len(linears):
        matrix = stacked_matrices([linear.matrix for linear in quantized])
        return QuantizedLinear(matrix=matrix, dtype=quantized[0].dtype, bias=bias)
    return Linear(weight=torch.cat([linear.weight for linear in linears]), bias=bias)


def require_floats(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of plain floating-point numbers; quantised ones mean nothing without their scales."""
    if tensor.dtype not in _FLOATS:
        kinds, got = (
            ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            for dtypes in (_FLOATS, (tensor.dtype,))
        )
        raise ModelError(
            f"{name} of the model must hold numbers of a type among {kinds}, got {got}; fetch a model "
            "that is not quantised"
        )
    return tensor


class NotedTensors(UserDict[str, torch.Tensor]):
    """Tensors that note the names of those taken out, in order, with others' where ``names`` are shared."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], names: dict[str, None] | None = None) -> None:
        super().__init__()
        self.data = dict(tensors)
        self.names: dict[str, None] = {} if names is None else names

    def __getitem__(self, name: str) -> torch.Tensor:
        self.names[name] = None
        return super().__getitem__(name)


class NewTensors(dict[str, torch.Tensor]):
    """Tensors that are drawn when a reader asks for them, in the place of a file's.

    Norms are 1 and biases 0. Matrices are normal with BERT's deviation; those that lead back into the
    residual of N layers are smaller by √(2 N), so that the sum stays small.
    """

    def __init__(self, num_layers: int, generator: torch.Generator) -> None:
        super().__init__()
        self._of_residual = INITIAL_STD / (2 * num_layers) ** 0.5
        self._generator = generator

    def draw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a new tensor, and keep it."""
        if len(shape) == 1:
            tensor = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        else:
            std = self._of_residual if name.endswith(_INTO_RESIDUAL) else INITIAL_STD
            tensor = torch.empty(shape).normal_(0.0, std, generator=self._generator)
        return self.setdefault(name, tensor)


class WeightReader:
    """Finds tensors below whatever prefix the file gives ``anchor``.

    Matrices and norms of layers are read in ``dtype``; ``epsilon`` and ``kind`` are those of all its norms.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        anchor: str,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        *,
        epsilon: float = 1e-12,
        kind: Literal["layer", "rms"] = "layer",
    ) -> None:
        names = [name for name in tensors if name == anchor or name.endswith(f".{anchor}")]
        if isinstance(tensors, NewTensors):
            names = [anchor]
        if len(names) != 1:
            raise ModelError(
                f"the model's weights must hold one {anchor}, got {len(names)}; the file does not fit "
                "its config.json"
            )
        self._prefix = names[0].removesuffix(anchor)
        self._tensors = tensors
        self.device = device
        self.dtype = dtype
        self._epsilon = epsilon
        self._kind: Literal["layer", "rms"] = kind
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        """Say whether the file holds a tensor."""
        return self._prefix + name in self._tensors

    def read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a tensor of exactly this shape, else raise :class:`ModelError`."""
        if isinstance(self._tensors, NewTensors):
            self._tensors.draw(name, shape)
        tensor = self._tensors.get(self._prefix + name)
        if tensor is None:
            raise ModelError(
                f"the model's weights must hold {name}, got none; the file does not fit its config.json"
            )
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{name} must have the shape {shape}, got {tuple(tensor.shape)}; the file does not fit "
                "its config.json"
            )
        self._read.add(self._prefix + name)
        return require_floats(name, tensor).to(device=self.device, dtype=dtype)

    def require_all_read(self, part: str) -> None:
        """Raise :class:`ModelError` for tensors below ``part`` that the family has no place for."""
        prefix = f"{self._prefix}{part}."
        held = {
            name for name in self._tensors if name.startswith(prefix) and name.endswith((".weight", ".bias"))
        }
        if left := held - self._read:
            raise ModelError(
                f"the model's weights must be those its config.json describes, got {min(left)} as well; "
                "give the model_type they were made for"
            )

    def linear(self, name: str, shape: tuple[int, int], *, bias: bool) -> AnyLinear:
        """Return ``name.weight``, quantised where the file has it so, and ``name.bias`` when there is one."""
        bias_E = self.read(f"{name}.bias", shape[:1], self.dtype) if bias else None
        matrix = self._quantized(f"{name}.weight", shape)
        if matrix is not None:
            return QuantizedLinear(matrix=matrix, dtype=self.dtype, bias=bias_E)
        return Linear(weight=self.read(f"{name}.weight", shape, self.dtype), bias=bias_E)

    def stacked(self, names: Sequence[str], rows: Sequence[int], width: int, *, bias: bool) -> AnyLinear:
        """Return projections of one input, of so many rows each, one below the other; one name holds all."""
        parts = zip(names, rows if len(names) > 1 else [sum(rows)], strict=True)
        return stack_rows([self.linear(name, (size, width), bias=bias) for name, size in parts])

    def _quantized(self, name: str, shape: tuple[int, int]) -> QuantizedMatrix | None:
        """Return a matrix as it is stored; None where it is not quantised or of another shape."""
        if not isinstance(self._tensors, QuantizedTensors):
            return None
        matrix = self._tensors.matrices.get(self._prefix + name)
        if matrix is None or matrix.shape != shape:
            return None
        self._read.add(self._prefix + name)
        return matrix.to(self.device)

    def norm(self, name: str, width: int, dtype: torch.dtype | None = None, *, bias: bool = True) -> Norm:
        """Return the norm of a width; RMSNorm has no bias."""
        dtype = dtype or self.dtype
        return Norm(
            weight=self.read(f"{name}.weight", (width,), dtype),
            bias=self.read(f"{name}.bias", (width,), dtype) if bias and self._kind == "layer" else None,
            epsilon=self._epsilon,
            kind=self._kind,
        )
