"""From a matrix to codes: to the nearest, or one column after another with the error passed on (GPTQ).

    H = mean x xᵀ of the product's inputs, plus a share of its mean diagonal
    U upper triangular, Uᵀ U = H⁻¹
    for each column i: e = (w_i - ŵ_i) / U_ii, and w_j ← w_j - e U_ij for all later columns j

A scale is fitted when its group begins, to weights that have taken over the errors before it. int8 and fp8
are symmetric, int4 has a zero for each group.

Source: Frantar et al. 2022 (GPTQ), algorithm 1 and its 1 % of damping. Differs: columns keep their order, and
errors reach later blocks at once rather than lazily.

    E rows    D columns    g columns of a group
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.lab.compress.settings import WeightFormat
from cairn.pipeline.quantized_matrix import QuantizedMatrix, two_codes_a_byte
from jaxtyping import Float, Float32

_LARGEST: Final = {"int8": 127.0, "fp8": 448.0}
_LEVELS: Final = 15
_DAMPING: Final = 0.01
_SMALLEST_SCALE: Final = 1e-7
"""Of a group of zeros; half precision still holds it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Grid:
    """The values that the weights of one group may have."""

    kind: WeightFormat
    scale_E: Float32[torch.Tensor, " E"]
    zero_E: Float32[torch.Tensor, " E"]

    @classmethod
    def fitted(cls, kind: WeightFormat, weight_Eg: Float32[torch.Tensor, "E g"]) -> _Grid:
        if kind != "int4":
            scale_E = weight_Eg.abs().amax(1).div(_LARGEST[kind]).clamp(min=_SMALLEST_SCALE)
            return cls(kind, scale_E, torch.zeros_like(scale_E))
        low_E, high_E = weight_Eg.amin(1).clamp(max=0), weight_Eg.amax(1).clamp(min=0)
        # As it is stored: codes are chosen for the scale that a reader sees.
        scale_E = ((high_E - low_E) / _LEVELS).clamp(min=_SMALLEST_SCALE).half().float()
        return cls(kind, scale_E, (-low_E / scale_E).round().clamp(0, _LEVELS))

    def codes(self, weight_Eg: Float32[torch.Tensor, "E g"]) -> torch.Tensor:
        scaled = weight_Eg / self.scale_E[:, None]
        if self.kind == "fp8":
            return scaled.clamp(-_LARGEST["fp8"], _LARGEST["fp8"]).to(torch.float8_e4m3fn)
        if self.kind == "int8":
            return scaled.round().clamp(-127, 127).to(torch.int8)
        return (scaled.round() + self.zero_E[:, None]).clamp(0, _LEVELS).to(torch.uint8)

    def weights(self, codes: torch.Tensor) -> Float32[torch.Tensor, "E g"]:
        return (codes.float() - self.zero_E[:, None]) * self.scale_E[:, None]


def rounded_to_nearest(
    weight_ED: Float[torch.Tensor, "E D"], kind: WeightFormat, group_size: int
) -> QuantizedMatrix:
    """Round each weight by itself; ``group_size`` must divide D."""
    weight_ED = weight_ED.float()
    grids = [_Grid.fitted(kind, group) for group in weight_ED.split(group_size, dim=1)]
    pieces = zip(grids, weight_ED.split(group_size, dim=1), strict=True)
    return _matrix([grid.codes(group) for grid, group in pieces], grids)


def rounded_with_feedback(
    weight_ED: Float[torch.Tensor, "E D"],
    second_moment_DD: Float32[torch.Tensor, "D D"],
    kind: WeightFormat,
    group_size: int,
) -> QuantizedMatrix:
    """Round column by column, so that products with such inputs change least; ``group_size`` must divide D.

    Raises :class:`ModelError` for second moments that are not finite.
    """
    weight_ED = weight_ED.float().clone()
    upper_DD = _upper_of_inverse(second_moment_DD)
    codes: list[torch.Tensor] = []
    grids: list[_Grid] = []
    for column in range(weight_ED.shape[1]):
        if column % group_size == 0:
            grids.append(_Grid.fitted(kind, weight_ED[:, column : column + group_size]))
        codes.append(grids[-1].codes(weight_ED[:, column, None]))
        error_E = (weight_ED[:, column] - grids[-1].weights(codes[-1])[:, 0]) / upper_DD[column, column]
        weight_ED[:, column + 1 :].addr_(error_E, upper_DD[column, column + 1 :], alpha=-1.0)
    return _matrix(codes, grids)


def _upper_of_inverse(second_moment_DD: Float32[torch.Tensor, "D D"]) -> Float32[torch.Tensor, "D D"]:
    if not bool(second_moment_DD.isfinite().all()):
        raise ModelError(
            "the states of a model to quantise must be finite on the calibration texts, got NaN or infinity; "
            "fetch the model again"
        )
    moment_DD = second_moment_DD.double()
    mean = float(moment_DD.diagonal().mean()) or 1.0  # of inputs that are all zero, any will do
    moment_DD = moment_DD + torch.eye(len(moment_DD), dtype=torch.float64) * _DAMPING * mean
    inverse_DD = torch.cholesky_inverse(torch.linalg.cholesky(moment_DD))
    return torch.linalg.cholesky(inverse_DD, upper=True).float()


def _matrix(codes: list[torch.Tensor], grids: list[_Grid]) -> QuantizedMatrix:
    # float8 has no concatenation of its own.
    is_fp8 = grids[0].kind == "fp8"
    codes_ED = torch.cat([part.view(torch.uint8) if is_fp8 else part for part in codes], dim=1)
    scales_EG = torch.stack([grid.scale_E for grid in grids], dim=1)
    if grids[0].kind != "int4":
        return QuantizedMatrix(
            codes=codes_ED.view(torch.float8_e4m3fn) if is_fp8 else codes_ED, scales_EG=scales_EG
        )
    zeros_EG = torch.stack([grid.zero_E for grid in grids], dim=1).to(torch.uint8)
    return QuantizedMatrix(codes=two_codes_a_byte(codes_ED), scales_EG=scales_EG.half(), zeros_EG=zeros_EG)
