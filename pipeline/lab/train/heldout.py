"""Pairs kept out of training, and how well queries find their documents: what "best checkpoint" means.

A document's pairs go out together, so that no text is learned by which a model is judged. The score ranks the
held-out documents alone, behind a context as a collection has one where the model reads any; it compares the
checkpoints of one run and nothing else. ``cairn evaluate`` says how good a model is.

    Q queries    N documents    V vector dim
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.cluster.sampling import hash_order
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.packed_rows import split
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.lab.train.sequences import SequenceMaker
from cairn.pipeline.lab.train.trainer import NotFiniteError
from cairn.pipeline.model.landmarks import Rows
from jaxtyping import Float32, Int64

MAX_SHARE = 0.1
"""Never hold out more than a tenth of the data."""


def choose_heldout(pairs: TrainingPairs, num_pairs: int) -> Int64[np.ndarray, " n"]:
    """Return so many pairs, at most a tenth, whole documents at a time, chosen by a hash of their text."""
    wanted = min(num_pairs, int(MAX_SHARE * len(pairs)))
    owners: dict[str, list[int]] = {}
    for position, document in enumerate(pairs.documents):
        owners.setdefault(document, []).append(position)
    documents = list(owners)
    chosen: list[int] = []
    for place in hash_order(documents, 0).tolist():
        positions = owners[documents[place]]
        if len(chosen) + len(positions) <= wanted:
            chosen += positions
        if len(chosen) == wanted:
            break
    return np.array(sorted(chosen), np.int64)


@torch.no_grad()
def score_heldout(
    model: LandmarkEncoder,
    maker: SequenceMaker,
    positions: Sequence[int],
    documents: Sequence[str],
    *,
    interval: int,
    max_tokens: int,
    context: Rows | None = None,
) -> dict[str, float]:
    """Return nDCG@10 and MRR@10 of these pairs' queries over their documents, behind a ``context``."""
    first = {documents[position]: position for position in reversed(positions)}
    distinct = sorted(first.values())
    number = {documents[position]: place for place, position in enumerate(distinct)}
    context_CD = None
    if context is not None:
        context_CD = torch.cat([model.embed_documents(part) for part in split(context, max_tokens)])
    query_QV, document_NV = (
        embed_texts(model, *laid_out, max_tokens, context_CD)
        for laid_out in (maker.queries(positions, interval), maker.documents(distinct, interval))
    )
    scores_QN = (query_QV @ document_NV.T).cpu().numpy()
    if not np.isfinite(scores_QN).all():
        raise NotFiniteError("vectors of held-out pairs must be finite, got NaN or infinity")
    return rank_scores(scores_QN, np.array([number[documents[position]] for position in positions]))


def embed_texts(
    model: LandmarkEncoder,
    rows: Rows,
    text_B: Int64[np.ndarray, " B"],
    max_tokens: int,
    context_CD: Float32[torch.Tensor, "C D"] | None = None,
) -> Float32[torch.Tensor, "N V"]:
    """Embed texts by their rows: the normalised mean of their chunks' normalised embeddings."""
    embeddings = [model(part, context_CD) for part in split(rows, max_tokens)]
    return mean_by_text(torch.cat(embeddings), text_B, int(text_B.max()) + 1)


def mean_by_text(
    embeddings_BV: Float32[torch.Tensor, "B V"], text_B: Int64[np.ndarray, " B"], num_texts: int
) -> Float32[torch.Tensor, "N V"]:
    """Return each text's vector as ingest makes a document's."""
    owners = torch.from_numpy(text_B).to(embeddings_BV.device)
    sums_NV = embeddings_BV.new_zeros((num_texts, embeddings_BV.shape[1]))
    return F.normalize(sums_NV.index_add_(0, owners, F.normalize(embeddings_BV, dim=1)), dim=1)


def rank_scores(
    scores_QN: Float32[np.ndarray, "Q N"], positive_Q: Int64[np.ndarray, " Q"]
) -> dict[str, float]:
    """Return both measures for one relevant document a query, which stands behind its ties."""
    own_Q1 = np.take_along_axis(scores_QN, positive_Q[:, None], axis=1)
    rank_Q = np.where(np.isnan(own_Q1[:, 0]), np.inf, (~(scores_QN < own_Q1)).sum(axis=1))
    is_seen_Q = rank_Q <= 10
    return {
        "heldout_ndcg_at_10": float(np.where(is_seen_Q, 1.0 / np.log2(1.0 + rank_Q), 0.0).mean()),
        "heldout_mrr_at_10": float(np.where(is_seen_Q, 1.0 / rank_Q, 0.0).mean()),
    }
