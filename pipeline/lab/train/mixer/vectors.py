"""Texts embedded once and kept: a mixer learns from the base's vectors, which cost almost all of the time.

    FOLDER/<encoder's fingerprint>/document/<fingerprint of the texts>.npz    keys     16 bytes a text
    FOLDER/<encoder's fingerprint>/query/…                                    counts   its chunks
    FOLDER/<encoder's fingerprint>/title/…                                    vectors  theirs, float16
    FOLDER/<encoder's fingerprint>/context-<tokens>/…

A text is found by its key in whatever file it lies, so other files of pairs, another sample or other judged
texts embed only what is new, and a killed run goes on behind its last block. A file that cannot be read is
embedded again; nothing is ever removed.

    N texts    M chunks    D width
"""

from __future__ import annotations

import hashlib
import logging
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np
from cairn.pipeline import durable
from cairn.pipeline.config import ContextConfig, EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.manifest import fingerprint
from cairn.pipeline.model.context_encoder import ContextEncoder
from cairn.pipeline.types import ProgressListener, silent_progress
from jaxtyping import Float, Float16, Float32, Int64

logger = logging.getLogger(__name__)

FORMAT_VERSION: Final = 1
KEY_BYTES: Final = 16
BLOCK_TEXTS: Final = 2_048
"""Texts that a file holds, and a killed run has to embed again at most."""

Kind = Literal["document", "query", "title", "context"]
_STAGES: Final[Mapping[Kind, str]] = {
    "document": "documents",
    "query": "queries",
    "title": "titles",
    "context": "context documents",
}
_KeptFile = tuple[list[bytes], np.ndarray, np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkVectors:
    """Vectors of N texts' chunks; text ``i`` owns ``vectors_MD[offsets_N1[i] : offsets_N1[i + 1]]``."""

    vectors_MD: Float16[np.ndarray, "M D"]
    offsets_N1: Int64[np.ndarray, " N1"]

    def means(self) -> Float32[np.ndarray, "N D"]:
        """Return each text's vector as an ingest makes a document's.

        The normalised sum of its chunks' vectors.
        """
        counts_N = np.diff(self.offsets_N1)
        means_ND = np.zeros((len(counts_N), self.vectors_MD.shape[1]), np.float32)
        for start in range(0, len(counts_N), BLOCK_TEXTS):
            first, end = self.offsets_N1[start], self.offsets_N1[min(start + BLOCK_TEXTS, len(counts_N))]
            block = slice(start, start + BLOCK_TEXTS)
            means_ND[block] = np.add.reduceat(
                unit(self.vectors_MD[first:end]), self.offsets_N1[:-1][block] - first
            )
        return unit(means_ND)


def unit(vectors: Float[np.ndarray, "*rows D"]) -> Float32[np.ndarray, "*rows D"]:
    """Normalise vectors in float32; zeros stay zeros."""
    wide = vectors.astype(np.float32)
    norms = np.linalg.norm(wide, axis=-1, keepdims=True)
    return wide / np.where(norms > 0, norms, 1.0)


class BaseVectors:
    """Embeds the four kinds of texts with one base model; ``folder`` = None keeps nothing.

    A context document has one vector, that of the first stage, as in an ingest with ``context``.
    """

    def __init__(
        self, config: EncoderConfig, folder: Path | None, context: ContextConfig | None = None
    ) -> None:
        self.encoder = DocumentEncoder(config)
        # Titles are read without a prefix, as an encoder with a mixer reads them.
        plain = replace(
            config, document_prefix="", query_prefix="", pool_prefix=False, temperature_by_length=()
        )
        self._titles = DocumentEncoder(plain, backbone=self.encoder.backbone)
        context = context or ContextConfig()
        self._first_stage = ContextEncoder.of(self.encoder.backbone, config, context)
        self._context_tokens = context.max_document_tokens
        key = fingerprint(format=FORMAT_VERSION, encoder=self.encoder.fingerprint, precision=config.precision)
        self._folder = None if folder is None else folder / key

    def embed(
        self, kind: Kind, texts: Sequence[str], progress: ProgressListener = silent_progress
    ) -> ChunkVectors:
        """Return the vectors of different texts in the order given, embedding those that are not kept."""
        keys = [_key(text) for text in texts]
        number = {key: place for place, key in enumerate(keys)}
        found: list[np.ndarray | None] = [None] * len(texts)
        for kept_keys, counts_n, vectors_mD in self._kept(kind, number.keys().__contains__):
            ends_n = np.cumsum(counts_n)
            for key, end, count in zip(kept_keys, ends_n.tolist(), counts_n.tolist(), strict=True):
                if key in number:
                    found[number[key]] = vectors_mD[end - count : end]
        missing = [place for place, vectors in enumerate(found) if vectors is None]
        for start in range(0, len(missing), BLOCK_TEXTS):
            places = missing[start : start + BLOCK_TEXTS]
            counts_n, vectors_mD = self._encode(kind, [texts[place] for place in places])
            self.keep(kind, [texts[place] for place in places], counts_n, vectors_mD)
            for place, vectors in zip(places, np.split(vectors_mD, np.cumsum(counts_n)[:-1]), strict=True):
                found[place] = vectors
            progress(_STAGES[kind], start + len(places), len(missing), "texts")
        parts = [vectors for vectors in found if vectors is not None]
        offsets_N1 = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        width = self.encoder.vector_dim
        return ChunkVectors(
            vectors_MD=np.concatenate([np.zeros((0, width), np.float16), *parts]), offsets_N1=offsets_N1
        )

    def keep(
        self,
        kind: Kind,
        texts: Sequence[str],
        counts_N: Int64[np.ndarray, " N"],
        vectors_MD: Float16[np.ndarray, "M D"],
    ) -> None:
        """Keep vectors of texts, each with so many chunks, where :meth:`embed` finds them.

        Whole or not at all.
        """
        if self._folder is None:
            return
        keys_NB = np.frombuffer(b"".join(map(_key, texts)), np.uint8).reshape(-1, KEY_BYTES)
        path = self._folder / self._subfolder(kind) / f"{hashlib.sha256(keys_NB.tobytes()).hexdigest()}.npz"
        with durable.storage_errors(f"keeping vectors in {path.parent}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with durable.replacing(path) as temporary, temporary.open("wb") as stream:
                np.savez(
                    stream,
                    keys=keys_NB,
                    counts=np.asarray(counts_N, np.int64),
                    vectors=np.asarray(vectors_MD, np.float16),
                )

    def _encode(
        self, kind: Kind, texts: Sequence[str]
    ) -> tuple[Int64[np.ndarray, " N"], Float16[np.ndarray, "M D"]]:
        if kind == "query":
            return np.ones(len(texts), np.int64), self.encoder.encode_queries(texts).astype(np.float16)
        if kind == "context":
            return np.ones(len(texts), np.int64), unit(self._first_stage.embed(texts)).astype(np.float16)
        encoded = (self._titles if kind == "title" else self.encoder).encode(texts)
        return np.diff(encoded.chunk_offsets), encoded.chunk_vectors_MV.astype(np.float16)

    def _kept(self, kind: Kind, is_wanted: Callable[[bytes], bool]) -> Iterator[_KeptFile]:
        for path in sorted((self._folder / self._subfolder(kind)).glob("*.npz")) if self._folder else ():
            if (file := _read(path, is_wanted)) is not None:
                yield file

    def _subfolder(self, kind: Kind) -> str:
        return f"{kind}-{self._context_tokens}" if kind == "context" else kind


def _read(path: Path, is_wanted: Callable[[bytes], bool]) -> _KeptFile | None:
    """Return the keys, counts and vectors of a file; None where it is damaged or holds nothing wanted."""
    try:
        # The stream is ours: numpy leaves a damaged file open.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            keys = [row.tobytes() for row in arrays["keys"]]
            if not any(map(is_wanted, keys)):
                return None
            counts_N, vectors_MD = arrays["counts"], arrays["vectors"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        keys, counts_N, vectors_MD = [], np.zeros(0, np.int64), None
    if vectors_MD is None or len(keys) != len(counts_N) or counts_N.sum() != len(vectors_MD):
        logger.warning("%s is damaged; its texts are embedded again", path.name)
        return None
    return keys, counts_N, vectors_MD


def _key(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()
