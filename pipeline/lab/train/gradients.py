"""The gradient of a step in the memory of a micro-batch: of losses that add up, and of a whole batch's.

    1  every micro-batch of M1, then of M2, without a graph           ─▶ context vectors, embeddings
    2  the loss of all embeddings                                      ─▶ a gradient for each embedding
    3  every micro-batch of M2 once more, with a graph                 ─▶ gradients of M2, context gradients
    4  every micro-batch of M1 once more, with a graph                 ─▶ gradients of M1

Costs one more forward pass; the gradient is the plain one. The context is shared by all micro-batches of M2,
as the batch's documents share it. A micro-batch is computed twice and must come out the same, so what it
draws at random it draws from a seed.

Source: Gao et al. 2021 (GradCache); Morris & Rush 2024 (CDE), §4.2, two stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Float32

FirstStage = Callable[[], Float[torch.Tensor, "c D"]]
"""Embeds the context documents of one micro-batch."""

Embedded = tuple[Float[torch.Tensor, "_ _"], ...]
"""What a stage makes of a micro-batch: one or more tensors, such as landmarks and distances of tokens."""

SecondStage = Callable[[Float[torch.Tensor, "C D"] | None], Embedded]
"""Embeds the texts of one micro-batch behind the whole context, None without one."""

Loss = Callable[[Embedded], Float32[torch.Tensor, ""]]
"""Takes what all micro-batches were embedded to, in their order, each tensor in one."""


def summed_backward(parts: Sequence[Callable[[], Float32[torch.Tensor, ""]]]) -> Float32[torch.Tensor, ""]:
    """Add the gradient of ``parts``, whose sum is the loss; return the loss."""
    losses: list[torch.Tensor] = []
    for part in parts:
        own = part()
        own.backward()
        losses.append(own.detach())
    return torch.stack(losses).sum()


def cached_backward(
    first: Sequence[FirstStage], second: Sequence[SecondStage], loss: Loss
) -> Float32[torch.Tensor, ""]:
    """Add the loss's gradient to all parameters, one micro-batch at a time, and return the loss.

    The loss has no graph. Without micro-batches of the first stage there is no context. A single micro-batch
    in all is computed once, with its graph.
    """
    if len(second) == 1 and len(first) <= 1:
        value = loss(second[0](first[0]() if first else None))
        value.backward()
        return value.detach()
    with torch.no_grad():
        contexts = [embed() for embed in first]
        context_CD = torch.cat(contexts) if contexts else None
        embedded = [embed(context_CD) for embed in second]
    whole = tuple(torch.cat(parts).requires_grad_() for parts in zip(*embedded, strict=True))
    value = loss(whole)
    value.backward()
    gradients = zip(
        *(_split(tensor, [part[place] for part in embedded]) for place, tensor in enumerate(whole)),
        strict=True,
    )
    if context_CD is not None:
        context_CD.requires_grad_()
    for embed, own in zip(second, gradients, strict=True):
        _backward(embed(context_CD), own)
    if context_CD is not None:
        for embed, gradient in zip(first, _split(context_CD, contexts), strict=True):
            _backward((embed(),), (gradient,))
    return value.detach()


def _split(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    gradient = torch.zeros_like(whole) if whole.grad is None else whole.grad
    return gradient.split([len(part) for part in parts])


def _backward(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    # A micro-batch of frozen parameters alone has nothing to hand on.
    trained = [both for both in zip(outputs, gradients, strict=True) if both[0].requires_grad]
    if trained:
        tensors, their_gradients = zip(*trained, strict=True)
        torch.autograd.backward(tensors, their_gradients)
