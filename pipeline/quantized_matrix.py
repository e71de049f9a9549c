"""A matrix in fewer bits: codes, and a scale for each row or for each group of a row's columns.

    int8   (E, D) int8, symmetric            weight = code · scale
    int4   (E, D / 2) uint8, two codes each  weight = (code - zero) · scale, codes 0 to 15

In int4, the low four bits of the bytes hold the first D / 2 columns, and the high four bits the others.
Matrix products use the weights that :meth:`QuantizedMatrix.dequantized` returns.
:mod:`cairn.pipeline.lab.compress.quantization` chooses the codes.

    E rows    D columns    G groups of D / G columns
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, UInt8
from typing_extensions import override


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantizedMatrix:
    """Codes with their scales; only int4 has ``zeros_EG``."""

    codes: torch.Tensor
    scales_EG: Float[torch.Tensor, "E G"]
    zeros_EG: UInt8[torch.Tensor, "E G"] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Return E and D."""
        return len(self.codes), self.codes.shape[1] * (1 if self.zeros_EG is None else 2)

    @property
    def nbytes(self) -> int:
        """Return the bytes of codes, scales and zeros."""
        return (
            self.codes.nbytes + self.scales_EG.nbytes + (0 if self.zeros_EG is None else self.zeros_EG.nbytes)
        )

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Float[torch.Tensor, "E D"]:
        """Return the weights."""
        scales_EG1 = self.scales_EG.to(dtype)[:, :, None]
        if self.zeros_EG is None:
            weight_ED = self.codes.to(dtype)
        else:
            half = self.codes.shape[1]
            weight_ED = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
            weight_ED[:, :half] = self.codes & 15
            weight_ED[:, half:] = self.codes >> 4
        weight_EGg = weight_ED.unflatten(1, (self.scales_EG.shape[1], -1))
        if self.zeros_EG is not None:
            weight_EGg -= self.zeros_EG.to(dtype)[:, :, None]
        return weight_EGg.mul_(scales_EG1).flatten(1)

    def to(self, device: torch.device) -> QuantizedMatrix:
        """Return it on a device."""
        return QuantizedMatrix(
            codes=self.codes.to(device),
            scales_EG=self.scales_EG.to(device),
            zeros_EG=None if self.zeros_EG is None else self.zeros_EG.to(device),
        )


def two_codes_a_byte(codes_ED: UInt8[torch.Tensor, "E D"]) -> UInt8[torch.Tensor, "E half"]:
    """Pack codes from 0 to 15; D must be even."""
    first, second = codes_ED.chunk(2, dim=1)
    return first | (second << 4)


def stacked_matrices(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Lay matrices of one width and format one below the other."""
    zeros = [matrix.zeros_EG for matrix in matrices if matrix.zeros_EG is not None]
    return QuantizedMatrix(
        codes=torch.cat([matrix.codes for matrix in matrices]),
        scales_EG=torch.cat([matrix.scales_EG for matrix in matrices]),
        zeros_EG=torch.cat(zeros) if zeros else None,
    )


class QuantizedTensors(Mapping[str, torch.Tensor]):
    """A checkpoint's tensors by name; a reader of a quantised one gets it in float32."""

    def __init__(self, plain: Mapping[str, torch.Tensor], matrices: Mapping[str, QuantizedMatrix]) -> None:
        self.plain = plain
        self.matrices = matrices

    @override
    def __getitem__(self, name: str) -> torch.Tensor:
        return self.matrices[name].dequantized() if name in self.matrices else self.plain[name]

    @override
    def __iter__(self) -> Iterator[str]:
        yield from self.plain
        yield from self.matrices

    @override
    def __len__(self) -> int:
        return len(self.plain) + len(self.matrices)

    @override
    def __contains__(self, name: object) -> bool:
        return name in self.plain or name in self.matrices
