"""The processes that ``torchrun`` started; its variables say which of them this one is.

Without these variables torch.distributed is not loaded.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator

from cairn.pipeline.errors import ConfigError
from cairn.pipeline.lab.train.processes import ALONE, Processes


@contextlib.contextmanager
def joined_processes() -> Generator[Processes]:
    """Join those that ``torchrun`` started with this one; without it, be alone."""
    size = os.environ.get("WORLD_SIZE", "1")
    if "RANK" not in os.environ or size == "1":
        yield ALONE
        return
    if not size.isdecimal():
        raise ConfigError(
            f"WORLD_SIZE must be the number of processes, got {size!r}; start them with torchrun"
        )
    from cairn.pipeline.lab.train.torch_processes import torch_processes

    with torch_processes() as joined:
        yield joined
