from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from cairn.pipeline.config import EncoderConfig
from cairn.pipeline.encode.documents import DocumentEncoder
from cairn.pipeline.errors import SourceError
from cairn.pipeline.lab.analysis.length_collapse import measure_length_collapse
from cairn.pipeline.lab.analysis.traced_pass import trace_row
from cairn.pipeline.model.backbone_loader import load_backbone
from cairn.pipeline.model.engine.transformer import Transformer

WORDS = [
    "stone",
    "path",
    "way",
    "mark",
    "river",
    "mountain",
    "walk",
    "old",
    "cat",
    "mat",
    "sat",
    "on",
    "the",
    "a",
]


@pytest.fixture
def texts() -> list[str]:
    generator = np.random.default_rng(0)
    return [" ".join(generator.choice(WORDS, size)) for size in (20, 40, 80, 100, 100)]


@pytest.fixture
def config(tiny_model_folder: Path) -> EncoderConfig:
    return EncoderConfig(model=str(tiny_model_folder), precision="fp32")


def test_lengths_go_up_to_what_the_model_reads(texts, config):
    measured = measure_length_collapse(texts, config, temperatures=(1.0,))

    assert [row.tokens for row in measured] == [16, 32, 64, 94]


def test_pieces_are_as_many_as_the_texts_hold(texts, config):
    measured = measure_length_collapse(texts, config, temperatures=(1.0,), max_pieces=7)

    assert [row.pieces for row in measured] == [7, 7, 3, 2]


def test_cosine_is_that_of_the_encoders_own_vectors_across_documents(config):
    texts = [" ".join(WORDS[index:] + WORDS[:index] + ["old", "cat"]) for index in range(3)]
    measured = measure_length_collapse(texts, config, temperatures=(1.0,))
    vectors = (
        DocumentEncoder(EncoderConfig(model=config.model, precision="fp32", landmark_interval=16))
        .encode(texts)
        .document_vectors_NV
    )
    pairs = [float(vectors[i] @ vectors[j]) for i in range(3) for j in range(3) if i != j]

    assert [row.tokens for row in measured] == [16]
    assert measured[0].cosine == pytest.approx(np.mean(pairs), abs=1e-5)


def test_pairs_of_one_document_do_not_count(config):
    repeated, other = " ".join(["stone"] * 64), " ".join(["river", "cat"] * 8)
    vectors = DocumentEncoder(
        EncoderConfig(model=config.model, precision="fp32", landmark_interval=16)
    ).encode([repeated[:95], other])
    measured = measure_length_collapse([repeated, other], config, temperatures=(1.0,))

    assert measured[0].cosine == pytest.approx(
        float(vectors.document_vectors_NV[0] @ vectors.document_vectors_NV[1]), abs=1e-5
    )


def test_corpus_without_two_long_enough_documents_is_refused(config):
    with pytest.raises(SourceError, match="two documents of 16 tokens"):
        measure_length_collapse([" ".join(WORDS * 5), "stone"], config)


def test_one_seed_gives_one_report(texts, config):
    assert measure_length_collapse(texts, config, seed=3) == measure_length_collapse(texts, config, seed=3)


def test_temperature_moves_both_numbers(texts, config):
    plain, sharp = (measure_length_collapse(texts, config, temperatures=(value,))[1] for value in (1.0, 0.5))

    assert plain.cosine != sharp.cosine
    assert sharp.sigma_a > plain.sigma_a


def test_recorded_attention_is_that_of_the_last_layer(config):
    backbone = load_backbone(config)
    assert isinstance(backbone, Transformer)
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
