"""The root of collections: a folder, or one in an object store, of which this machine keeps copies."""

from __future__ import annotations

import re
from pathlib import Path

from cairn.pipeline.errors import ConfigError
from cairn.pipeline.index.machine_cache import cache_folder
from cairn.pipeline.index.object_folder import STORE_URI


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
