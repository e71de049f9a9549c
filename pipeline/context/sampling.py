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


def allocate(
    sizes_K: Int64[np.ndarray, " K"], num_documents: int, available_K: Int64[np.ndarray, " K"] | None = None
) -> Int64[np.ndarray, " K"]:
    """Share ``num_documents`` places by largest remainder in proportion to ``sizes_K``.

    Equal remainders go to the lower cluster id. No cluster gets more than it has available (its size, unless
    told otherwise); what it cannot fill goes to the others by the same rule. The places add up to
    ``num_documents``, or to all there is.
    """
    capacity_K = sizes_K if available_K is None else available_K
    places_K = np.zeros(len(sizes_K), dtype=np.int64)
    left = min(num_documents, int(capacity_K.sum()))
    while left:
        weights_K = np.where(places_K < capacity_K, sizes_K, 0)
        shares_K, remainders_K = np.divmod(left * weights_K, weights_K.sum())
        by_remainder = np.argsort(-remainders_K, kind="stable")
        shares_K[by_remainder[: left - shares_K.sum()]] += 1
        granted_K = np.minimum(shares_K, capacity_K - places_K)
        places_K += granted_K
        left -= int(granted_K.sum())
    return places_K


def draw_context(
    doc_ids: Sequence[str],
    assignments_N: Int32[np.ndarray, " N"],
    num_documents: int,
    seed: int,
    cluster_sizes_K: Int64[np.ndarray, " K"] | None = None,
) -> Int64[np.ndarray, " C"]:
    """Return the positions of the context documents, ordered by cluster id, then by seeded hash of the id.

    Which documents are drawn, and their order, depends on ids and clusters alone, not on the order of the
    rows. ``cluster_sizes_K`` is the histogram of the whole corpus where ``doc_ids`` is a sample of it.
    """
    num_clusters = int(assignments_N.max(initial=-1)) + 1 if cluster_sizes_K is None else len(cluster_sizes_K)
    available_K = np.bincount(assignments_N, minlength=num_clusters).astype(np.int64)
    sizes_K = available_K if cluster_sizes_K is None else np.maximum(cluster_sizes_K, available_K)
    places_K = allocate(sizes_K, num_documents, available_K)

    by_hash_N = hash_order(doc_ids, seed)
    by_cluster_N = by_hash_N[np.argsort(assignments_N[by_hash_N], kind="stable")]
    return by_cluster_N[places_in_groups(available_K) < np.repeat(places_K, available_K)]
