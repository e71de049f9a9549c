"""Vectors of training pairs, kept with a run, and the hard negatives that they find."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.lab.train.pair_data import (
    NONE_FOUND,
    embed_pairs,
    mine_hard_negatives,
    pairs_fingerprint,
    prepared,
)
from cairn.pipeline.lab.train.pairs import Candidates, TrainingPairs
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.types import silent_progress

N, V = 41, 6


def world() -> tuple[np.ndarray, np.ndarray, list[str], list[str]]:
    generator = np.random.default_rng(0)
    vectors = generator.standard_normal((2, N, V)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=2, keepdims=True)
    documents = [f"text {place % 35}" for place in range(N)]
    for place in range(35, N):
        vectors[1, place] = vectors[1, place - 35]
    return vectors[0], vectors[1], documents, [f"s{place % 3}" for place in range(N)]


@pytest.mark.parametrize("num_negatives", [1, 4, 30])
def test_mine_hard_negatives_equals_the_rule_written_out(num_negatives):
    query, document, texts, sources = world()
    left_out, sources[5] = np.array([3, 8]), "alone"
    mined = mine_hard_negatives(
        query,
        document,
        texts,
        sources,
        num_negatives=num_negatives,
        max_share=0.95,
        left_out=left_out,
    )
    for pair in range(N):
        positive = float(query[pair] @ document[pair])
        limit = positive - 0.05 * abs(positive)
        seen: dict[str, int] = {}
        for other in range(N):
            if sources[other] == sources[pair] and other not in left_out and texts[other] != texts[pair]:
                seen.setdefault(texts[other], other)
        allowed = [other for other in seen.values() if float(query[pair] @ document[other]) < limit]
        expected = sorted(allowed, key=lambda other: -float(query[pair] @ document[other]))[:num_negatives]
        assert mined[pair].tolist() == expected + [NONE_FOUND] * (num_negatives - len(expected))


def test_own_negatives_are_those_that_a_pair_brings_else_mined_ones_and_none_is_held_out(
    tiny_model_folder, tmp_path, make_pairs
):
    given = {4: ("a river", "the old mat"), 9: ("the old mat",), 30: ("a river",)}
    rows = make_pairs(40).rows
    given[5], given[6] = (rows[3].document, "a river"), (rows[3].document,)
    pairs = TrainingPairs(
        rows=tuple(row._replace(negatives=given.get(place, ())) for place, row in enumerate(rows))
    )
    heldout, config = np.array([3, 20]), TrainConfig(steps=1, hard_negatives=2, title_share=0.0)
    served = EncoderConfig(model=str(tiny_model_folder), pooling="lmk", attention="full", window_tokens=96)
    checkpoint = read_checkpoint(tiny_model_folder)
    data = prepared(pairs, heldout, checkpoint, served, config, tmp_path, silent_progress)
    mined_Nk = mine_hard_negatives(
        data.vectors.query_NV,
        data.vectors.document_NV[:40],
        pairs.documents,
        [row.source for row in rows],
        num_negatives=2,
        max_share=0.95,
        left_out=heldout,
    )
    texts = Candidates.of(pairs).texts
    for place, own in enumerate(data.hard_negatives_Nk.tolist()):
        mined = [texts[number] for number in mined_Nk[place].tolist() if number != NONE_FOUND]
        brought = [text for text in given.get(place, ()) if text != rows[3].document]
        assert [texts[number] for number in own if number != NONE_FOUND] == (brought or mined), place
    assert (mined_Nk != NONE_FOUND).any(1).sum() > 20


CPU = torch.device("cpu")


def test_embed_pairs_gives_unit_vectors_and_equal_texts_equal_ones(tiny_model_folder, make_pairs):
    first, second, *others = make_pairs(40).rows
    pairs = TrainingPairs(rows=(first._replace(document=second.document), second, *others))
    backbone = load_backbone(EncoderConfig(model=str(tiny_model_folder), precision="fp32"), CPU)
    vectors = embed_pairs(pairs, backbone, silent_progress)
    assert vectors.document_NV.shape == vectors.query_NV.shape == (40, vectors.document_NV.shape[1])
    assert np.allclose(np.linalg.norm(vectors.query_NV, axis=1), 1.0, atol=1e-5)
    assert np.array_equal(vectors.document_NV[0], vectors.document_NV[1])
    assert not np.array_equal(vectors.document_NV[0], vectors.document_NV[2])


def test_pairs_fingerprint_knows_texts_order_and_where_a_column_ends(make_pairs):
    first, *others = make_pairs(6).rows
    query, document = first.query + first.document[0], first.document[1:]
    changed = [
        (first._replace(query="x"), *others),
        (*others, first),
        (first._replace(query=query, document=document), *others),
        (first, *others),
    ]
    assert len({pairs_fingerprint(TrainingPairs(rows=rows)) for rows in changed}) == 4
    assert pairs_fingerprint(TrainingPairs(rows=changed[-1])) == pairs_fingerprint(make_pairs(6))
