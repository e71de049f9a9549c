"""Encoded sets kept on disk between runs, one file each, named by everything that moves a vector in it.

A long table that was killed goes on with what it had encoded, and a new way to rank costs no encoding. Times
are kept with the vectors: they are those of the run that encoded. A file that cannot be read is encoded
again; nothing is ever removed.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from cairn.pipeline import durable
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.lab.evaluate.encodings import EncodedSet, Encoding
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet
from cairn.pipeline.manifest import fingerprint

FORMAT_VERSION = 2


def cache_file(folder: Path, judged: RetrievalSet, encoding: Encoding, encoder: DocumentEncoder) -> Path:
    """Return where a set under an encoding is kept.

    Set, encoder, context, precision and what is done to texts decide the name.
    """
    key = fingerprint(
        format=FORMAT_VERSION,
        encoder=encoder.fingerprint,
        precision=encoding.encoder.precision,
        has_titles=encoding.has_titles,
        max_document_tokens=encoding.max_document_tokens,
        **({} if encoding.stride_tokens is None else {"stride_tokens": encoding.stride_tokens}),
        **({} if encoder.token_projection is None else {"late": encoder.token_projection.fingerprint}),
        texts=text_digest(judged.texts),
        titles=text_digest(judged.titles if encoding.has_titles or encoder.reads_titles else ()),
        queries=text_digest(judged.queries),
    )
    return folder / f"{key}.npz"


def read_encoded(path: Path) -> EncodedSet | None:
    """Return what is kept, None where nothing whole is."""
    try:
        # The stream is ours: numpy leaves a damaged file open.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            return EncodedSet(**{field.name: _value(arrays[field.name]) for field in fields(EncodedSet)})
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def write_encoded(path: Path, encoded: EncodedSet) -> None:
    """Keep an encoded set, whole or not at all; the folder is made."""
    with durable.storage_errors(f"writing {path.name} to the cache"):
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = {
            field.name: np.asarray(getattr(encoded, field.name)) for field in fields(EncodedSet)
        }
        with durable.replacing(path) as temporary, temporary.open("wb") as stream:
            np.savez(stream, **arrays)


def _value(array: np.ndarray) -> Any:
    return array if array.ndim else array.item()


def text_digest(texts: Iterable[str]) -> str:
    """Identify texts and their order."""
    digest = hashlib.sha256()
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()
