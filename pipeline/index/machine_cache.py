"""Where a machine keeps what it can make or fetch again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of what this machine can make or fetch again.

    RuntimeError where nothing says where the home is.
    """
    cache = (
        os.environ.get("CAIRN_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cairn"
    )
    return Path(cache).resolve()
