"""Tell how far a corpus has moved from the context it was encoded with.

Compares two histograms over the same clusters. Sees documents that move between clusters, not a new topic
that falls into an old cluster: only clustering again finds that. Decides nothing: it measures, and says the
measure in a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from cairn.pipeline.errors import FingerprintMismatchError

Verdict = Literal["none", "slight", "re-contextualise"]

SLIGHT_DISTANCE = 0.05
"""Total variation is the share of context places that stand for the wrong cluster.

Below this, under 26 of 512.
"""

LARGE_DISTANCE = 0.20
"""From here on, one context place in five stands for documents that are no longer there in that number."""

LARGE_GROWTH = 0.50
"""When most documents are newer than the context, their contents may differ though their clusters agree."""

MOVED_SHARE = 0.01
"""A cluster is named when its share of the corpus changed by at least this much."""

MAX_NAMED_CLUSTERS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Drift:
    """Distance between the corpus a context was drawn from and the corpus now.

    ``total_variation``: 0 … 1, the least share of documents that would have to change cluster.
    ``added_share``: documents gained since, as a share of those now (net of deletions, never below 0).
    ``changed_clusters``: ids whose share moved most, most first, equal moves by id.
    """

    total_variation: float
    added_share: float
    changed_clusters: tuple[int, ...]
    verdict: Verdict


def measure_drift(
    context_sizes_K: Sequence[int], current_sizes_K: Sequence[int], documents_at_context: int
) -> Drift:
    """Compare the histogram at the time of the context with the current one.

    A corpus without documents has not drifted.
    """
    if len(context_sizes_K) != len(current_sizes_K):
        raise FingerprintMismatchError(
            f"both histograms must count the same clusters, got {len(context_sizes_K)} and "
            f"{len(current_sizes_K)}; compare a context only with the clusters it was drawn over"
        )
    before_K, now_K = (np.asarray(sizes, dtype=np.int64) for sizes in (context_sizes_K, current_sizes_K))
    num_before, num_now = int(before_K.sum()), int(now_K.sum())
    if not num_now:
        return Drift(total_variation=0.0, added_share=0.0, changed_clusters=(), verdict="none")

    p_K, q_K = before_K / max(1, num_before), now_K / num_now
    moved_K = np.abs(p_K - q_K)
    most_moved = np.argsort(-moved_K, kind="stable")[:MAX_NAMED_CLUSTERS]
    total_variation = float(moved_K.sum() / 2)
    added_share = max(0.0, (num_now - documents_at_context) / num_now)
    return Drift(
        total_variation=total_variation,
        added_share=added_share,
        changed_clusters=tuple(int(cluster) for cluster in most_moved if moved_K[cluster] >= MOVED_SHARE),
        verdict=_verdict(total_variation, added_share),
    )


def _verdict(total_variation: float, added_share: float) -> Verdict:
    if total_variation >= LARGE_DISTANCE or added_share > LARGE_GROWTH:
        return "re-contextualise"
    return "slight" if total_variation >= SLIGHT_DISTANCE else "none"
