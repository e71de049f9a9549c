"""Draw documents by a seeded hash of their id.

The sample does not depend on the order, files or batches they came in. Serves the sample that K-means is
trained on, and the order in which context documents are taken from a cluster. A grown corpus keeps the part
of a sample that no newcomer's hash displaces.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from cairn.pipeline.errors import SourceError
from jaxtyping import Int64, UInt64

SAMPLE_TEXT_CHARACTERS = 2_048
"""Start of a document that a sample holds: some 500 tokens, twice what surrogate and first stage read.

One book must not outweigh the sample.
"""


def hash_keys(doc_ids: Sequence[str], seed: int) -> UInt64[np.ndarray, "N 2"]:
    """Map ids to uniform 128-bit keys, high half first.

    The same id and seed give the same key everywhere, and no two ids share one.
    """
    secret = seed.to_bytes(8, "little", signed=True)
    digests = b"".join(
        hashlib.blake2b(doc_id.encode(), digest_size=16, key=secret).digest() for doc_id in doc_ids
    )
    return np.frombuffer(digests, dtype="<u8").reshape(-1, 2)


def hash_order(doc_ids: Sequence[str], seed: int) -> Int64[np.ndarray, " N"]:
    """Return the positions of the ids in the order of their keys."""
    return _key_order(hash_keys(doc_ids, seed))


def sample_rows(tables: Iterable[pa.Table | pa.RecordBatch], max_documents: int, seed: int) -> pa.Table:
    """Keep the ``max_documents`` rows of a stream with the smallest keys, in key order.

    Each ``text`` is cut to its opening. Rows need ``doc_id`` and ``text``; every other column stays. Holds at
    most twice the sample and one table. A stream without a single table, not even an empty one, is refused:
    it has no columns.
    """
    held: list[pa.Table] = []
    held_keys: list[np.ndarray] = []
    num_held, highest = 0, np.uint64(2**64 - 1)

    def prune() -> None:
        nonlocal num_held, highest
        keys = np.concatenate(held_keys)
        kept = _key_order(keys)[:max_documents]
        held[:], held_keys[:] = [pa.concat_tables(held).take(pa.array(kept))], [keys[kept]]
        num_held = len(kept)
        if num_held == max_documents:
            highest = keys[kept[-1], 0]

    for table in tables:
        keys = hash_keys(table.column("doc_id").to_pylist(), seed)
        candidates = np.flatnonzero(keys[:, 0] <= highest)
        held.append(_with_openings(table, candidates))
        held_keys.append(keys[candidates])
        num_held += len(candidates)
        if num_held > 2 * max_documents:
            prune()
    if not held:
        raise SourceError("a sample must be drawn from at least one table, got an empty stream")
    prune()
    return held[0].combine_chunks()


def _key_order(keys_N2: UInt64[np.ndarray, "N 2"]) -> Int64[np.ndarray, " N"]:
    return np.lexsort((keys_N2[:, 1], keys_N2[:, 0]))


def _with_openings(table: pa.Table | pa.RecordBatch, rows: np.ndarray) -> pa.Table:
    whole = table if isinstance(table, pa.Table) else pa.Table.from_batches([table])
    taken = whole.take(pa.array(rows))
    index = taken.schema.get_field_index("text")
    openings = pc.call_function(
        "utf8_slice_codeunits", [taken.column(index)], pc.SliceOptions(0, SAMPLE_TEXT_CHARACTERS)
    )
    return taken.set_column(index, taken.schema.field(index), openings)
