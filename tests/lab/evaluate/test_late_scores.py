from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.lab.evaluate import late_scores
from cairn.pipeline.lab.evaluate.late_scores import score_pieces
from cairn.pipeline.lab.evaluate.retrieval_set import RetrievalSet
from cairn.pipeline.lab.token_states import embed_tokens
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.token_vectors.max_sim import max_sim, token_idf
from cairn.pipeline.types import silent_progress


def test_scores_of_any_block_size_are_max_sim_with_idf(
    judged: RetrievalSet, tiny_config: EncoderConfig, monkeypatch: pytest.MonkeyPatch
):
    encoder = replace(tiny_config, batch_tokens=64)
    backbone = load_backbone(encoder)
    asked = np.array([[0, 3], [2, 1], [1, 0]])
    states = embed_tokens(backbone, judged.texts, batch_tokens=64)
    queries = embed_tokens(backbone, judged.queries, batch_tokens=64)
    weights = token_idf(states.ids_T, states.offsets_N1, backbone.tokenizer.get_vocab_size())[queries.ids_T]
    expected = [
        max_sim(
            queries.states_TV[queries.of(query)],
            weights[queries.of(query)],
            states.states_TV,
            states.offsets_N1[own],
            states.offsets_N1[own + 1],
        )
        for query, own in enumerate(asked)
    ]
    for size in (1, 2, 100):
        monkeypatch.setattr(late_scores, "BLOCK_PIECES", size)
        found = score_pieces(encoder, judged.texts, judged.queries, asked, silent_progress)

        assert found == pytest.approx(np.array(expected), abs=2e-3)
