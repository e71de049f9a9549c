from __future__ import annotations

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.lab.analysis.length_collapse import draw_pieces, draw_texts, embed_pieces, mean_cosine
from cairn.pipeline.lab.analysis.traced_pass import trace_row


def test_pieces_are_as_many_as_the_texts_hold(backbone, texts):
    generator = np.random.default_rng(0)
    tokens = draw_texts(backbone, texts, generator)
    drawn = {length: draw_pieces(tokens, length, 7, generator) for length in (16, 32, 64)}

    assert {length: len(pieces) for length, pieces in drawn.items()} == {16: 7, 32: 7, 64: 3}
    assert all(len(piece.ids) == length for length, pieces in drawn.items() for piece in pieces)


def test_cosine_is_that_of_the_encoders_own_vectors_across_documents(config, backbone):
    texts = ["stone path way mark", "river mountain walk old", "cat mat sat on"]
    twice = [" ".join([text] * 4) for text in texts]
    tokens = draw_texts(backbone, [*twice, " ".join([twice[0]] * 2)], np.random.default_rng(1))
    pieces = draw_pieces(tokens, 16, 100, np.random.default_rng(0))
    document_M = np.array([piece.document for piece in pieces])
    encoder = DocumentEncoder(
        EncoderConfig(model=config.model, precision="fp32", landmark_interval=16), backbone=backbone
    )
    vectors = encoder.encode([backbone.tokenizer.decode(piece.ids) for piece in pieces]).document_vectors_NV
    pairs = [
        float(vectors[i] @ vectors[j])
        for i in range(len(pieces))
        for j in range(len(pieces))
        if document_M[i] != document_M[j]
    ]

    assert len(pieces) == 5
    assert mean_cosine(embed_pieces(backbone, pieces), document_M) == pytest.approx(np.mean(pairs), abs=1e-5)


def test_recorded_attention_is_that_of_the_last_layer(config, backbone):
    ids = np.array([[2, 7, 9, 8, 3]])
    plain = backbone.hidden_states(ids, np.array([5]), None, 0.7)
    trace = trace_row(backbone, ids[0].tolist(), 0.7)
    assert trace.last_global is not None
    recorded = trace.last_global.weights()

    assert torch.equal(plain[0], trace.states[-1])
    assert recorded.shape == (4, 5, 5)
    assert torch.allclose(recorded.sum(-1), torch.ones(4, 5))
    assert torch.allclose(recorded, published_attention(config, ids, 0.7)[0], atol=1e-5)


def published_attention(config: EncoderConfig, ids: np.ndarray, temperature: float) -> torch.Tensor:
    """Return the last layer's attention of the same weights in transformers, its queries scaled by 1 / τ."""
    from transformers import BertModel

    model = BertModel.from_pretrained(
        config.model, attn_implementation="eager", add_pooling_layer=False
    ).eval()
    with torch.inference_mode():
        for layer in model.encoder.layer:
            layer.attention.self.query.weight /= temperature
            layer.attention.self.query.bias /= temperature
        return model(torch.from_numpy(ids), output_attentions=True).attentions[-1]
