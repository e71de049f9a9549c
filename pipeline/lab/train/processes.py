"""Who computes a step: one process by itself, or several with the same weights that share a batch.

    every process   the whole batch ─▶ its micro-batches embedded ─▶ gathered ─▶ the loss of the whole batch
                    its micro-batches' gradients ─▶ added up ─▶ the same optimiser step

So loss and gradient are those of one process on the same batch, rounding aside, and weights stay equal
without being sent. Only the first process writes. Several talk over torch.distributed: NCCL between GPUs, one
a process, else gloo. What is exchanged are sums, which come out the same bits in every process.

Source: Gao et al. 2021 (GradCache), §3.3, several devices. Differs: every process computes the loss of the
whole batch, in tiles.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterable, Mapping
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from cairn.pipeline.errors import ConfigError, IntegrityError
from cairn.pipeline.model.engine.precision import default_device
from jaxtyping import Float
from typing_extensions import override


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


PATIENCE: Final = timedelta(hours=12)
"""How long the others wait for the first, which scores dev sets alone.

Torchrun ends them at once when one fails.
"""


class TorchProcesses(Processes):
    """The default process group."""

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._device = device

    @property
    @override
    def device(self) -> torch.device:
        return self._device

    @override
    def gather(
        self, parts: Mapping[int, Float[torch.Tensor, "_ E"]], count: int
    ) -> tuple[Float[torch.Tensor, "_ E"], ...]:
        # A process without a share learns here how wide embeddings are.
        sizes = torch.zeros(count + 1, dtype=torch.int64, device=self.device)
        for number, part in parts.items():
            sizes[number], sizes[count] = part.shape
        dist.all_reduce(sizes, op=dist.ReduceOp.MAX)
        *lengths, width = sizes.tolist()
        gathered_ME = torch.zeros(sum(lengths), width, device=self.device)
        places = gathered_ME.split(lengths)
        for number, part in parts.items():
            places[number].copy_(part.detach())
        self.add_up(gathered_ME)
        return places

    @override
    def add_up(self, tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)

    @override
    def add_up_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        # Whether a gradient is there at all travels with them: AdamW leaves a parameter without one as it is.
        is_there = torch.tensor(
            [float(parameter.grad is not None) for parameter in trained], device=self.device
        )
        own = [torch.zeros_like(each) if each.grad is None else each.grad for each in trained]
        flat = torch.cat([is_there, *(gradient.flatten() for gradient in own)])
        self.add_up(flat)
        counts, *gradients = flat.split([len(trained), *(parameter.numel() for parameter in trained)])
        for parameter, count, gradient in zip(trained, counts.tolist(), gradients, strict=True):
            parameter.grad = gradient.view_as(parameter) if count else None

    @override
    def require_same(self, number: int, what: str) -> None:
        ends = torch.tensor([number, -number], dtype=torch.int64, device=self.device)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        if ends[0] != -ends[1]:
            raise IntegrityError(
                f"all processes must have the same {what}, got others; give them the same files and the "
                "same software"
            )

    @override
    def wait(self) -> None:
        dist.barrier()


@contextlib.contextmanager
def joined_processes() -> Generator[Processes]:
    """Join those that ``torchrun`` started with this one, and leave them at the end; without it, be alone."""
    size = os.environ.get("WORLD_SIZE", "1")
    if "RANK" not in os.environ or size == "1":
        yield ALONE
        return
    if not size.isdecimal():
        raise ConfigError(
            f"WORLD_SIZE must be the number of processes, got {size!r}; start them with torchrun"
        )
    device = torch.device("cpu")
    if torch.cuda.is_available():
        number, num_devices = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if number >= num_devices:
            raise ConfigError(
                f"every process must have a GPU of its own, got {num_devices} for process {number + 1}; "
                "start fewer"
            )
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
    try:
        if device.type == "cuda":
            dist.init_process_group("nccl", device_id=device, timeout=PATIENCE)
        else:
            dist.init_process_group("gloo", timeout=PATIENCE)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"several processes must be started by torchrun, which tells them where to meet, got: {error}"
        ) from error
    yield TorchProcesses(device)
    # After an error the others may be waiting in the middle of a sum: this process must end, and torchrun
    # will end them.
    dist.destroy_process_group()
