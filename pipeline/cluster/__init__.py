"""Group the corpus by topic, seen from documents and queries at once.

sample ──▶ φ(d), ψ(q) ──▶ φ⊕ψ and ψ⊕φ ──▶ spherical K-means ──▶ Clusters ──▶ one id a document, streamed

Clusters spread the context over the corpus, order the batches of encoding and training, and colour the map of
the corpus.
"""

from cairn.pipeline.cluster.assignment import ClusterAssigner, assign
from cairn.pipeline.cluster.asymmetric_kmeans import choose_num_clusters, pair_points, train_clusters
from cairn.pipeline.cluster.queries import query_side
from cairn.pipeline.cluster.sampling import sample_rows
from cairn.pipeline.cluster.store import Clusters

__all__ = [
    "ClusterAssigner",
    "Clusters",
    "assign",
    "choose_num_clusters",
    "pair_points",
    "query_side",
    "sample_rows",
    "train_clusters",
]
