"""Late interaction in a batch of ``cairn train``: token vectors learned with the transformer, of one pass.

    a micro-batch's states ─▶ own tokens ─▶ TokenHead ─▶ vectors and weights, a row a token of a text
    groups of neighbouring documents, and what was mined for their queries ─▶ MaxSim ─▶ late_loss

The ranking that is followed is MaxSim over whole token states of the base, as ``cairn train-late`` has it. A
query's negatives are the documents of its group but those that the surrogate scores above its own.

    T tokens of texts    V vector dim, followed by a weight    D model dim    N documents    g of a group
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name torch documents
from cairn.pipeline.cluster.sampling import hash_order
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.corpus.tokenization import tokenize
from cairn.pipeline.lab.token_states import embed_tokens
from cairn.pipeline.lab.train.late.head import TokenHead
from cairn.pipeline.lab.train.late.losses import late_loss, max_sims, padded_places
from cairn.pipeline.lab.train.late.settings import LateConfig
from cairn.pipeline.lab.train.objectives.contrastive import FalseNegatives, left_out
from cairn.pipeline.lab.train.packed_rows import PackedRows
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.lab.train.sequences import SequenceBatch
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.ragged import ranges
from cairn.pipeline.token_vectors.max_sim import token_idf
from jaxtyping import Float, Float32, Int64

GROUP_DOCUMENTS: Final = 32
"""Documents whose tokens are compared with one another: a product of some 2,000 by 8,000 tokens."""

IDF_TEXTS: Final = 8_192
STATES_TEXTS: Final = 512
"""Documents, drawn by hash, that weights of tokens and principal directions of their states begin from."""

DEFAULT_INTERVAL: Final = EncoderConfig().landmark_interval


def begin_head(
    pairs: TrainingPairs, heldout: Int64[np.ndarray, " n"], base: str, config: TrainConfig
) -> tuple[TokenHead, Float32[torch.Tensor, " X"]]:
    """Return the head as training begins, from a sample of documents, and what token ids weigh there."""
    settings = EncoderConfig(model=base)
    backbone = load_backbone(settings)
    left_out_pairs = set(heldout.tolist())
    distinct = dict.fromkeys(
        document for number, document in enumerate(pairs.documents) if number not in left_out_pairs
    )
    texts = list(distinct)
    sample = [texts[place] for place in hash_order(texts, 0)[:IDF_TEXTS].tolist()]
    tokens = tokenize(backbone.tokenizer, sample)
    idf_X = token_idf(tokens.ids, tokens.text_offsets, backbone.tokenizer.get_vocab_size())
    states = embed_tokens(
        backbone,
        sample[:STATES_TEXTS],
        batch_tokens=settings.batch_tokens,
        row_tokens=DEFAULT_INTERVAL,
        max_tokens=config.max_document_tokens,
    )
    return TokenHead.of(states.states_TV, idf_X, config.late_dims), torch.from_numpy(idf_X)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Group:
    """Queries and documents of a batch that are compared; the answers are among the documents."""

    queries: Int64[np.ndarray, " q"]
    documents: Int64[np.ndarray, " g"]


def own_places(rows: PackedRows) -> Int64[np.ndarray, " T"]:
    """Return where the rows' own tokens lie: without [CLS], prefix and [LMK]."""
    ends_B = np.cumsum(rows.lengths_B) - 1
    return ranges(ends_B - rows.own_lengths, rows.own_lengths)


def project_tokens(
    head: TokenHead, states_ND: Float[torch.Tensor, "N D"], rows: PackedRows
) -> Float32[torch.Tensor, "T V1"]:
    """Return the vectors of the rows' own tokens, each followed by its weight in a query.

    The weight goes along so that its gradient, too, comes from one process alone.
    """
    places = own_places(rows)
    own = torch.from_numpy(places).to(states_ND.device)
    ids = torch.from_numpy(rows.ids_N[places].astype(np.int64)).to(states_ND.device)
    vectors_TV = head(states_ND[own].float())
    return torch.cat([vectors_TV, head.weights_of(ids)[:, None]], dim=1)


def own_states(states_ND: Float[torch.Tensor, "N D"], rows: PackedRows) -> Float32[torch.Tensor, "T D1"]:
    """Return the unit states of the rows' own tokens, each followed by 1, which says nothing of weights."""
    own = torch.from_numpy(own_places(rows)).to(states_ND.device)
    return F.pad(F.normalize(states_ND[own].float(), dim=1), (0, 1), value=1.0)


def groups_of(batch: SequenceBatch, mined_Qk: Int64[np.ndarray, "Q k"]) -> Iterator[Group]:
    """Cut a batch's documents into groups of neighbours; what was mined for their queries joins them."""
    num_answers = int(batch.positive_Q.max()) + 1
    number_of = {int(pair): num_answers + place for place, pair in enumerate(batch.pair_D[num_answers:])}
    for documents in np.array_split(np.arange(num_answers), -(-num_answers // GROUP_DOCUMENTS)):
        queries = np.flatnonzero((batch.positive_Q >= documents[0]) & (batch.positive_Q <= documents[-1]))
        mined = {number_of[pair] for pair in mined_Qk[queries].ravel().tolist() if pair in number_of}
        yield Group(queries=queries, documents=np.array([*documents.tolist(), *sorted(mined)], np.int64))


def batch_late_loss(
    token_TV1: Float32[torch.Tensor, "T V1"],
    teacher_TD1: Float32[torch.Tensor, "T D1"],
    idf_X: Float32[torch.Tensor, " X"],
    batch: SequenceBatch,
    mined_Qk: Int64[np.ndarray, "Q k"],
    false_negatives: FalseNegatives,
    distillation_weight: float,
) -> tuple[Float32[torch.Tensor, ""], Float32[torch.Tensor, "d V"]]:
    """Return the mean loss of the queries, and the vectors of documents' tokens, without a graph."""
    device, num_queries = token_TV1.device, len(batch.pair_Q)
    places = own_places(batch.rows)
    text_T = np.repeat(batch.text_B, batch.rows.own_lengths)
    is_text_T = text_T >= 0
    # Texts are numbered in the order of their rows, so that those of one lie together.
    counts_N = np.bincount(text_T[is_text_T], minlength=num_queries + len(batch.pair_D))
    offsets_N1 = np.concatenate([[0], np.cumsum(counts_N)])
    kept = torch.from_numpy(np.flatnonzero(is_text_T)).to(device)
    student, teacher = token_TV1[kept], teacher_TD1[kept]
    weight_T = idf_X.to(device)[
        torch.from_numpy(batch.rows.ids_N[places][is_text_T].astype(np.int64)).to(device)
    ]
    teacher = torch.cat([teacher[:, :-1], weight_T[:, None]], dim=1)
    positive_Q = torch.from_numpy(batch.positive_Q).to(device)
    config, total = LateConfig(distillation_weight=distillation_weight), student.new_zeros(())
    for group in groups_of(batch, mined_Qk):
        student_QN, teacher_QN = (
            _scores(vectors, offsets_N1, group, num_queries) for vectors in (student, teacher)
        )
        asked, candidates = (torch.from_numpy(x).to(device) for x in (group.queries, group.documents))
        is_left_out_QN = left_out(false_negatives, positive_Q, asked, candidates)
        answer_Q = torch.searchsorted(candidates, positive_Q[asked])
        loss, _ = late_loss(student_QN, teacher_QN, is_left_out_QN, config, answer_Q)
        total = total + len(group.queries) / num_queries * loss
    return total, student[int(offsets_N1[num_queries]) :, :-1].detach()


def _scores(
    token_TV1: Float32[torch.Tensor, "T V1"],
    offsets_N1: Int64[np.ndarray, " N1"],
    group: Group,
    num_queries: int,
) -> Float32[torch.Tensor, "q g"]:
    query, is_query = _padded(token_TV1, offsets_N1, group.queries)
    document, is_document = _padded(token_TV1, offsets_N1, num_queries + group.documents)
    return max_sims(query[..., :-1], query[..., -1] * is_query, document[..., :-1], is_document)


def _padded(
    token_TV1: Float32[torch.Tensor, "T V1"],
    offsets_N1: Int64[np.ndarray, " N1"],
    texts: Int64[np.ndarray, " n"],
) -> tuple[Float32[torch.Tensor, "n t V1"], torch.Tensor]:
    places, is_token = (torch.from_numpy(x).to(token_TV1.device) for x in padded_places(offsets_N1, texts))
    return token_TV1[places], is_token
