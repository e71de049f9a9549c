"""Cross entropy over a vocabulary at several layers and widths; the matrix of all logits never exists.

    L = Σ over layers l, widths d, tokens k of  logsumexp(z) - z[y]     z = h^l[:d] W[:d] + b

The logits of a width are those of the width before it plus the product of the dimensions between them, so all
widths of a layer cost one product of the widest. Gradients are made in the forward pass, tile by tile of
tokens, from the same logits: a tile is all that is in memory of them.

With a distillation each exit also follows the last layer's widest one, which gets no gradient from it:
KL(P_S ‖ P_T) at temperature τ.

Source: m³BERT §2.1 (L_total; one head and one bias for all exits), A.2 (eq. 2 and 3). Differs: W is the input
table; A.2 writes the softmax without b, here both sides have it, as it belongs to the head.

    L layers    W widths    K scored tokens    D model dim    V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from cairn.pipeline.errors import ConfigError
from jaxtyping import Float, Float32, Int64
from typing_extensions import override

TILE_NUMBERS: Final = 1 << 25
"""Numbers of all widths' logits in a tile: 128 MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfDistillation:
    """How strongly, and at which temperature, all exits follow the last layer's widest one."""

    weight: float = 1.0
    temperature: float = 1.0


def vocabulary_loss(
    states_LKD: Float[torch.Tensor, "L K D"],
    table_VD: Float[torch.Tensor, "V D"],
    bias_V: Float[torch.Tensor, " V"],
    labels_K: Int64[torch.Tensor, " K"],
    widths: Sequence[int],
    *,
    distillation: SelfDistillation | None = None,
    tile_numbers: int = TILE_NUMBERS,
) -> tuple[Float32[torch.Tensor, ""], Float32[torch.Tensor, "L W"]]:
    """Return the sum over layers, widths and tokens, and each exit's own sum of cross entropies.

    Only the first has a gradient. Sums are in float32; products run in autocast's precision. ``widths`` rise
    and end within the states, else :class:`ConfigError`.
    """
    if not widths or any(
        a >= b for a, b in zip((0, *widths), (*widths, states_LKD.shape[2] + 1), strict=True)
    ):
        raise ConfigError(
            f"widths of the vocabulary's loss must rise from 1 to at most {states_LKD.shape[2]}, got "
            f"{list(widths)}"
        )
    total, sums_LW = _TiledLoss.apply(
        states_LKD, table_VD, bias_V, labels_K, tuple(widths), distillation, tile_numbers
    )  # pyright: ignore[reportGeneralTypeIssues]
    return total, sums_LW


class _TiledLoss(torch.autograd.Function):
    """Loss and gradients, one tile of tokens in memory at a time."""

    @staticmethod
    @override
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        states_LKD, table_VD, bias_V, labels_K, widths, distillation, tile_numbers = args
        device = states_LKD.device.type
        is_half = torch.is_autocast_enabled(device)
        products = torch.get_autocast_dtype(device) if is_half else torch.float32
        tile = _Tile(
            table_VD, bias_V, widths, distillation, products, wants_gradients=any(ctx.needs_input_grad)
        )
        num_layers, num_tokens, _ = states_LKD.shape
        sums_LW = states_LKD.new_zeros((num_layers, len(widths)), dtype=torch.float32)
        states_grad = torch.zeros_like(states_LKD, dtype=torch.float32)
        step = max(1, tile_numbers // (len(table_VD) * (len(widths) + 2)))
        for start in range(0, num_tokens, step):
            tokens = slice(start, start + step)
            tile.teacher = None
            # The last layer first: the others follow it.
            for layer in reversed(range(num_layers)):
                # Each tensor is cast once by hand, where autocast would at every product.
                with torch.autocast(device, enabled=False):
                    sums_LW[layer] += tile.add(
                        states_LKD[layer, tokens], labels_K[tokens], states_grad[layer, tokens]
                    )
        ctx.mark_non_differentiable(sums_LW)
        ctx.save_for_backward(states_grad, tile.table_grad, tile.bias_grad)
        ctx.dtypes = states_LKD.dtype, table_VD.dtype, bias_V.dtype
        return sums_LW.sum() + tile.distilled, sums_LW

    @staticmethod
    @override
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor | None, ...]:
        gradients = (
            (gradient * grad_outputs[0]).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *gradients, None, None, None, None


class _Tile:
    """Some tokens of one layer at a time; the gradients of table and bias add up over all of them."""

    def __init__(
        self,
        table_VD: torch.Tensor,
        bias_V: torch.Tensor,
        widths: Sequence[int],
        distillation: SelfDistillation | None,
        products: torch.dtype,
        *,
        wants_gradients: bool,
    ) -> None:
        self._products = products
        self._table_VD = table_VD.to(products)
        self._bias_V = bias_V.float()
        self._blocks = [slice(start, end) for start, end in zip((0, *widths), widths, strict=False)]
        self._distillation = distillation
        self._wants_gradients = wants_gradients
        self.table_grad = torch.zeros_like(table_VD, dtype=torch.float32)
        self.bias_grad = torch.zeros_like(self._bias_V)
        self.distilled = self._bias_V.new_zeros(())
        self.teacher: torch.Tensor | None = None

    def add(
        self, states_kD: torch.Tensor, labels_k: torch.Tensor, grad_kD: torch.Tensor
    ) -> Float32[torch.Tensor, " W"]:
        """Return the loss of each width, and fill in the states' gradient."""
        states_kD = states_kD.to(self._products)
        losses: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        logits_kV = self._bias_V.expand(len(states_kD), -1)
        every_width: list[torch.Tensor] = []
        for block in self._blocks:
            states, table = states_kD[:, block], self._table_VD[:, block].T
            logits_kV = (
                torch.addmm(logits_kV, states, table)
                if self._products == torch.float32
                else logits_kV + states @ table
            )
            every_width.append(logits_kV)
        is_teaching = self._distillation is not None and self.teacher is None
        if self._distillation is not None and is_teaching:
            self.teacher = (logits_kV / self._distillation.temperature).log_softmax(1)
        for place, logits in enumerate(every_width):
            shares = logits.log_softmax(1)
            losses.append(-shares.gather(1, labels_k[:, None]).sum())
            gradient = shares.exp_()  # in place: log-softmax is not needed again
            gradient[torch.arange(len(labels_k), device=labels_k.device), labels_k] -= 1.0
            if not (is_teaching and place == len(every_width) - 1):
                self._distil(logits, gradient)
            gradients.append(gradient)
        if self._wants_gradients:
            self._hand_back(states_kD, gradients, grad_kD)
        return torch.stack(losses)

    def _distil(self, logits_kV: torch.Tensor, gradient_kV: torch.Tensor) -> None:
        if self._distillation is None or self.teacher is None:
            return
        weight, temperature = self._distillation.weight, self._distillation.temperature
        student = (logits_kV / temperature).log_softmax(1)
        shares, distance = student.exp(), student.sub_(self.teacher)
        divergence_k = (shares * distance).sum(1, keepdim=True)
        self.distilled += weight * divergence_k.sum()
        gradient_kV.addcmul_(shares, distance.sub_(divergence_k), value=weight / temperature)

    def _hand_back(
        self, states_kD: torch.Tensor, gradients: Sequence[torch.Tensor], grad_kD: torch.Tensor
    ) -> None:
        """Add the gradients up: a dimension is in every width that reaches beyond it."""
        so_far = gradients[-1]
        for place in reversed(range(len(gradients))):
            if place < len(gradients) - 1:
                so_far += gradients[place]
            block, gradient = self._blocks[place], so_far.to(self._products)
            grad_kD[:, block] = gradient @ self._table_VD[:, block]
            self.table_grad[:, block] += gradient.T @ states_kD[:, block]
        self.bias_grad += so_far.sum(0)
