"""Vectors of training pairs, kept with a run, and the hard negatives that they find."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.lab.train.pair_data import (
    NONE_FOUND,
    PairVectors,
    _negatives,
    embed_pairs,
    mine_hard_negatives,
    pairs_fingerprint,
)
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.lab.train.settings import TrainConfig
from cairn.pipeline.model.backbone_loader import load_backbone
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


def test_pair_that_brings_negatives_has_none_mined_and_the_others_have():
    query, document, texts, sources = world()
    blank = ("",) * N
    pairs = TrainingPairs(queries=blank, documents=tuple(texts), titles=blank, sources=tuple(sources))
    given = np.full((N, 1), NONE_FOUND)
    given[4] = N  # the first behind the documents
    vectors = PairVectors(document_NV=np.concatenate([document, document[:1]]), query_NV=query)
    config = TrainConfig(steps=1, hard_negatives=2)
    found = _negatives(pairs, np.array([3]), vectors, given, config, silent_progress)
    mined = mine_hard_negatives(
        query, document, texts, sources, num_negatives=2, max_share=0.95, left_out=np.array([3])
    )
    mined[4] = NONE_FOUND
    assert (mined[5] != NONE_FOUND).any()
    np.testing.assert_array_equal(found, np.concatenate([mined, given], axis=1))


CPU = torch.device("cpu")


def test_embed_pairs_gives_unit_vectors_and_equal_texts_equal_ones(tiny_model_folder, make_pairs):
    pairs = make_pairs(40)
    pairs = replace(pairs, documents=(pairs.documents[1], *pairs.documents[1:]))
    backbone = load_backbone(EncoderConfig(model=str(tiny_model_folder), precision="fp32"), CPU)
    vectors = embed_pairs(pairs, backbone, silent_progress)
    assert vectors.document_NV.shape == vectors.query_NV.shape == (40, vectors.document_NV.shape[1])
    assert np.allclose(np.linalg.norm(vectors.query_NV, axis=1), 1.0, atol=1e-5)
    assert np.array_equal(vectors.document_NV[0], vectors.document_NV[1])
    assert not np.array_equal(vectors.document_NV[0], vectors.document_NV[2])


def test_pairs_fingerprint_knows_texts_order_and_where_a_column_ends(make_pairs):
    pairs = make_pairs(6)
    others = [
        replace(pairs, queries=("x", *pairs.queries[1:])),
        replace(pairs, titles=tuple(reversed(pairs.titles))),
        replace(
            pairs,
            queries=(pairs.queries[0] + "a", *pairs.queries[1:]),
            documents=(pairs.documents[0][1:], *pairs.documents[1:]),
        ),
    ]
    assert len({pairs_fingerprint(some) for some in (pairs, *others)}) == 4
    assert pairs_fingerprint(pairs) == pairs_fingerprint(make_pairs(6))
