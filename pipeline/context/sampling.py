"""Choose the J documents that stand for the corpus: spread over the clusters in proportion to their size.

CDE §4.2 takes context documents at random. Differs: stratified. Of 256 equal clusters a plain draw of 512
misses one in seven, a stratified one none, and it keeps every cluster's share to within one document.

    N documents    K clusters    C context documents
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from cairn.pipeline.cluster.sampling import hash_order
from cairn.pipeline.ragged import places_in_groups
from jaxtyping import Int32, Int64


def allocate(sizes_K: Int64[np.ndarray, " K"], num_documents: int) -> Int64[np.ndarray, " K"]:
    """Share ``num_documents`` places, at most all there are, by largest remainder in proportion to sizes.

    Equal remainders go to the lower cluster id. No cluster gets more than its size.
    """
    total = int(sizes_K.sum())
    places_K, remainders_K = np.divmod(min(num_documents, total) * sizes_K, max(1, total))
    by_remainder = np.argsort(-remainders_K, kind="stable")
    places_K[by_remainder[: min(num_documents, total) - places_K.sum()]] += 1
    return places_K


def draw_context(
    doc_ids: Sequence[str], assignments_N: Int32[np.ndarray, " N"], num_documents: int, seed: int
) -> Int64[np.ndarray, " C"]:
    """Return the positions of the context documents, ordered by cluster id, then by seeded hash of the id.

    Which documents are drawn, and their order, depends on ids and clusters alone, not on the order of the
    rows.
    """
    sizes_K = np.bincount(assignments_N).astype(np.int64)
    by_hash_N = hash_order(doc_ids, seed)
    by_cluster_N = by_hash_N[np.argsort(assignments_N[by_hash_N], kind="stable")]
    places_K = allocate(sizes_K, num_documents)
    return by_cluster_N[places_in_groups(sizes_K) < np.repeat(places_K, sizes_K)]
