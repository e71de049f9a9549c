"""Self-attention as a low-pass filter: what layers leave of the differences of tokens, and the bounds of it.

    HC[X] = (I - 11ᵀ/n) X         what tells the tokens of a row apart; the mean of the row is the rest
    theorem 2   ‖HC[A X W_V]‖_F ≤ sigma_a ‖W_V‖₂ ‖HC[X]‖_F
                sigma_a: largest singular value of HC[A]
    theorem 3   sigma_a ≤ √(n / (2 √(1 + e^(-2 sigma_s²)) (n - 1)^(3/2) + 1))
                sigma_s: standard deviation of the logits
    eq. 4       τ_s = 1 / sigma_s,  sigma_s² = sigma_q² sigma_k² + C_cross
    eq. 5       a temperature τ makes it τ τ_s

Theorem 2 holds for one head of any model, whatever its bias: a constant added to all values is in the mean.
Figure 2 draws ‖HC[X_l+1]‖ / ‖HC[X_l]‖ of whole layers beside sigma_a sigma_1 H, sigma_1 the largest ‖W_V‖₂
of H heads. That bounds the heads side by side, not the residual, projection and feed-forward of a layer.
Theorem 3 rests on logits that are Gaussian and independent, and on a sum of log-normal numbers taken for
another log-normal one; trained models need not follow it.

Source: Zhou et al., "Length-Induced Embedding Collapse in Transformer-based Models", §2.2, B.1, B.2, E.2,
E.3. Differs: sigma_a of figure 2 is the largest of a layer's heads, with which the bound is proved. In eq. 3
the root closes before (n - 1), as eq. 21 gives it.

    T tokens (n)    H heads    D model dim    d head dim
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from cairn.pipeline.lab.analysis.traced_pass import Attention, Trace
from jaxtyping import Float


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerFilter:
    """Logarithms of what one layer left of HC[X], means over texts of one length.

    ``layer`` counts from 1. ``whole_layer`` is figure 2's measured line and ``heads_bound`` its bound, of
    ``heads``: all heads side by side. ``head`` and ``head_bound`` are theorem 2 itself, means over the heads.
    """

    tokens: int
    layer: int
    is_local: bool
    whole_layer: float
    heads: float
    heads_bound: float
    head: float
    head_bound: float


@dataclass(frozen=True, kw_only=True, slots=True)
class FilterRate:
    """Theorem 3, eq. 4 and 5 for the last global layer at one length and τ, means over heads and texts.

    ``low`` and ``high`` are the 95 % interval of ``sigma_a`` over the texts, ``values`` those of each text.
    ``sigma_s`` is that of the logits divided by τ, so 1 / ``sigma_s`` is τ_s. ``gaussian_sigma_s`` is
    sigma_q sigma_k / τ: eq. 4 without its cross term.
    """

    tokens: int
    temperature: float
    sigma_a: float
    low: float
    high: float
    bound: float
    sigma_s: float
    gaussian_sigma_s: float
    tau_s: float
    values: tuple[float, ...]


def high_frequency(x_TD: Float[torch.Tensor, "*H T D"]) -> Float[torch.Tensor, "*H T D"]:
    """Return HC[X]: the rows without their mean."""
    return x_TD - x_TD.mean(dim=-2, keepdim=True)


def high_frequency_norm(attention_TT: Float[torch.Tensor, "*H T T"]) -> Float[torch.Tensor, "*H"]:
    """Return the largest singular value of (I - 11ᵀ/n) A for every matrix A of a stack."""
    high_TT = high_frequency(attention_TT)
    # The root of the Gram matrix's largest eigenvalue: half the time of the singular values themselves.
    return torch.linalg.eigvalsh(high_TT.mT @ high_TT)[..., -1].clamp(min=0.0).sqrt()


def theorem_3_bound(num_tokens: int, sigma_s: float) -> float:
    """Return the bound of sigma_a that theorem 3 gives for n tokens and logits of deviation ``sigma_s``."""
    root = math.sqrt(1.0 + math.exp(-2.0 * sigma_s**2))
    return math.sqrt(num_tokens / (2.0 * root * (num_tokens - 1) ** 1.5 + 1.0))


def layer_filters(
    traces: Sequence[Trace], value_norms: Sequence[Float[torch.Tensor, " H"]], num_tokens: int
) -> list[LayerFilter]:
    """Measure theorem 2 in every layer on texts of one length; ``value_norms`` are ‖W_V‖₂ of its heads."""
    filters: list[LayerFilter] = []
    for index, norms_H in enumerate(value_norms):
        own = [_one_layer(trace, index, norms_H) for trace in traces]
        whole, heads, heads_bound, head, head_bound = np.mean(np.log(own), axis=0).tolist()
        filters.append(
            LayerFilter(
                tokens=num_tokens,
                layer=index + 1,
                is_local=traces[0].is_local[index],
                whole_layer=whole,
                heads=heads,
                heads_bound=heads_bound,
                head=head,
                head_bound=head_bound,
            )
        )
    return filters


def _one_layer(trace: Trace, index: int, value_norm_H: Float[torch.Tensor, " H"]) -> list[float]:
    """Return the five ratios of one layer on one text; those of single heads as geometric means."""
    attention = trace.attentions[index]
    before, after = (torch.linalg.matrix_norm(high_frequency(each)) for each in trace.states[index:][:2])
    read = torch.linalg.matrix_norm(high_frequency(attention.read_TD))
    weights_HTT = attention.weights()
    sigma_H = high_frequency_norm(weights_HTT)
    left_H = torch.linalg.matrix_norm(high_frequency(weights_HTT @ attention.value_HTd))
    tiny = torch.finfo(torch.float32).tiny
    return [
        float((after / before).clamp(min=tiny)),
        float((left_H.square().sum().sqrt() / read).clamp(min=tiny)),
        float((sigma_H.max() * value_norm_H.max() * len(sigma_H)).clamp(min=tiny)),
        float((left_H / read).clamp(min=tiny).log().mean().exp()),
        float((sigma_H * value_norm_H).clamp(min=tiny).log().mean().exp()),
    ]


def filter_rate(
    attentions: Sequence[Attention], sigma_a_values: Sequence[float], num_tokens: int
) -> FilterRate:
    """Hold theorem 3 and eq. 4 against attentions of one length and τ, with sigma_a of each."""
    temperature = attentions[0].temperature
    sigma_s_NH = np.stack([_deviation(each.logits()) for each in attentions]) / temperature
    gaussian_NH = (
        np.stack([_deviation(each.query_HTd) * _deviation(each.key_HTd) for each in attentions]) / temperature
    )
    bounds = [theorem_3_bound(num_tokens, sigma) for sigma in sigma_s_NH.ravel().tolist()]
    mean = float(np.mean(sigma_a_values))
    half = 1.96 * standard_error(sigma_a_values)
    return FilterRate(
        tokens=num_tokens,
        temperature=temperature,
        sigma_a=mean,
        low=mean - half,
        high=mean + half,
        bound=float(np.mean(bounds)),
        sigma_s=float(sigma_s_NH.mean()),
        gaussian_sigma_s=float(gaussian_NH.mean()),
        tau_s=float((1.0 / np.maximum(sigma_s_NH, np.finfo(np.float32).tiny)).mean()),
        values=tuple(sigma_a_values),
    )


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of a mean, 0 for a single value."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def _deviation(x_HTX: Float[torch.Tensor, "H T X"]) -> Float[np.ndarray, " H"]:
    """Return the standard deviation of all entries of each head."""
    return x_HTX.flatten(1).double().std(dim=1, correction=0).cpu().numpy()
