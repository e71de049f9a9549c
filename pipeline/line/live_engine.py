"""The model of a collection that is written to all day: loaded once, and spared what is stored already.

An :class:`cairn.pipeline.line.engine.Engine` for :mod:`cairn.pipeline.line.live`. It takes the model that
searches have in memory. Of a document whose title and text are stored as they are, it takes the stored
vectors: a change of metadata alone encodes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from cairn.pipeline.config import IngestConfig
from cairn.pipeline.encode.endpoint_requests import WRITE
from cairn.pipeline.encode.shards import ADDED_COLUMNS, as_parquet
from cairn.pipeline.index.files import open_pinned_dataset
from cairn.pipeline.index.layout import CollectionLayout
from cairn.pipeline.index.maintenance import find_served
from cairn.pipeline.index.names import CHUNKS, DOCUMENTS
from cairn.pipeline.line.compatibility import copied_manifest
from cairn.pipeline.line.encoder_worker import EncoderWorker, load_stages
from cairn.pipeline.line.engine import Begun, CorpusView, EncodedShard
from jaxtyping import Bool
from typing_extensions import override

if TYPE_CHECKING:
    from cairn.pipeline.model.engine.backbone import Backbone

SMALL_CHARACTERS: Final = 8_000
"""Texts of so many characters together are encoded on one thread: more would wait for each other.

So are more texts while searches wait.
"""


class LiveEngine(EncoderWorker):
    """A worker whose model stays loaded from run to run; ``is_busy`` tells whether searches wait."""

    def __init__(
        self,
        config: IngestConfig,
        layout: CollectionLayout,
        backbone: Backbone | None,
        is_busy: Callable[[], bool],
    ) -> None:
        super().__init__(config, patience=WRITE)
        self.config, self._is_busy = config, is_busy
        self._layout = layout
        if backbone is not None:
            self._stages = load_stages(config, backbone)
            self._load_sparse()
        self._begun: tuple[tuple[str, ...], Begun] | None = None

    @override
    def begin(self, view: CorpusView) -> Begun:
        """Take clusters and context; the same ones again cost nothing."""
        codebook = "" if view.token_codebook is None else view.token_codebook.fingerprint
        key = (view.context.fingerprint, view.clusters.fingerprint, codebook)
        if self._begun is None or self._begun[0] != key:
            self._begun = key, super().begin(view)
        self._view = view
        return self._begun[1]

    @override
    def close(self) -> None:
        """Stay loaded: the next run comes soon."""

    @override
    def encode_shard(self, staged: bytes, on_tokens: Callable[[int], None] | None = None) -> EncodedShard:
        """Encode the texts that are not stored as they are, and take the vectors of the others."""
        rows = pq.read_table(pa.BufferReader(staged))
        is_kept, documents, chunks = self._kept(rows)
        rest = rows.filter(pa.array(~is_kept))
        characters = sum(map(len, rest.column("text").to_pylist()))
        num_tokens = 0
        if rest.num_rows:
            from cairn.pipeline.model.document_encoder import one_torch_thread

            is_few = characters < SMALL_CHARACTERS or self._is_busy()
            left = as_parquet(rest).to_pybytes() if is_kept.any() else staged
            with one_torch_thread() if is_few else contextlib.nullcontext():
                shard = super().encode_shard(left, on_tokens)
            if not is_kept.any():
                return shard
            num_tokens = shard.num_tokens
            documents = [*documents, _read(shard.documents)]
            chunks = [*chunks, _read(shard.chunks)]
        places = np.concatenate([np.flatnonzero(is_kept), np.flatnonzero(~is_kept)])
        place_of = {doc_id: place for place, doc_id in enumerate(rows.column("doc_id").to_pylist())}
        all_chunks = pa.concat_tables(chunks, promote_options="default")
        owners = np.array([place_of[doc_id] for doc_id in all_chunks.column("doc_id").to_pylist()], np.int64)
        return EncodedShard(
            documents=as_parquet(pa.concat_tables(documents).take(pa.array(np.argsort(places)))),
            chunks=as_parquet(all_chunks.take(pa.array(np.argsort(owners, kind="stable")))),
            num_documents=rows.num_rows,
            num_characters=characters,
            num_tokens=num_tokens,
        )

    def _kept(self, rows: pa.Table) -> tuple[Bool[np.ndarray, " N"], list[pa.Table], list[pa.Table]]:
        """Return which rows are stored with the same title and text, and what is stored of them."""
        is_kept = np.zeros(rows.num_rows, bool)
        base = copied_manifest(self._layout)
        if base is not None and (base.partitions or self.config.encoder.given_dims is not None):
            base = None  # encoded again: each document lies in a folder of its own, or brings its vectors
        doc_ids: list[str] = rows.column("doc_id").to_pylist()
        placed = {} if base is None else find_served(self._layout, base, doc_ids)
        found = [doc_id for doc_id in doc_ids if doc_id in placed]
        if base is None or not found:
            return is_kept, [], []
        tables = {
            name: open_pinned_dataset(self._layout.lance_folder, name, base.lance_versions[name])
            for name in (DOCUMENTS, CHUNKS)
        }
        stored = tables[DOCUMENTS].take(
            [placed[doc_id][DOCUMENTS].start for doc_id in found],
            columns=["doc_id", "title", "text", *ADDED_COLUMNS],
        )
        texts = dict(zip(doc_ids, _texts(rows), strict=True))
        is_same = [
            doc_id == own and texts[own] == text
            for doc_id, own, text in zip(
                stored.column("doc_id").to_pylist(), found, _texts(stored), strict=True
            )
        ]
        same = {doc_id for doc_id, holds in zip(found, is_same, strict=True) if holds}
        if not same:
            return is_kept, [], []
        is_kept[:] = [doc_id in same for doc_id in doc_ids]
        spans = [placed[doc_id][CHUNKS] for doc_id in found if doc_id in same]
        chunks = tables[CHUNKS].take([row for span in spans for row in range(span.start, span.stop)])
        return is_kept, [stored.filter(pa.array(is_same)).select([*ADDED_COLUMNS])], [chunks]


def _read(content: pa.Buffer | Path | None) -> pa.Table:
    assert isinstance(content, pa.Buffer), "a live engine hands bytes over"
    return pq.read_table(pa.BufferReader(content))


def _texts(rows: pa.Table) -> list[tuple[str | None, str]]:
    return list(zip(rows.column("title").to_pylist(), rows.column("text").to_pylist(), strict=True))
