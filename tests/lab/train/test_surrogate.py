from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig, Surrogate
from cairn.pipeline.lab.train.pair_vectors import PairVectors, embed_pairs, kept_vectors, pairs_fingerprint
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.types import silent_progress

CPU = torch.device("cpu")


@pytest.mark.parametrize("surrogate", ["static", "encoder"])
def test_embed_pairs_gives_unit_vectors_and_equal_texts_equal_ones(
    tiny_model_folder: Path, make_pairs: Callable[..., TrainingPairs], surrogate: Surrogate
):
    pairs = make_pairs(40)
    pairs = replace(pairs, documents=(pairs.documents[1], *pairs.documents[1:]))
    backbone = load_backbone(EncoderConfig(model=str(tiny_model_folder), precision="fp32"), CPU)
    vectors = embed_pairs(pairs, backbone, surrogate, silent_progress)
    assert vectors.document_NV.shape == vectors.query_NV.shape == (40, vectors.document_NV.shape[1])
    assert np.allclose(np.linalg.norm(vectors.query_NV, axis=1), 1.0, atol=1e-5)
    assert np.array_equal(vectors.document_NV[0], vectors.document_NV[1])
    assert not np.array_equal(vectors.document_NV[0], vectors.document_NV[2])


def test_kept_vectors_are_made_once_for_a_key(
    tiny_model_folder: Path, make_pairs: Callable[..., TrainingPairs], tmp_path: Path
):
    backbone = load_backbone(EncoderConfig(model=str(tiny_model_folder), precision="fp32"), CPU)
    calls: list[int] = []

    def listen(stage: str, done: int, total: int | None, unit: str) -> None:
        calls.append(done)

    def embed() -> PairVectors:
        return embed_pairs(make_pairs(20), backbone, "static", listen)

    first, again = (kept_vectors(tmp_path / "v.safetensors", "key", 20, embed) for _ in range(2))
    assert np.array_equal(first.document_NV, again.document_NV)
    assert len(calls) == 1
    kept_vectors(tmp_path / "v.safetensors", "another key", 20, embed)
    assert len(calls) == 2


def test_pairs_fingerprint_knows_texts_order_and_where_a_column_ends(
    make_pairs: Callable[..., TrainingPairs],
):
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
