"""Arrays that cost an encoder's time, kept under a key of all that moves a number in them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from cairn.pipeline import durable
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

logger = logging.getLogger(__name__)


def kept_arrays(
    path: Path | None, key: str, make: Callable[[], Mapping[str, np.ndarray]]
) -> Mapping[str, np.ndarray]:
    """Read the arrays stored at ``path`` (None: nowhere) under this ``key``, else make and store them."""
    if path is not None and path.is_file():
        try:
            with safe_open(path, "numpy") as stored:
                if (stored.metadata() or {}).get("key") == key:
                    return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        except (SafetensorError, OSError):
            logger.warning("%s is damaged, and made again", path.name)
    arrays = make()
    if path is not None:
        with durable.storage_errors(f"writing {path.name}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with durable.replacing(path) as temporary:
                save_file(
                    {name: np.ascontiguousarray(each) for name, each in arrays.items()},
                    temporary,
                    {"key": key},
                )
    return arrays
