"""Who computes a step: one process by itself, or several with the same weights that share a batch.

    every process   the whole batch ─▶ its micro-batches embedded ─▶ gathered ─▶ the loss of the whole batch
                    its micro-batches' gradients ─▶ added up ─▶ the same optimiser step

So loss and gradient are those of one process on the same batch, rounding aside, and weights stay equal
without being sent. Only the first process writes.

Source: Gao et al. 2021 (GradCache), §3.3, several devices. Differs: every process computes the loss of the
whole batch, in tiles.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Mapping
from typing import Final

import torch
from cairn.pipeline.model.engine.precision import default_device
from jaxtyping import Float


class Processes:
    """The processes of a run, seen from one of them; here, the only one.

    All must make the same calls in the same order.
    """

    rank: int = 0
    """Number of this process; 0 writes."""

    size: int = 1
    """How many there are."""

    @property
    def device(self) -> torch.device:
        """Return where this process computes."""
        return default_device()

    def share(self, count: int) -> range:
        """Return which of so many micro-batches are this process's."""
        return range(self.rank, count, self.size)

    def gather(
        self, parts: Mapping[int, Float[torch.Tensor, "_ E"]], count: int
    ) -> tuple[Float[torch.Tensor, "_ E"], ...]:
        """Return all ``count`` micro-batches' embeddings in order, of which every process brings its share.

        No graph goes along.
        """
        return tuple(parts[number] for number in range(count))

    def add_up(self, tensor: torch.Tensor) -> None:
        """Replace the tensor by its sum over all processes."""

    def add_up_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Give every parameter the sum of all processes' gradients, and none where no process has one."""

    def require_same(self, number: int, what: str) -> None:
        """Raise :class:`IntegrityError` in every process unless all hold the same number for ``what``."""

    def wait(self) -> None:
        """Return when all have come here."""


ALONE: Final = Processes()


@contextlib.contextmanager
def first_before_others(processes: Processes) -> Generator[None]:
    """Run the block in the first process, then in the others, which find the files it wrote."""
    if processes.rank:
        processes.wait()
    yield
    if not processes.rank:
        processes.wait()
