"""The gradient of a step in the memory of a micro-batch: of losses that add up, and of a whole batch's.

    1  every micro-batch of M1, then of M2, without a graph           ─▶ context vectors, embeddings
    2  the loss of all embeddings                                      ─▶ a gradient for each embedding
    3  every micro-batch of M2 once more, with a graph                 ─▶ gradients of M2, context gradients
    4  every micro-batch of M1 once more, with a graph                 ─▶ gradients of M1

Costs one more forward pass; the gradient is the plain one. The context is shared by all micro-batches of M2,
as the batch's documents share it. A micro-batch is computed twice and must come out the same, so what it
draws at random it draws from a seed.

Source: Gao et al. 2021 (GradCache); Morris & Rush 2024 (CDE), §4.2, two stages. ``plain_backward`` is the
oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from cairn.pipeline.lab.train.processes import ALONE, Processes
from jaxtyping import Float, Float32

FirstStage = Callable[[], Float[torch.Tensor, "c D"]]
"""Embeds the context documents of one micro-batch."""

Embedded = tuple[Float[torch.Tensor, "_ _"], ...]
"""What a stage makes of a micro-batch: one or more tensors, such as chunks' embeddings and token vectors."""

SecondStage = Callable[[Float[torch.Tensor, "C D"] | None], Embedded]
"""Embeds the texts of one micro-batch behind the whole context, None without one."""

Loss = Callable[[Embedded], Float32[torch.Tensor, ""]]
"""Takes what all micro-batches were embedded to, in their order, each tensor in one."""


def summed_backward(
    parts: Sequence[Callable[[], Float32[torch.Tensor, ""]]], processes: Processes = ALONE
) -> Float32[torch.Tensor, ""]:
    """Add the gradient of this process's share of ``parts``, whose sum is the loss; return the whole loss."""
    loss = torch.zeros((), device=processes.device)
    for number in processes.share(len(parts)):
        own = parts[number]()
        own.backward()
        loss += own.detach()
    processes.add_up(loss)
    return loss


def cached_backward(
    first: Sequence[FirstStage],
    second: Sequence[SecondStage],
    loss: Loss,
    processes: Processes = ALONE,
    num_tensors: int = 1,
) -> Float32[torch.Tensor, ""]:
    """Add the loss's gradient to all parameters, one micro-batch at a time, and return the loss.

    The loss has no graph. Without micro-batches of the first stage there is no context. A single micro-batch
    in all is computed once, with its graph. Several ``processes`` share the micro-batches, and each adds the
    gradient of its share alone: what parameters get is still to be summed. The second stage makes
    ``num_tensors`` tensors of a micro-batch, of which a process may have none.
    """
    if processes.size == 1 and len(second) == 1 and len(first) <= 1:
        return plain_backward(first, second, loss)
    own_first, own_second = processes.share(len(first)), processes.share(len(second))
    with torch.no_grad():
        contexts = (
            processes.gather({number: first[number]() for number in own_first}, len(first)) if first else ()
        )
        context_CD = torch.cat(contexts) if contexts else None
        embedded = gather_each(
            {number: second[number](context_CD) for number in own_second}, len(second), num_tensors, processes
        )
    whole = tuple(torch.cat(parts).requires_grad_() for parts in embedded)
    value = loss(whole)
    value.backward()
    gradients = list(
        zip(*(_split_gradient(*both) for both in zip(whole, embedded, strict=True)), strict=True)
    )
    if context_CD is not None:
        context_CD.requires_grad_()
    for number in own_second:
        _backward(second[number](context_CD), gradients[number])
    if context_CD is not None:
        gradient_CD = torch.zeros_like(context_CD) if context_CD.grad is None else context_CD.grad
        processes.add_up(gradient_CD)
        context_gradients = gradient_CD.split([len(part) for part in contexts])
        for number in own_first:
            _backward((first[number](),), (context_gradients[number],))
    return value.detach()


def gather_each(
    parts: Mapping[int, Embedded], count: int, num_tensors: int, processes: Processes
) -> tuple[tuple[torch.Tensor, ...], ...]:
    """Return for each tensor of a stage those of all ``count`` micro-batches, in order."""
    return tuple(
        processes.gather({number: part[place] for number, part in parts.items()}, count)
        for place in range(num_tensors)
    )


def _split_gradient(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    gradient = torch.zeros_like(whole) if whole.grad is None else whole.grad
    return gradient.split([len(part) for part in parts])


def _backward(outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    # A micro-batch of frozen parameters alone has nothing to hand on.
    trained = [both for both in zip(outputs, gradients, strict=True) if both[0].requires_grad]
    if trained:
        tensors, their_gradients = zip(*trained, strict=True)
        torch.autograd.backward(tensors, their_gradients)


def plain_backward(
    first: Sequence[FirstStage], second: Sequence[SecondStage], loss: Loss
) -> Float32[torch.Tensor, ""]:
    """Do the same with one graph over everything."""
    context_CD = torch.cat([embed() for embed in first]) if first else None
    parts = [embed(context_CD) for embed in second]
    value = loss(tuple(map(torch.cat, zip(*parts, strict=True))))
    value.backward()
    return value.detach()
