"""The positions of documents on maps, kept over a restart in this machine's cache.

    hash of the vectors' file, the documents shown, how a map is laid out ─▶ CACHE/maps/<hash>.arrow: x, y

A map is not part of a published generation, so each machine lays it out once, at the first request. A file's
name is a hash of everything that its content depends on, so no file is out of date. Files hold no id, title
or text. A map whose file cannot be read or written is laid out again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
from collections.abc import Generator
from importlib.metadata import version
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from cairn.pipeline.cluster.arrow_file import read_arrow_file, write_arrow_file
from cairn.pipeline.errors import CairnError, DamageError
from cairn.pipeline.index.generation import Generation
from cairn.pipeline.index.roots import cache_folder
from jaxtyping import Float32, Int64

log = logging.getLogger(__name__)

KIND: Final = "map"
LAYOUT_VERSION: Final = 2
"""Counted up where the same documents would come to stand elsewhere."""
MAX_FILES: Final = 64
"""Of some 80 KB each; the least lately looked at go first."""
SCHEMA: Final = pa.schema(
    [pa.field("x", pa.float32(), nullable=False), pa.field("y", pa.float32(), nullable=False)]
)


class MapFiles:
    """Layouts by what they depend on.

    Used by one thread at a time of this process, and by other processes beside it.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder

    def find(
        self, generation: Generation, positions_N: Int64[np.ndarray, " N"], sample_size: int
    ) -> Float32[np.ndarray, "N 2"] | None:
        """Return where the documents stand, None where no whole file says so."""
        with self._tried("read"):
            path = self._path(generation, positions_N, sample_size)
            if not path.exists():
                return None
            table, header = read_arrow_file(path, kind=KIND, schema=SCHEMA)
            places_N2 = np.stack([column.to_numpy() for column in table.columns], axis=1)
            if header.get("sha256") != _sha256(places_N2) or places_N2.shape != (len(positions_N), 2):
                raise DamageError(f"{path.name} must hold a place for each document of its map, got others")
            os.utime(path)
            return places_N2
        return None

    def keep(
        self,
        generation: Generation,
        positions_N: Int64[np.ndarray, " N"],
        sample_size: int,
        places_N2: Float32[np.ndarray, "N 2"],
    ) -> None:
        """Keep where the documents stand."""
        with self._tried("kept"):
            path = self._path(generation, positions_N, sample_size)
            path.parent.mkdir(parents=True, exist_ok=True)
            columns = [np.ascontiguousarray(column) for column in places_N2.T]
            write_arrow_file(
                path, pa.table(columns, schema=SCHEMA), kind=KIND, header={"sha256": _sha256(places_N2)}
            )
            files = sorted(
                path.parent.glob("*.arrow"), key=lambda file: file.stat().st_mtime_ns, reverse=True
            )
            for file in files[MAX_FILES:]:
                file.unlink(missing_ok=True)

    def _path(self, generation: Generation, positions_N: Int64[np.ndarray, " N"], sample_size: int) -> Path:
        documents = hashlib.sha256(positions_N.astype("<i8").tobytes()).hexdigest()
        vectors = generation.vectors_sha256
        depends_on = [LAYOUT_VERSION, version("openTSNE"), vectors, documents, sample_size]
        name = hashlib.sha256(json.dumps(depends_on).encode()).hexdigest()
        return (self._folder or cache_folder() / "maps") / f"{name}.arrow"

    @contextlib.contextmanager
    def _tried(self, action: str) -> Generator[None]:
        try:
            yield
        except (CairnError, OSError, RuntimeError) as error:  # RuntimeError: there is no home
            log.warning("serve.map_not_%s error=%s sentence=%s", action, type(error).__name__, error)


def _sha256(places_N2: Float32[np.ndarray, "N 2"]) -> str:
    return hashlib.sha256(np.ascontiguousarray(places_N2, "<f4").tobytes()).hexdigest()
