"""Several processes over torch.distributed: NCCL between GPUs, one a process, else gloo between processors.

What is exchanged are sums: a gathered batch is a sum of tensors that are zero where another process fills
them in. Sums come out the same bits in every process, so weights do not drift apart.
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
from cairn.pipeline.lab.train.processes import Processes
from jaxtyping import Float
from typing_extensions import override

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
        flat = torch.cat([is_there, *(_gradient(parameter).flatten() for parameter in trained)])
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


def _gradient(parameter: torch.nn.Parameter) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


@contextlib.contextmanager
def torch_processes() -> Generator[TorchProcesses]:
    """Join the process group that the environment describes, and leave it at the end."""
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
