"""How much the embeddings of calibration texts change without a layer, a head or a neuron.

    layers          measured: the one whose absence moves embeddings least goes first, then the next (greedy)
    heads, neurons  estimated: E ‖∂e/∂m‖², m the gate of the part, from one backward pass a text

The first-order term of a loss that compares a model with itself is zero, so the estimate is the leading,
second-order one: by Gauss-Newton, the cosine of the embedding e falls by ½ ‖∂e/∂mᵢ‖² without part i.
An embedding is the mean of all tokens here, whatever the model pools. ‖∂e/∂m‖² is estimated without bias by
(∂⟨e, r⟩/∂m)², r a random direction.

Source: Kwon et al. 2022 (a fast post-training pruning framework for Transformers), diagonal Fisher
information of mask variables; Michel et al. 2019 for gates of heads. Differs: the loss is the change of
embeddings, not that of labels, and interactions between parts are left out. Layers: Kim et al. 2024
(Shortened LLaMA), by the change of embeddings instead of perplexity, measured again after each removal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from cairn.pipeline.errors import ModelError
from cairn.pipeline.lab.compress.plain_pass import Gates, embed_row, open_gates
from cairn.pipeline.model.engine.transformer import Transformer
from cairn.pipeline.types import ProgressListener
from jaxtyping import Float32, Int64

Rows = Sequence[Int64[np.ndarray, " _"]]


def gate_importance(engine: Transformer, rows: Rows, seed: int, progress: ProgressListener) -> Gates:
    """Return the mean squared change of embeddings by head and by neuron.

    NaN raises :class:`ModelError`.
    """
    gates = open_gates(engine)
    squares = Gates(heads_LH=torch.zeros_like(gates.heads_LH), inner_LI=torch.zeros_like(gates.inner_LI))
    generator = torch.Generator().manual_seed(seed)
    for number, ids_T in enumerate(rows):
        embedding_D = embed_row(engine, ids_T, gates=gates)
        direction_D = torch.randn(embedding_D.shape, generator=generator)
        of_heads, of_inner = torch.autograd.grad(embedding_D @ direction_D, (gates.heads_LH, gates.inner_LI))
        squares.heads_LH.add_(of_heads.square() / len(rows))
        squares.inner_LI.add_(of_inner.square() / len(rows))
        progress("importance", number + 1, len(rows), "texts")
    if not bool(squares.heads_LH.isfinite().all() and squares.inner_LI.isfinite().all()):
        raise _not_finite()
    return squares


@torch.no_grad()
def most_important_layers(
    engine: Transformer, rows: Rows, num_kept: int, *, keeps_first: bool, progress: ProgressListener
) -> tuple[int, ...]:
    """Return the layers that stay, ascending, after the least important ones were taken out one by one.

    Of two that change the embeddings alike the later one goes.
    """
    whole_ND = torch.stack([embed_row(engine, ids_T) for ids_T in rows])
    kept = tuple(range(engine.num_layers))
    num_trials, done = sum(range(num_kept + 1, len(kept) + 1)), 0
    while len(kept) > num_kept:
        changes: dict[int, float] = {}
        for layer in kept[1:] if keeps_first else kept:
            others = tuple(other for other in kept if other != layer)
            changes[layer] = _change(engine, rows, others, whole_ND)
            done += 1
            progress("layers", done, num_trials, "trials")
        least = min(changes, key=lambda layer: (changes[layer], -layer))
        kept = tuple(other for other in kept if other != least)
    return kept


def _change(
    engine: Transformer, rows: Rows, layers: tuple[int, ...], whole_ND: Float32[torch.Tensor, "N D"]
) -> float:
    """Return the mean of 1 - cosine between embeddings of these layers and those of all."""
    change = 0.0
    for ids_T, whole_D in zip(rows, whole_ND, strict=True):
        change += 1.0 - float(embed_row(engine, ids_T, layers=layers) @ whole_D)
    if not np.isfinite(change):
        raise _not_finite()
    return change / len(rows)


def _not_finite() -> ModelError:
    return ModelError(
        "embeddings of the calibration texts must be finite, got NaN or infinity; fetch the model again"
    )
