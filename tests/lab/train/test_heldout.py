from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.context.store import ContextSet
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.lab.train.heldout import choose_heldout, embed_texts, mean_by_text, rank_scores
from cairn.pipeline.lab.train.landmark_encoder import LandmarkEncoder
from cairn.pipeline.lab.train.pairs import TrainingPairs
from cairn.pipeline.lab.train.sequences import SequenceMaker
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.context_encoder import ContextEncoder
from cairn.pipeline.model.folders.checkpoint import read_checkpoint
from cairn.pipeline.model.landmark_reader import INITIAL_GATE


def test_choose_heldout_takes_whole_documents_and_at_most_a_tenth():
    documents = tuple(f"d{place // 3}" for place in range(90))
    pairs = TrainingPairs(
        queries=tuple(map(str, range(90))), documents=documents, titles=("",) * 90, sources=("s",) * 90
    )
    chosen = choose_heldout(pairs, 50)
    assert len(chosen) == 9
    assert {documents[place] for place in chosen} & {
        documents[place] for place in range(90) if place not in chosen
    } == set()
    assert len(choose_heldout(pairs, 0)) == 0
    assert np.array_equal(chosen, choose_heldout(pairs, 50))


def test_rank_scores_equal_the_measures_written_out():
    scores = np.zeros((3, 20), np.float32)
    scores[0, 4] = 1.0  # first
    scores[1, :3], scores[1, 7] = 2.0, 1.0  # fourth
    found = rank_scores(scores, np.array([4, 7, 5]))  # the last one ties with all: beyond ten
    assert found["heldout_mrr_at_10"] == pytest.approx((1 + 1 / 4) / 3)
    assert found["heldout_ndcg_at_10"] == pytest.approx((1 + 1 / np.log2(5)) / 3)


def test_rank_scores_that_are_no_numbers_find_nothing():
    assert rank_scores(np.full((2, 3), np.nan, np.float32), np.array([0, 2])) == {
        "heldout_ndcg_at_10": 0.0,
        "heldout_mrr_at_10": 0.0,
    }
    one = np.array([[np.nan, 0.5, 0.1]], np.float32)
    assert rank_scores(one, np.array([1]))["heldout_mrr_at_10"] == 0.5  # the NaN stands before it


def test_mean_by_text_leaves_out_rows_of_no_text():
    rows = torch.eye(4)
    found = mean_by_text(rows, np.array([0, 0, -1, 1]), 2)
    assert torch.allclose(found, torch.tensor([[0.5**0.5, 0.5**0.5, 0, 0], [0, 0, 0, 1.0]]))


@pytest.mark.parametrize("num_context", [0, 5])
def test_embed_texts_are_the_vectors_ingest_gives(
    tiny_model_folder: Path, make_pairs: Callable[..., TrainingPairs], num_context: int
):
    pairs = make_pairs(12)
    checkpoint = read_checkpoint(tiny_model_folder)
    maker = SequenceMaker(checkpoint, pairs, pooling="mean", max_query_tokens=64, max_document_tokens=1_000)
    model = LandmarkEncoder(
        checkpoint, initial_gate=INITIAL_GATE
    )  # where the engine has those a base does not hold
    config = EncoderConfig(
        model=str(tiny_model_folder),
        attention="landmark",
        landmark_interval=16,
        precision="fp32",
        use_context=num_context > 0,
    )
    backbone = load_backbone(config, torch.device("cpu"))
    context, context_CD = None, None
    if num_context:
        first_stage = ContextEncoder(backbone, max_tokens=12)
        ids = tuple(map(str, range(num_context)))
        context = ContextSet(
            doc_ids=ids,
            content_sha256s=ids,
            cluster_ids_C=np.zeros(num_context, np.int32),
            embeddings_CD=first_stage.embed(pairs.documents[:num_context]),
            first_stage_fingerprint=first_stage.fingerprint,
        )
        context_CD = model.embed_documents(maker.context(range(num_context), 12)).detach()
    with torch.no_grad():
        found = embed_texts(model, *maker.documents(range(12), 16), 100, context_CD).numpy()
    encoder = DocumentEncoder(config, context, backbone)
    assert np.abs(found - encoder.encode(pairs.documents).document_vectors_NV).max() <= 1e-5
