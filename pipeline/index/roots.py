"""The root of collections: a folder, or one in an object store, of which this machine keeps copies."""

from __future__ import annotations

import os
import re
from pathlib import Path

from cairn.pipeline.errors import ConfigError
from cairn.pipeline.index.object_folder import STORE_URI


def cache_folder() -> Path:
    """Return the folder of what this machine can make or fetch again.

    RuntimeError where nothing says where the home is.
    """
    cache = (
        os.environ.get("CAIRN_CACHE")
        or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cairn"
    )
    return Path(cache).resolve()


def store_uri(root: Path | str) -> str | None:
    """Return the root as ``s3://bucket/prefix`` where it is one, None for a folder.

    Other schemes are refused.
    """
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(root)):
        return None
    found = STORE_URI.fullmatch(str(root))
    if found is None:
        raise ConfigError(
            f"the root must be a folder or s3://BUCKET/PREFIX, got {str(root)!r}; mount or copy other storage"
        )
    return "/".join(["s3:/", found["bucket"], *filter(None, [found["prefix"]])])


def resolve_root(root: Path | str) -> Path:
    """Return the root as an absolute folder.

    Of one in an object store, the folder of this machine's copies.
    """
    uri = store_uri(root)
    if uri is None:
        return Path(root).resolve()
    return cache_folder() / "s3" / uri.removeprefix("s3://")
