"""What is trained of late interaction: a matrix that projects token states, and a weight for each token id.

    document token    normalise(h W)              query token    normalise(h W), weighing exp(log_weight[id])

``cairn train-late`` trains it on states of a frozen base, ``cairn train`` together with the transformer.

    T tokens    S sampled tokens    D model dim    V vector dim    X vocabulary
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.lab.train.principal import principal_rotation
from cairn.pipeline.token_vectors.projection import TokenProjection, quantised_weights
from jaxtyping import Float, Float32, Int64
from torch import nn
from typing_extensions import override

LOWEST_WEIGHT: Final = 1e-3
OBSERVED_SHARE: Final = 0.1
"""What a step adds to the running mean of squares: the steps of the codec follow the last twenty or so."""


class TokenHead(nn.Module):
    """The projection in training; ``mean_square_V`` is what its codec's steps are taken from."""

    mean_square_V: torch.Tensor

    def __init__(self, matrix_DV: torch.Tensor, weight_X: torch.Tensor) -> None:
        super().__init__()
        self.matrix = nn.Parameter(matrix_DV)
        self.log_weight = nn.Parameter(weight_X.clamp(min=LOWEST_WEIGHT).log())
        self.register_buffer("mean_square_V", torch.full((matrix_DV.shape[1],), 1 / matrix_DV.shape[1]))

    @classmethod
    def of(
        cls, states_SD: Float[np.ndarray, "S D"], idf_X: Float32[np.ndarray, " X"], dims: int
    ) -> TokenHead:
        """Begin at the principal directions of token states and at the tokens' idf."""
        sample_SD = states_SD.astype(np.float32)
        matrix_DV = principal_rotation(sample_SD)[:, :dims].copy()
        head = cls(torch.from_numpy(matrix_DV), torch.from_numpy(idf_X))
        head.observe(head(torch.from_numpy(sample_SD)).detach(), share=1.0)
        return head

    @override
    def forward(self, states_TD: Float[torch.Tensor, "*T D"]) -> Float[torch.Tensor, "*T V"]:
        """Return the unit vectors of token states."""
        return F.normalize(states_TD @ self.matrix, dim=-1)

    def weights_of(self, ids: Int64[torch.Tensor, "*T"]) -> Float[torch.Tensor, "*T"]:
        """Return what each token of a query weighs."""
        return self.log_weight[ids].exp()

    @torch.no_grad()
    def observe(self, vectors_TV: Float[torch.Tensor, "T V"], share: float = OBSERVED_SHARE) -> None:
        """Let ``share`` of the running mean of squares be those of these vectors of documents."""
        self.mean_square_V.lerp_(vectors_TV.float().square().mean(0), share)

    @torch.no_grad()
    def projection(
        self, base_sha256: str, *, bits: int, pool_tokens: int, rms_V: Float32[np.ndarray, " V"] | None = None
    ) -> TokenProjection:
        """Return what is saved, the matrix rounded to float16; ``rms_V`` = None takes the observed ones."""
        codes_X, step = quantised_weights(self.log_weight.detach().exp().cpu().numpy())
        return TokenProjection(
            matrix_DV=self.matrix.detach().cpu().half().float().numpy(),
            weight_codes_X=codes_X,
            weight_step=step,
            rms_V=self.mean_square_V.sqrt().cpu().numpy() if rms_V is None else rms_V,
            pool_tokens=pool_tokens,
            bits=bits,
            base_sha256=base_sha256,
        )
